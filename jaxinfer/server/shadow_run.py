"""A request that no user sent, from its submission to its end.

No HTTP and no JAX. It comes after everything that users ask for, and no metric of requests counts
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxinfer.request_rules import MAX_PRIORITY
from jaxinfer.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxinfer.errors import JaxInferError
    from jaxinfer.outputs import TokenLogprob
    from jaxinfer.server.served_model import ServedModel

DEADLINE_S = 60.0


@dataclass(slots=True)
class ShadowRun:
    """What one version made of a request of one choice."""

    finish: FinishReason = FinishReason.ABORT
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list["TokenLogprob"])
    error: JaxInferError | None = None


async def run_on(model: ServedModel, request: Request) -> ShadowRun:
    """Runs `request` on a model's version; ended with `timeout` after DEADLINE_S.

    Raises: what the engine refuses it with. When it is cancelled, so is the request.
    """
    now = model.engine.clock()
    shadow = replace(
        request,
        arrival_s=now,
        priority=MAX_PRIORITY,
        deadline_s=now + DEADLINE_S,
        queue_deadline_s=None,
        version=model.version,
        is_shadow=True,
    )
    stream, run = model.engine.submit(shadow), ShadowRun()
    try:
        while (outputs := await stream.read()) is not None:
            for output in outputs:
                run.token_ids += output.token_ids
                run.text += output.text
                run.logprobs += output.logprobs
                run.finish, run.error = output.finish_reason or run.finish, output.error
    finally:
        stream.close()
    return run
