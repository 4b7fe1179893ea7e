"""Programs compiled for GPUs that are not here, and what the compiler made of them.

XLA compiles for a described device; ptxas and nvdisasm then tell registers, spills and opcodes.
Nothing is run: this knows no speed and no result. See `python -m bench.aot_report`.
"""
