"""An answer in the shape of chat or of plain completions, whole or in chunks.

No sending, no engine: outputs come in, payloads go out. One writer per HTTP call.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET, Struct, UnsetType

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.logprobs import Speller, chat_logprobs, completion_logprobs
from jaxinfer.server.replies import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    WireFinish,
    encode,
)
from jaxinfer.server.tool_calls.pieces import CallDelta, Piece

if TYPE_CHECKING:
    from jaxinfer.outputs import RequestOutput, TokenLogprob, Truncation
    from jaxinfer.server.tool_calls.parser import ToolParser

_WIRE_FINISH: dict[FinishReason, WireFinish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",  # the caller asked for it: it gets what there is
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What does not change during a call."""

    model: str
    version: str  # of the weights
    num_choices: int  # prompts times n
    wants_logprobs: bool
    speller: Speller
    include_usage: bool = False  # a last chunk with usage
    continuous_usage: bool = False  # usage in every chunk
    tool_parsers: Sequence[ToolParser] = ()  # of chat: one per choice, or none


@dataclass(slots=True)
class _Gained:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # not yet sent
    offset: int = 0  # characters of the tokens sent with logprobs
    finish: WireFinish | None = None
    truncation: Truncation | UnsetType = UNSET  # said beside the finish reason

    def keep(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self.texts.append(piece)
        elif piece.id is not None and piece.name is not None:
            self.calls.append(ToolCall(piece.id, FunctionCall(piece.name, piece.arguments)))
        else:
            self.calls[piece.index].function.arguments += piece.arguments


@dataclass(slots=True)
class Tally:
    """Tokens of a call."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def usage(self) -> Usage:
        return Usage.of(prompt=self.prompt, completion=self.completion, cached=self.cached)


class Writer(ABC):
    """Feed every output to `add` (one reply at the end) or to `chunks` (a stream), not to both."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, shape: Shape):
        self.shape = shape
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.tally = Tally()
        self.echoes: Sequence[str] = ()  # of completions: the text of each prompt, or none
        self._created = int(time.time())
        self._gained = [_Gained() for _ in range(shape.num_choices)]

    def opening(self) -> list[bytes]:
        """Chunks before any output."""
        return []

    def add(self, index: int, output: RequestOutput) -> None:
        """Keeps what choice `index` gained."""
        gained = self._count(index, output)
        gained.logprobs.extend(output.logprobs)
        for piece in self._pieces(index, gained, output):
            gained.keep(piece)

    def whole(self) -> Completion:
        """The reply, when every choice has finished."""
        choices = [self._choice(i, g) for i, g in enumerate(self._gained)]
        return self._envelope(self.whole_object, choices, self.tally.usage())

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """Text and calls first, then the finish reason in a chunk of its own.

        Logprobs wait for the next text or call, or for the end.
        """
        gained = self._count(index, output)
        gained.logprobs.extend(output.logprobs)
        found: list[bytes] = []
        pieces = self._pieces(index, gained, output)
        if not pieces and gained.finish and gained.logprobs:
            pieces = [""]
        for piece in pieces:
            found.append(self._chunk([self._piece_choice(index, piece, gained)]))
            gained.logprobs = []
        if gained.finish is not None:
            found.append(self._chunk([self._finish_choice(index, gained)]))
        return found

    def closing(self) -> list[bytes]:
        """Chunks after the last output."""
        if not self.shape.include_usage:
            return []
        return [encode(self._envelope(self.chunk_object, [], self.tally.usage()))]

    def _count(self, index: int, output: RequestOutput) -> _Gained:
        gained = self._gained[index]
        self.tally.completion += len(output.token_ids)
        if output.finish_reason is not None:
            gained.finish = _WIRE_FINISH[output.finish_reason]
            gained.truncation = output.truncation or UNSET
            if output.stats is not None and output.index == 0:
                self.tally.cached += output.stats.num_cached_tokens
        return gained

    def _pieces(self, index: int, gained: _Gained, output: RequestOutput) -> list[Piece]:
        return [output.text] if output.text else []

    def _chunk(self, choices: Sequence[Struct]) -> bytes:
        usage: Usage | UnsetType | None = None if self.shape.include_usage else UNSET
        if self.shape.continuous_usage:
            usage = self.tally.usage()
        return encode(self._envelope(self.chunk_object, choices, usage))

    def _envelope(
        self, kind: str, choices: Sequence[Struct], usage: Usage | UnsetType | None
    ) -> Completion:
        shape = self.shape
        return Completion(
            self.id, kind, self._created, shape.model, list(choices), shape.version, usage
        )

    @abstractmethod
    def _choice(self, index: int, gained: _Gained) -> Struct: ...

    @abstractmethod
    def _piece_choice(self, index: int, piece: Piece, gained: _Gained) -> Struct: ...

    @abstractmethod
    def _finish_choice(self, index: int, gained: _Gained) -> Struct: ...


class ChatWriter(Writer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[bytes]:
        start = Delta(role="assistant", content="")
        return [self._chunk([ChatDelta(i, start)]) for i in range(self.shape.num_choices)]

    def _choice(self, index: int, gained: _Gained) -> ChatChoice:
        assert gained.finish is not None
        content = "".join(gained.texts)
        message = ChatMessage(content)
        if gained.calls:
            message = ChatMessage(content or None, tool_calls=gained.calls)
        return ChatChoice(index, message, gained.finish, self._logprobs(gained), gained.truncation)

    def _piece_choice(self, index: int, piece: Piece, gained: _Gained) -> ChatDelta:
        delta = Delta(content=piece) if isinstance(piece, str) else _call_delta(piece)
        return ChatDelta(index, delta, logprobs=self._logprobs(gained))

    def _pieces(self, index: int, gained: _Gained, output: RequestOutput) -> list[Piece]:
        if not self.shape.tool_parsers:
            return super()._pieces(index, gained, output)
        parser = self.shape.tool_parsers[index]
        pieces = parser.push(output.text)
        if gained.finish is not None:
            pieces += parser.finish()
            ended_itself = gained.finish == "stop" and not isinstance(output.stop, str)
            if ended_itself and parser.has_whole_calls:
                gained.finish = "tool_calls"
        return pieces

    def _finish_choice(self, index: int, gained: _Gained) -> ChatDelta:
        return ChatDelta(index, Delta(), gained.finish, truncation=gained.truncation)

    def _logprobs(self, gained: _Gained):
        if not self.shape.wants_logprobs:
            return None
        return chat_logprobs(gained.logprobs, self.shape.speller)


def _call_delta(piece: CallDelta) -> Delta:
    function = FunctionCallDelta(piece.arguments, UNSET if piece.name is None else piece.name)
    call = ToolCallDelta(piece.index, function)
    if piece.id is not None:
        call.id, call.type = piece.id, "function"
    return Delta(tool_calls=[call])


class CompletionWriter(Writer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def opening(self) -> list[bytes]:
        if not self.echoes:
            return []
        return [
            self._chunk([CompletionChoice(i, self._echo(i))]) for i in range(self.shape.num_choices)
        ]

    def _echo(self, index: int) -> str:
        if not self.echoes:
            return ""
        return self.echoes[index * len(self.echoes) // self.shape.num_choices]

    def _choice(self, index: int, gained: _Gained) -> CompletionChoice:
        text = self._echo(index) + "".join(gained.texts)
        return CompletionChoice(
            index, text, gained.finish, self._logprobs(gained), gained.truncation
        )

    def _piece_choice(self, index: int, piece: Piece, gained: _Gained) -> CompletionChoice:
        assert isinstance(piece, str), "only chat has calls"
        return CompletionChoice(index, piece, logprobs=self._logprobs(gained))

    def _finish_choice(self, index: int, gained: _Gained) -> CompletionChoice:
        return CompletionChoice(index, "", gained.finish, truncation=gained.truncation)

    def _logprobs(self, gained: _Gained):
        if not self.shape.wants_logprobs:
            return None
        found = completion_logprobs(gained.logprobs, self.shape.speller, offset=gained.offset)
        gained.offset += sum(map(len, found.tokens))
        return found
