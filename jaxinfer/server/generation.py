"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

The two differ in how prompts are made and how answers are written; the way through the house is
one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from jaxinfer.config import SamplingParams, Truncate
from jaxinfer.constraint import Constraint
from jaxinfer.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    JaxInferError,
    Overloaded,
)
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.server.admission import Permit
from jaxinfer.server.body import read_body
from jaxinfer.server.call_head import CallHead
from jaxinfer.server.echo import EchoOnly, prompt_texts
from jaxinfer.server.guided import guided_field
from jaxinfer.server.open_calls import names_of, owner_of
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.prompts import check_length, check_token_ids, encode_chat
from jaxinfer.server.protocol import ChatRequest, CompletionRequest, parse
from jaxinfer.server.replies import body_of, encode, json_reply
from jaxinfer.server.request_record import note
from jaxinfer.server.sampling import capped_sampling, chat_sampling, completion_sampling
from jaxinfer.server.sse import ClientGone, Departure, EventSender, ReaderStalled
from jaxinfer.server.state import ServedModel, ServerState
from jaxinfer.server.time_limits import TimeLimits
from jaxinfer.server.tool_use import tool_parser, with_tools
from jaxinfer.server.writers import ChatWriter, CompletionWriter, Shape, Writer

if TYPE_CHECKING:
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.request_stream import RequestStream
    from jaxinfer.server.tool_calls.parser import ToolParser

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A parsed call, before its prompts are token ids."""

    fields: ChatRequest | CompletionRequest
    model: str  # the name it asked for
    sampling: SamplingParams
    priority_class: PriorityClass
    time_limits: TimeLimits  # from arrival
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
    truncate: Truncate  # unless a flag says otherwise

    def __init__(self, state: ServerState):
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = self._state.served().engine.clock
        arrival_s = clock()
        head = CallHead.read(Headers(scope=scope), self._state)
        admission = self._state.admission
        with (
            self._state.let_in(),
            admission.acquire(head.claim.presumed, best=head.judged, limits=head.limits) as permit,
        ):
            body = await read_body(scope, receive, self._state.limits)
            if body is None:
                permit.release("left")
                return
            served = self._state.served()
            plan = await served.for_body(body, lambda: self._plan(served, body, head))
            note(priority_class=plan.priority_class.name)
            for name in self._state.new_unknown_fields(plan.unknown):
                log.warning("field %r is not known and has no effect (said once)", name[:80])
            permit.settle(
                plan.priority_class,
                plan.num_choices,
                param="n" if plan.num_prompts == 1 else "prompt",
                num_tokens=_most_tokens(plan.sampling, served),
                limits=plan.time_limits.after(clock() - arrival_s),
            )
            with Departure(receive) as departure:
                try:
                    await self._answer(served, plan, arrival_s, departure, scope, send, permit)
                except ClientGone as gone:
                    permit.release("left")
                    if isinstance(gone, ReaderStalled):
                        self._state.metrics.on_reader_cut()
                    log.info("499 %s: %s", scope["path"], gone)

    def _plan(self, served: ServedModel, body: bytes, head: CallHead) -> _Plan:
        fields, unknown = parse(body, self.wire)
        priority_class = head.claim.settled(fields.priority)
        return _Plan(
            fields=fields,
            model=served.check_name(fields.model),
            sampling=self._capped(self._sampling(served, fields), priority_class),
            priority_class=priority_class,
            time_limits=head.limits_of(priority_class, fields.timeout, self._state),
            num_prompts=self._num_prompts(fields),
            unknown=unknown,
        )

    def _capped(self, sampling: SamplingParams, found: PriorityClass) -> SamplingParams:
        limits = self._state.limits
        return capped_sampling(
            sampling,
            server_cap=limits.max_output_tokens,
            class_cap=found.max_output_tokens,
            truncate=limits.truncate or self.truncate,
        )

    async def _answer(
        self,
        served: ServedModel,
        plan: _Plan,
        arrival_s: float,
        departure: Departure,
        scope: Scope,
        send: Send,
        permit: Permit,
    ) -> None:
        writer = self.writer(_shape(served, plan))
        names = (writer.id, *names_of(scope))
        with self._state.calls.open(names, owner_of(scope)) as call:
            prompts = await served.off_loop(lambda: self._token_ids(served, plan.fields))
            departure.check()
            writer.tally.prompt = sum(map(len, prompts))
            permit.charge(writer.tally.prompt)
            if isinstance(plan.fields, CompletionRequest) and plan.fields.echo:
                writer.echoes = await prompt_texts(served, plan.fields)
                if plan.fields.is_echo_only:
                    answer = self._send_stream if plan.fields.stream else self._send_whole
                    await answer(EchoOnly(writer), departure, send)
                    permit.release("left")
                    return
            constraint = await _constraint(served, plan)
            departure.check()
            requests = tuple(self._requests(writer.id, plan, prompts, arrival_s, constraint))
            stream = served.engine.submit(*requests)
            call.on_abort(lambda: served.engine.end(*(r.request_id for r in requests)))
            calls = Reading(stream, writer, plan.sampling.n, on_tokens=permit.produced)
            try:
                departure.call(stream.close)
                await self._deliver(stream, calls, plan, departure, send)
                if calls.is_aborted:
                    permit.release("left")
                permit.fail(calls.failure)
            finally:
                stream.close()
                calls.note(arrival_s)

    async def _deliver(
        self,
        stream: RequestStream,
        calls: Reading,
        plan: _Plan,
        departure: Departure,
        send: Send,
    ) -> None:
        await self._accepted(stream, plan)
        departure.check()
        if plan.fields.stream:
            await self._send_stream(calls, departure, send)
        else:
            await self._send_whole(calls, departure, send)

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
        deadline_s, queue_deadline_s = plan.time_limits.deadlines(arrival_s)
        for number, token_ids in enumerate(prompts):
            yield Request(
                request_id=f"{call_id}-{number}",
                token_ids=token_ids,
                sampling=plan.sampling,
                arrival_s=arrival_s,
                priority=plan.priority_class.priority,
                deadline_s=deadline_s,
                queue_deadline_s=queue_deadline_s,
                cache_salt=plan.fields.cache_salt or "",
                constraint=constraint,
            )

    async def _send_whole(
        self, reading: Reading | EchoOnly, departure: Departure, send: Send
    ) -> None:
        while (outputs := await reading.next(None)) is not None:
            for index, output in outputs:
                reading.writer.add(index, output)
        departure.check()
        reply = json_reply(reading.writer.whole())
        await send({"type": "http.response.start", "status": 200, "headers": reply.raw_headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _send_stream(
        self, reading: Reading | EchoOnly, departure: Departure, send: Send
    ) -> None:
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
    truncate = "sentence"
    prompt_field = "messages"

    def _sampling(self, served: ServedModel, fields: ChatRequest) -> SamplingParams:
        params = chat_sampling(fields, served.defaults, served.tokenizer.vocab_size)
        return with_tools(served, fields, params)

    def _num_prompts(self, fields: ChatRequest) -> int:
        return 1

    def _encode(self, served: ServedModel, fields: ChatRequest) -> list[list[int]]:
        return [encode_chat(served, fields)]


class CompletionEndpoint(GenerationEndpoint):
    """POST /v1/completions."""

    wire = CompletionRequest
    writer = CompletionWriter
    truncate = "token"
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
    """Outputs of a call's prompts, with the index of the choice in the whole answer.

    Args:
        on_tokens: told how many tokens have come.
    """

    def __init__(
        self,
        stream: RequestStream,
        writer: Writer,
        n: int,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
    ):
        self.writer = writer
        self._on_tokens = on_tokens
        self._stream = stream
        self._n = n
        self._failure: JaxInferError | None = None
        self._first_token_s: float | None = None  # of the choices that have ended
        self._ends: set[FinishReason] = set()

    @property
    def failure(self) -> JaxInferError | None:
        """What has ended a choice badly."""
        return self._failure

    @property
    def is_aborted(self) -> bool:
        """Whether a choice was ended before it was done, as its caller asked."""
        return FinishReason.ABORT in self._ends

    async def next(self, timeout_s: float | None) -> list[tuple[int, RequestOutput]] | None:
        """[] after `timeout_s` of silence, None at the end.

        Raises: what ended a choice badly, after the outputs that came before it.
        """
        if self._failure is not None:
            raise self._failure
        outputs = await self._stream.read(timeout_s)
        if outputs is None:
            return None
        self._on_tokens(sum(len(output.token_ids) for output in outputs))
        good: list[tuple[int, RequestOutput]] = []
        for output in outputs:
            self._note_end(output)
            self._failure = failure_of(output)
            if self._failure is not None:
                break
            good.append((self._index(output), output))
        if self._failure is not None and not good:
            raise self._failure
        return good

    def note(self, arrival_s: float) -> None:
        """For the access log: what the call took and gave, and how it ended."""
        first_s = self._first_token_s
        note(
            id=self.writer.id,
            prompt_tokens=self.writer.tally.prompt,
            output_tokens=self.writer.tally.completion,
            ttft_s=None if first_s is None else first_s - arrival_s,
            finish="+".join(sorted(self._ends)) or FinishReason.ABORT.value,
        )

    def _note_end(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._ends.add(output.finish_reason)
        if output.stats is not None and output.stats.first_token_s is not None:
            times = (self._first_token_s, output.stats.first_token_s)
            self._first_token_s = min(s for s in times if s is not None)

    def _index(self, output: RequestOutput) -> int:
        prompt = int(output.request_id.rpartition("-")[2])
        return prompt * self._n + output.index


def failure_of(output: RequestOutput) -> JaxInferError | None:
    """The error of a choice that ended neither by stop nor by length, nor as its caller asked."""
    reason = output.finish_reason
    if reason in (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        return None
    if isinstance(output.error, Overloaded):  # it waited for its turn as long as it may
        seconds = output.error.retry_after_s
        return Overloaded(output.error.message, retry_after_s=seconds, code="queue_timeout")
    if output.error is not None:
        return output.error
    if reason is FinishReason.TIMEOUT:
        return DeadlineExceeded("the request's time limit passed before it was finished")
    return EngineFailure(f"the request was ended by the engine ({reason})")


def _most_tokens(sampling: SamplingParams, served: ServedModel) -> int:
    """That a choice may produce, before it is known how long its prompt is."""
    bounds = (served.max_model_len - 1, sampling.max_tokens, sampling.output_cap)
    return min(bound for bound in bounds if bound is not None)


async def _constraint(served: ServedModel, plan: _Plan) -> Constraint | None:
    """Compiled off the event loop. Raises: InvalidRequest naming the client's field."""
    grammar = plan.sampling.grammar
    if grammar is None:
        return None
    field = guided_field(plan.fields)
    param = "tools" if field is None else field.name
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
        tool_parsers=_tool_parsers(served, plan),
    )


def _tool_parsers(served: ServedModel, plan: _Plan) -> list[ToolParser]:
    fields = plan.fields
    if not isinstance(fields, ChatRequest):
        return []
    parsers = [tool_parser(served, fields) for _ in range(plan.num_choices)]
    return [parser for parser in parsers if parser is not None]
