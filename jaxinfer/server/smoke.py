"""The first requests of a new version, before anybody's: does it say what it should?

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jaxinfer.config import SamplingParams
from jaxinfer.errors import InvalidRequest
from jaxinfer.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxinfer.server.served_model import ServedModel

PRIORITY = 10  # behind those of all classes; by aging it has its turn at last
MAX_TOKENS = 256  # of a recorded text
MAX_RECORDED = 256
SMOKE_S = 600.0  # for all of them: they run behind everybody else
MAX_SHOWN = 80  # characters of a text in a reason
NUM_PLAIN_TOKENS = 8
PLAIN_PROMPTS = ("The", "1 + 1 =", "def add(a, b):")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a version must say to a prompt, or to a conversation."""

    prompt: str | tuple[Mapping[str, Any], ...]  # or the messages
    text: str
    max_tokens: int


class SmokeFailed(Exception):
    """The reason, in one line: what was expected, what was found."""


async def smoke(model: ServedModel, recorded: Sequence[Recorded]) -> None:
    """Lets a version answer, greedily and behind everybody else, on its own engine.

    Args:
        recorded: texts that it must give back; none: three prompts that it must answer somehow.
    Raises: SmokeFailed, with the first text that is not what it should be; Unavailable.
    """
    plain = tuple(Recorded(prompt, "", NUM_PLAIN_TOKENS) for prompt in PLAIN_PROMPTS)
    for number, wanted in enumerate(recorded or plain, 1):
        found = await _answer(model, wanted, f"prompt {number} of {len(recorded or plain)}")
        if recorded and found != wanted.text:
            raise SmokeFailed(_difference(number, len(recorded), wanted.text, found))


async def _answer(model: ServedModel, wanted: Recorded, where: str) -> str:
    engine = model.engine
    try:
        token_ids = await model.off_loop(lambda: _encode(model, wanted))
        now = engine.clock()
        request = Request(
            f"smoke-{uuid4().hex}",
            tuple(token_ids),
            SamplingParams(max_tokens=wanted.max_tokens, temperature=0.0),
            arrival_s=now,
            deadline_s=now + SMOKE_S,
            priority=PRIORITY,
            version=model.version,
            is_shadow=True,
        )
        outputs = [output async for output in engine.submit(request)]
    except InvalidRequest as error:
        raise SmokeFailed(f"{where} is refused: {error}") from None
    last = outputs[-1]
    if last.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise SmokeFailed(f"{where} ends with {last.finish_reason}: {last.error}")
    return "".join(output.text for output in outputs)


def _encode(model: ServedModel, wanted: Recorded) -> list[int]:
    if isinstance(wanted.prompt, str):
        return model.tokenizer.encode(wanted.prompt)
    return model.tokenizer.encode_chat([dict(message) for message in wanted.prompt])


def _difference(number: int, num_recorded: int, expected: str, found: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    start = max((min(len(expected), len(found)) if at is None else at) - MAX_SHOWN // 2, 0)
    shown = (repr(text[start : start + MAX_SHOWN]) for text in (expected, found))
    return (
        f"recorded output {number} of {num_recorded}: expected {next(shown)}, found {next(shown)}"
        + (f" from character {start} on" if start else "")
    )
