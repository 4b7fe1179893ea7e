"""`python -m bench.kernels`: kernels against their roofline, and against other forms."""

from __future__ import annotations

import sys

from bench.kernels.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
