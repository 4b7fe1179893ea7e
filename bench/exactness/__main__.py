"""`python -m bench.exactness`: every circumstance on one model, and what exactness costs there."""

from __future__ import annotations

import sys

from bench.exactness.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
