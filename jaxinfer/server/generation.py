"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

The two differ in how prompts are made and how answers are written; the way through the house is
one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from jaxinfer.config import SamplingParams
from jaxinfer.constraint import Constraint
from jaxinfer.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    JaxInferError,
)
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.server.body import read_body
from jaxinfer.server.guided import guided_field
from jaxinfer.server.prompts import check_length, check_token_ids, encode_chat
from jaxinfer.server.protocol import ChatRequest, CompletionRequest, parse
from jaxinfer.server.replies import body_of, encode, json_reply
from jaxinfer.server.sampling import chat_sampling, completion_sampling
from jaxinfer.server.sse import ClientGone, Departure, EventSender
from jaxinfer.server.state import ServedModel, ServerState
from jaxinfer.server.writers import ChatWriter, CompletionWriter, Shape, Writer

if TYPE_CHECKING:
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.request_stream import RequestStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A parsed call, before its prompts are token ids."""

    fields: ChatRequest | CompletionRequest
    model: str  # the name it asked for
    sampling: SamplingParams
    num_prompts: int
    unknown: frozenset[str]  # names of fields

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.sampling.n

    @property
    def uses_max_completion_tokens(self) -> bool:
        return getattr(self.fields, "max_completion_tokens", None) is not None


class GenerationEndpoint(ABC):
    """An ASGI endpoint.

    What it raises before the answer has begun becomes an HTTP error outside.
    """

    wire: type[ChatRequest | CompletionRequest]
    writer: type[Writer]
    prompt_field: str

    def __init__(self, state: ServerState):
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = self._state.served().engine.clock()
        with self._state.admission.acquire() as permit:
            body = await read_body(scope, receive, self._state.limits)
            if body is None:
                return
            served = self._state.served()
            plan = await served.for_body(body, lambda: self._plan(served, body))
            for name in self._state.new_unknown_fields(plan.unknown):
                log.warning("field %r is not known and has no effect (said once)", name[:80])
            permit.grow(plan.num_choices, param="n" if plan.num_prompts == 1 else "prompt")
            with Departure(receive) as departure:
                try:
                    await self._answer(served, plan, arrival_s, departure, send)
                except ClientGone as gone:
                    log.info("499 %s: %s", scope["path"], gone)

    def _plan(self, served: ServedModel, body: bytes) -> _Plan:
        fields, unknown = parse(body, self.wire)
        return _Plan(
            fields=fields,
            model=served.check_name(fields.model),
            sampling=self._sampling(served, fields),
            num_prompts=self._num_prompts(fields),
            unknown=unknown,
        )

    async def _answer(
        self,
        served: ServedModel,
        plan: _Plan,
        arrival_s: float,
        departure: Departure,
        send: Send,
    ) -> None:
        prompts = await served.off_loop(lambda: self._token_ids(served, plan.fields))
        constraint = await _constraint(served, plan)
        departure.check()
        writer = self.writer(_shape(served, plan))
        writer.tally.prompt = sum(map(len, prompts))
        requests = self._requests(writer.id, plan, prompts, arrival_s, constraint)
        stream = served.engine.submit(*requests)
        try:
            departure.call(stream.close)
            await self._accepted(stream, plan)
            departure.check()
            calls = Reading(stream, writer, plan.sampling.n)
            if plan.fields.stream:
                await self._send_stream(calls, departure, send)
            else:
                await self._send_whole(calls, departure, send)
        finally:
            stream.close()

    def _token_ids(
        self, served: ServedModel, fields: ChatRequest | CompletionRequest
    ) -> list[tuple[int, ...]]:
        """Runs on a thread of the pool."""
        prompts = self._encode(served, fields)
        check_length(max(map(len, prompts)), served.max_model_len, self.prompt_field)
        return list(map(tuple, prompts))

    async def _accepted(self, stream: RequestStream, plan: _Plan) -> None:
        """Raises: what the engine refuses, naming the field that the client sent."""
        try:
            await stream.accepted()
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = self.prompt_field
            elif error.param == "max_tokens" and plan.uses_max_completion_tokens:
                error.param = "max_completion_tokens"
            raise

    def _requests(
        self,
        call_id: str,
        plan: _Plan,
        prompts: list[tuple[int, ...]],
        arrival_s: float,
        constraint: Constraint | None,
    ) -> Iterator[Request]:
        timeout_s = self._state.limits.request_timeout_s
        for number, token_ids in enumerate(prompts):
            yield Request(
                request_id=f"{call_id}-{number}",
                token_ids=token_ids,
                sampling=plan.sampling,
                arrival_s=arrival_s,
                priority=plan.fields.priority or 0,
                deadline_s=None if timeout_s is None else arrival_s + timeout_s,
                cache_salt=plan.fields.cache_salt or "",
                constraint=constraint,
            )

    async def _send_whole(self, reading: Reading, departure: Departure, send: Send) -> None:
        while (outputs := await reading.next(None)) is not None:
            for index, output in outputs:
                reading.writer.add(index, output)
        departure.check()
        reply = json_reply(reading.writer.whole())
        await send({"type": "http.response.start", "status": 200, "headers": reply.raw_headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _send_stream(self, reading: Reading, departure: Departure, send: Send) -> None:
        """The status waits for the first output (or the first ping), so that an early failure is an
        HTTP error.
        """
        limits = self._state.limits
        writer = reading.writer
        sender = EventSender(send, stall_s=limits.stall_s)
        outputs = await reading.next(limits.ping_s)
        departure.check()
        await sender.start()
        await sender.events(writer.opening())
        try:
            while outputs is not None:
                if outputs:
                    await sender.events(c for i, o in outputs for c in writer.chunks(i, o))
                else:
                    await sender.ping()
                outputs = await reading.next(limits.ping_s)
        except JaxInferError as error:
            await sender.finish([encode(body_of(error))])
            return
        departure.check()
        await sender.finish(writer.closing())

    @abstractmethod
    def _sampling(self, served: ServedModel, fields: Any) -> SamplingParams: ...

    @abstractmethod
    def _num_prompts(self, fields: Any) -> int: ...

    @abstractmethod
    def _encode(self, served: ServedModel, fields: Any) -> list[list[int]]:
        """Token ids of every prompt; runs on a thread of the tokenizer pool."""


class ChatEndpoint(GenerationEndpoint):
    """POST /v1/chat/completions."""

    wire = ChatRequest
    writer = ChatWriter
    prompt_field = "messages"

    def _sampling(self, served: ServedModel, fields: ChatRequest) -> SamplingParams:
        return chat_sampling(fields, served.defaults, served.tokenizer.vocab_size)

    def _num_prompts(self, fields: ChatRequest) -> int:
        return 1

    def _encode(self, served: ServedModel, fields: ChatRequest) -> list[list[int]]:
        return [encode_chat(served, fields)]


class CompletionEndpoint(GenerationEndpoint):
    """POST /v1/completions."""

    wire = CompletionRequest
    writer = CompletionWriter
    prompt_field = "prompt"

    def _sampling(self, served: ServedModel, fields: CompletionRequest) -> SamplingParams:
        return completion_sampling(fields, served.defaults, served.tokenizer.vocab_size)

    def _num_prompts(self, fields: CompletionRequest) -> int:
        return len(fields.prompts())

    def _encode(self, served: ServedModel, fields: CompletionRequest) -> list[list[int]]:
        add_special = fields.add_special_tokens is not False
        return [
            served.tokenizer.encode(prompt, add_special_tokens=add_special)
            if isinstance(prompt, str)
            else check_token_ids(prompt, served.tokenizer.vocab_size, "prompt")
            for prompt in fields.prompts()
        ]


class Reading:
    """Outputs of a call's prompts, with the index of the choice in the whole answer."""

    def __init__(self, stream: RequestStream, writer: Writer, n: int):
        self.writer = writer
        self._stream = stream
        self._n = n
        self._failure: JaxInferError | None = None

    async def next(self, timeout_s: float | None) -> list[tuple[int, RequestOutput]] | None:
        """[] after `timeout_s` of silence, None at the end.

        Raises: what ended a choice badly, after the outputs that came before it.
        """
        if self._failure is not None:
            raise self._failure
        outputs = await self._stream.read(timeout_s)
        if outputs is None:
            return None
        good: list[tuple[int, RequestOutput]] = []
        for output in outputs:
            self._failure = failure_of(output)
            if self._failure is not None:
                break
            good.append((self._index(output), output))
        if self._failure is not None and not good:
            raise self._failure
        return good

    def _index(self, output: RequestOutput) -> int:
        prompt = int(output.request_id.rpartition("-")[2])
        return prompt * self._n + output.index


def failure_of(output: RequestOutput) -> JaxInferError | None:
    """The error of a choice that ended neither by stop nor by length."""
    reason = output.finish_reason
    if reason in (None, FinishReason.STOP, FinishReason.LENGTH):
        return None
    if output.error is not None:
        return output.error
    if reason is FinishReason.TIMEOUT:
        return DeadlineExceeded("the request's time limit passed before it was finished")
    return EngineFailure(f"the request was ended by the engine ({reason})")


async def _constraint(served: ServedModel, plan: _Plan) -> Constraint | None:
    """Compiled off the event loop. Raises: InvalidRequest naming the client's field."""
    grammar = plan.sampling.grammar
    if grammar is None:
        return None
    field = guided_field(plan.fields)
    param = "guided" if field is None else field.name
    return await served.compile(grammar, param)


def _shape(served: ServedModel, plan: _Plan) -> Shape:
    options = plan.fields.stream_options
    return Shape(
        model=plan.model,
        version=served.version,
        num_choices=plan.num_choices,
        wants_logprobs=plan.sampling.logprobs is not None,
        speller=served.tokenizer,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )
