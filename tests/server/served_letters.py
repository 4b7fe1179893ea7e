"""A process that serves the scripted engine as serve.py serves a model; run by test_lifecycle.py.

    python -m tests.server.served_letters STEP_S BUILD [flags of serve.py]

BUILD: "ok", "slow" (never ends), "fail" (a load error), "config" (a setting that cannot work),
"unready" (a model that is built but cannot be served).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.server.lifecycle import serve
from jaxinfer.server.logs import configure_logs
from jaxinfer.server.settings import parse
from tests.server.house import MAX_MODEL_LEN, make_engine


def main(step_s: float, kind: str, argv: list[str]) -> int:
    settings, _ = parse(argv, {})
    configure_logs(settings.log_level, settings.log_format)

    def build(on_progress: Callable[[str], None]) -> Any:
        on_progress("reading letters")
        if kind == "slow":
            time.sleep(60)
        if kind == "fail":
            raise OSError("letters.gguf: expected 26 letters\nbut found 25")
        if kind == "config":
            raise ConfigError("page_size must fit; got 7")
        engine, runner, _, tokenizer = make_engine()
        runner.step_s = step_s
        return SimpleNamespace(
            engine=engine,
            tokenizer=tokenizer,
            model_name="letters",
            max_model_len=MAX_MODEL_LEN,
            version="v1",
            generation_config=None if kind == "unready" else {"temperature": 0.5, "top_p": 7},
            version_source=None,
            close=lambda: None,
            memory_bytes={"weights": 1000, "kv_pool": 2000},
            compile_events=lambda: {"startup": 3, "serving": 0},
            summary={
                "num_kv_tokens": 512,
                "max_concurrency": 2.0,
                "max_model_len": MAX_MODEL_LEN,
                "memory": "plenty",
                "seconds": {"read": 0.25},
            },
        )

    return serve(settings, build)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
