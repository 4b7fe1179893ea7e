"""`python -m jaxinfer`: what an operator asks of a running server. serve.py starts one."""

from __future__ import annotations

import os
import sys

from jaxinfer.version_command import run
from jaxinfer.version_flags import parse

if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:]), os.environ, out=sys.stdout, err=sys.stderr))
