"""A server in a process of its own, the load that is put on it, and what came back.

Through HTTP on the loopback address only; bench.soak and bench.overload are made of it.
"""
