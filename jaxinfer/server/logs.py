"""Log lines for people or as JSON, one line each, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", "exception"?} per line."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(level: str, form: str) -> None:
    """Sets up the root logger of this process; libraries speak from WARNING on.

    Args:
        level: a key of LEVELS.
        form: "console" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.WARNING))
    for name in ("jaxinfer", "checkpoints", "pallas_kernels"):
        logging.getLogger(name).setLevel(LEVELS[level])
    if level == "debug":
        logging.getLogger("uvicorn").setLevel(logging.INFO)  # a line per request
