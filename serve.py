"""`python serve.py`: flags -> configuration -> build -> app -> uvicorn. No logic of its own.

The only place that reads the environment for settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.server.build_contract import Built
from jaxinfer.server.compile_only import compile_only
from jaxinfer.server.lifecycle import serve
from jaxinfer.server.logs import configure_logs
from jaxinfer.server.settings import parse
from jaxinfer.server.startup import EXIT_BAD_FLAGS, config_line


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns: the exit code."""
    try:
        settings, resolved = parse(argv, environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_FLAGS
    configure_logs(settings.log_level, settings.log_format)
    intro = config_line(resolved)

    def compile_programs(on_progress: Callable[[str], None]) -> Mapping[str, Any]:
        from jaxinfer.build import compile_ahead

        return compile_ahead(settings.engine, on_progress)

    def build(on_progress: Callable[[str], None]) -> Built:
        from jaxinfer.build import build as build_model  # JAX: not before the port is open

        return build_model(settings.engine, on_progress)

    if settings.compile_only:
        return compile_only(settings, compile_programs, intro=intro)
    return serve(settings, build, intro=intro)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:  # before the server listens for signals
        sys.exit(130)
