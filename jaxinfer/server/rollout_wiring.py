"""The rollouts of a server, made of what it was started with.

No HTTP and no JAX.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from jaxinfer.config import cache_folder
from jaxinfer.rollout_log import RolloutLog
from jaxinfer.server.decision_book import before_this_start
from jaxinfer.server.rollouts import Rollouts
from jaxinfer.server.shadow import Shadow
from jaxinfer.version_order import VersionOrder

if TYPE_CHECKING:
    from jaxinfer.server.build_contract import Built
    from jaxinfer.server.listening import Compare, Judge
    from jaxinfer.server.metrics import Metrics
    from jaxinfer.server.serve_model import ModelServing
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.settings import ServeSettings
    from jaxinfer.server.shadow_file import ShadowFile
    from jaxinfer.server.state import ServerState

log = logging.getLogger(__name__)


def make_rollouts(
    state: ServerState,
    settings: ServeSettings,
    built: Built,
    serving: ModelServing,
    metrics: Metrics,
    shadow_file: ShadowFile | None,
) -> Rollouts:
    """Not started. `state`: the built model is served."""
    log_file = RolloutLog(settings.rollout_log or _default_log(settings, built.model_name))
    before = before_this_start(log_file.records(), built.version)
    if before is not None:
        log.warning("before this start: %s; it is %s that serves now", before, built.version)
    return Rollouts(
        state,
        VersionOrder(settings.engine.source),
        source=built.version_source,
        log=log_file,
        make_engine=lambda core: serving.engine(core, metrics.for_engine()),
        make_model=serving.version,
        free_first=built.close,
        compare=_comparing(shadow_file),
        before=before,
        standby_s=settings.standby_s,
    )


def _comparing(record: ShadowFile | None) -> Compare:
    def compare(stable: ServedModel, canary: ServedModel, share: float, judge: Judge) -> Shadow:
        return Shadow(
            stable,
            canary,
            share=share,
            random=Random(),
            on_facts=judge.note_shadow,
            on_failure=judge.note_request,
            record=record,
        )

    return compare


def _default_log(settings: ServeSettings, model_name: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", model_name)
    return cache_folder(settings.engine) / "rollouts" / f"{name}.jsonl"
