"""Log lines for people or as JSON, one line each, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time

from jaxinfer.server.request_record import CURRENT

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message"} per line; of a request also its ids, in the access log
    its facts; "exception" where there is one.
    """

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """Time, level, message; of a request also its id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        ids = _ids()
        return f"{line} [{ids['request_id']}]" if ids else line


def set_level(level: str) -> None:
    """Of our own packages; libraries speak from WARNING on.

    Args:
        level: a key of LEVELS.
    """
    for name in ("jaxinfer", "checkpoints", "pallas_kernels"):
        logging.getLogger(name).setLevel(LEVELS[level])


def configure_logs(level: str, form: str) -> None:
    """Sets up the root logger of this process; libraries speak from WARNING on.

    Args:
        level: a key of LEVELS.
        form: "console" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.WARNING))
    set_level(level)


def _ids() -> dict[str, str]:
    """Of the request that the line is about, if any."""
    record = CURRENT.get()
    return {} if record is None else record.ids()
