"""`python -m jaxinfer`: what an operator asks of a running server. serve.py starts one."""

from __future__ import annotations

import os
import sys

from jaxinfer.version_command import EXIT_OK, run
from jaxinfer.version_flags import parse


def main() -> int:
    """Returns: the exit code."""
    try:
        return run(parse(sys.argv[1:]), os.environ, out=sys.stdout, err=sys.stderr)
    except BrokenPipeError:  # who read has enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
