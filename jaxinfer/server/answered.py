"""What a call's choices were, for those who judge versions: kept only while somebody listens.

No HTTP, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxinfer.canary.facts import RequestFacts
from jaxinfer.errors import EngineFailure, JaxInferError, NotNumbers
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.stats import RequestStats

if TYPE_CHECKING:
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.state import ServerState

GRAM = 4  # tokens
WELL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class AnsweredChoice:
    """One choice of a request that was answered."""

    token_ids: tuple[int, ...]
    text: str  # as the client got it
    finish: FinishReason  # stop or length


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of which every choice has ended well."""

    model: ServedModel
    request: Request  # its prompt and sampling
    choices: tuple[AnsweredChoice, ...]


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    finish: FinishReason | None = None


class Account:
    """Of one call: told every output, it tells the listeners what ended, each choice once.

    Args:
        model: that answers.
        requests: one for each prompt, handed to the engine.
        key: that chose the version; None: the caller did, so what it asks for is not what others
            ask for, and judges no version unless its logits are not numbers.
        on_request: told of each choice; None: not.
        on_answered: told of each request that was answered well; None: not.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[Request],
        key: str | None = "",
        *,
        on_request: Callable[[RequestFacts], None] | None,
        on_answered: Callable[[Answered], None] | None,
    ):
        self._model, self._key = model, key
        self._requests = {r.request_id: r for r in requests}
        self._choices = {r.request_id: [_Choice() for _ in range(r.sampling.n)] for r in requests}
        self._on_request = on_request
        self._on_answered = on_answered

    @classmethod
    def of(
        cls, state: ServerState, model: ServedModel, requests: Sequence[Request], key: str | None
    ) -> Account | None:
        """None while nobody listens."""
        if state.on_request is None and state.on_answered is None:
            return None
        return cls(
            model,
            requests,
            key,
            on_request=None if state.on_request is None else state.note_request,
            on_answered=None if state.on_answered is None else state.note_answered,
        )

    def take(self, output: RequestOutput) -> None:
        """Something was read."""
        choice = self._choices[output.request_id][output.index]
        choice.token_ids.extend(output.token_ids)
        choice.texts.append(output.text)
        if output.finish_reason is None:
            return
        is_not_numbers = isinstance(output.error, NotNumbers)
        self._end(choice, output.finish_reason, output.stats, is_not_numbers)
        self._answer(output.request_id)

    def fail(self, error: JaxInferError) -> None:
        """All that was open ended with `error`. A dead engine is the version's; a server that
        shuts down is not.
        """
        if isinstance(error, EngineFailure):
            self._end_open(FinishReason.ERROR)

    def leave(self) -> None:
        """The client is gone, and what is open with it."""
        self._end_open(FinishReason.ABORT)

    def _end_open(self, reason: FinishReason) -> None:
        for choices in self._choices.values():
            for choice in choices:
                if choice.finish is None:
                    self._end(choice, reason, None, False)

    def _end(
        self,
        choice: _Choice,
        reason: FinishReason,
        stats: RequestStats | None,
        is_not_numbers: bool,
    ) -> None:
        choice.finish = reason
        if self._on_request is None or (self._key is None and not is_not_numbers):
            return
        self._on_request(
            RequestFacts(
                version=self._model.version,
                finish=reason,
                num_output_tokens=len(choice.token_ids),
                repetition=repetition(choice.token_ids),
                ttft_s=None if stats is None else stats.ttft_s,
                is_not_numbers=is_not_numbers,
                e2e_s=None if stats is None else stats.e2e_s,
                key=self._key or "",
            )
        )

    def _answer(self, request_id: str) -> None:
        choices = self._choices[request_id]
        if self._on_answered is None or not all(c.finish in WELL for c in choices):
            return
        found = tuple(
            AnsweredChoice(tuple(c.token_ids), "".join(c.texts), c.finish)
            for c in choices
            if c.finish is not None
        )
        self._on_answered(Answered(self._model, self._requests[request_id], found))


def refused_by(version: str, key: str) -> RequestFacts:
    """Of a call that a version refuses and another one answers: its users would miss that."""
    return RequestFacts(version, FinishReason.ERROR, 0, 0.0, None, key=key)


def repetition(token_ids: Sequence[int]) -> float:
    """The share of the 4-grams that stood there before, 0..1; 0 for fewer than four tokens."""
    grams = list(zip(*(token_ids[i:] for i in range(GRAM)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
