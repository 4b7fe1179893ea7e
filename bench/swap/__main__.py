"""`python -m bench.swap`."""

import sys

from bench.swap.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
