"""`python -m bench.quantization`: the table of formats."""

from __future__ import annotations

import sys

from bench.quantization.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
