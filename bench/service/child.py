"""`python -m bench.service.child RATES [flags of serve.py]`: serve.py, with steps that fail.

RATES is a JSON object of FaultRates' fields.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from bench.service.faults import FaultRates, Faults
from jaxinfer.server.build_contract import Built
from jaxinfer.server.lifecycle import serve
from jaxinfer.server.logs import configure_logs
from jaxinfer.server.settings import parse


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code, as of serve.py."""
    faults = Faults(FaultRates(**json.loads(argv[0])))
    settings, _ = parse(argv[1:], {})
    configure_logs(settings.log_level, settings.log_format)

    def build(on_progress: Callable[[str], None]) -> Built:
        from jaxinfer.build import build as build_model

        built = build_model(settings.engine, on_progress)
        runner = built.runner
        vars(runner).update(
            dispatch=faults.around_dispatch(runner.dispatch),
            collect=faults.around_collect(runner.collect),
        )
        return built

    return serve(settings, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
