"""`python -m bench.host`: what the host does for each step."""

from __future__ import annotations

import sys

from bench.host.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
