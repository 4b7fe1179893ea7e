"""`--compile-only`: makes the compiled programs ready for a later start, and opens no port.

Programs are made by a function that serve.py passes in; nothing here knows JAX.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from jaxinfer.server.settings import ServeSettings
from jaxinfer.server.startup import EXIT_OK, Voice, exit_code_of, one_line, ready_lines

log = logging.getLogger(__name__)

CompileAhead = Callable[[Callable[[str], None]], Mapping[str, Any]]
"""Takes a function that is told what is being done; gives facts for people, and `seconds`."""


def compile_only(
    settings: ServeSettings,
    compile_ahead: CompileAhead,
    *,
    intro: str = "",
    out: TextIO = sys.stderr,
) -> int:
    """Args: as of `serve`. Returns: the exit code, as of `serve`."""
    voice = Voice(out, as_log=settings.log_format == "json")
    if intro:
        voice.say(intro)
    start_s = time.monotonic()
    try:
        summary = compile_ahead(lambda text: voice.say(f"{text} ..."))
    except Exception as error:
        log.debug("compiling failed", exc_info=error)
        voice.complain(one_line(error))
        return exit_code_of(error)
    for line in ready_lines(summary, time.monotonic() - start_s):
        voice.say(line)
    return EXIT_OK
