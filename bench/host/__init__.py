"""What the host does for each step, without a device: `python -m bench.host`.

Knows the engine from inside, which the measures of speed do not.

    costs      an engine beside a runner that costs nothing, timed in parts
    command    the command line and the table
"""
