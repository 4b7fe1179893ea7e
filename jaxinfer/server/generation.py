"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

The two differ in how prompts are made and how answers are written; the way through the house is
one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from jaxinfer.config import SamplingParams, Truncate
from jaxinfer.constraint import Constraint
from jaxinfer.errors import (
    InvalidRequest,
    JaxInferError,
)
from jaxinfer.scheduling.request import Request
from jaxinfer.server.answered import Account, refused_by
from jaxinfer.server.body import read_body
from jaxinfer.server.call_head import CallHead
from jaxinfer.server.call_plan import (
    CallPlan,
    ParsedCall,
    constraint_of,
    most_tokens,
    shape_of,
)
from jaxinfer.server.caller import Caller
from jaxinfer.server.echo import EchoOnly, prompt_texts
from jaxinfer.server.open_calls import names_of, owner_of
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.prompts import check_length, check_token_ids, encode_chat
from jaxinfer.server.protocol import ChatRequest, CompletionRequest
from jaxinfer.server.reading import Reading
from jaxinfer.server.replies import body_of, encode, json_reply
from jaxinfer.server.request_record import note, note_version
from jaxinfer.server.sampling import capped_sampling, chat_sampling, completion_sampling
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.sse import ClientGone, Departure, EventSender, ReaderStalled
from jaxinfer.server.state import ServerState
from jaxinfer.server.time_limits import TimeLimits
from jaxinfer.server.tool_use import with_tools
from jaxinfer.server.writers import ChatWriter, CompletionWriter, Writer

if TYPE_CHECKING:
    from jaxinfer.request_stream import RequestStream

log = logging.getLogger(__name__)


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
            parsed = await self._parsed(body, head)
            caller = Caller(body, head, arrival_s, clock, scope, receive, send, permit)
            if not await caller.passes(self._state.door, self._left(parsed, caller)):
                permit.release("left")
                return
            served = parsed.wish.choose(self._state.versions, parsed.key)
            try:
                await self._serve(served, parsed, caller)
            except InvalidRequest as error:  # of before the answer: the stable one may be able to
                stable = self._state.served()
                if parsed.wish.pinned is not None or served is stable:
                    raise
                log.info("the canary %s refuses a call: %s", served.version, error)
                await self._serve(stable, parsed.pinned_to(stable.version), caller)
                self._state.note_request(refused_by(served.version, parsed.key))

    def _left(self, parsed: ParsedCall, caller: Caller) -> TimeLimits:
        asked = caller.head.claim.settled(parsed.fields.priority)
        return caller.left(caller.head.limits_of(asked, parsed.fields.timeout, self._state))

    async def _serve(self, served: ServedModel, parsed: ParsedCall, caller: Caller) -> None:
        note_version(served.version)
        with self._state.versions.call(served):
            plan = await served.for_body(
                caller.body, lambda: self._plan(served, parsed, caller.head)
            )
            note(priority_class=plan.priority_class.name)
            caller.permit.settle(
                plan.priority_class,
                plan.num_choices,
                param="n" if plan.num_prompts == 1 else "prompt",
                num_tokens=most_tokens(plan.sampling, served),
                limits=caller.left(plan.time_limits),
            )
            await self._attend(served, plan, caller)

    async def _parsed(self, body: bytes, head: CallHead) -> ParsedCall:
        """On the stable model's threads, which must not end meanwhile."""
        stable = self._state.served()
        with self._state.versions.call(stable):
            parsed = await stable.for_body(
                body, lambda: ParsedCall.read(body, self.wire, head.headers, stable.names)
            )
        for name in self._state.new_unknown_fields(parsed.unknown):
            log.warning("field %r is not known and has no effect (said once)", name[:80])
        return parsed

    async def _attend(self, served: ServedModel, plan: CallPlan, caller: Caller) -> None:
        """Answers as long as the client is there."""
        with Departure(caller.receive) as departure:
            try:
                await self._answer(served, plan, caller, departure)
            except ClientGone as gone:
                caller.permit.release("left")
                if isinstance(gone, ReaderStalled):
                    self._state.metrics.on_reader_cut()
                log.info("499 %s: %s", caller.scope["path"], gone)

    def _plan(self, served: ServedModel, parsed: ParsedCall, head: CallHead) -> CallPlan:
        fields = parsed.fields
        priority_class = head.claim.settled(fields.priority)
        return CallPlan(
            fields=fields,
            model=served.check_name(parsed.wish.name),
            sampling=self._capped(self._sampling(served, fields), priority_class),
            priority_class=priority_class,
            time_limits=head.limits_of(priority_class, fields.timeout, self._state),
            num_prompts=self._num_prompts(fields),
            key=None if parsed.wish.pinned is not None else parsed.key,
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
        self, served: ServedModel, plan: CallPlan, caller: Caller, departure: Departure
    ) -> None:
        writer, permit, send = self.writer(shape_of(served, plan)), caller.permit, caller.send
        names = (writer.id, *names_of(caller.scope))
        with self._state.calls.open(names, owner_of(caller.scope)) as call:
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
            constraint = await constraint_of(served, plan)
            departure.check()
            requests = tuple(
                self._requests(writer.id, served, plan, prompts, caller.arrival_s, constraint)
            )
            stream = served.engine.submit(*requests)
            call.on_abort(lambda: served.engine.end(*(r.request_id for r in requests)))
            calls = Reading(stream, writer, plan.sampling.n, on_tokens=permit.produced)
            try:
                departure.call(stream.close)
                await self._accepted(stream, plan)
                departure.check()
                calls.tell(Account.of(self._state, served, requests, plan.key))
                answer = self._send_stream if plan.fields.stream else self._send_whole
                await answer(calls, departure, send)
                if calls.is_aborted:
                    permit.release("left")
                permit.fail(calls.failure)
            finally:
                stream.close()
                calls.close()
                calls.note(caller.arrival_s)

    def _token_ids(
        self, served: ServedModel, fields: ChatRequest | CompletionRequest
    ) -> list[tuple[int, ...]]:
        """Runs on a thread of the pool."""
        prompts = self._encode(served, fields)
        check_length(max(map(len, prompts)), served.max_model_len, self.prompt_field)
        return list(map(tuple, prompts))

    async def _accepted(self, stream: RequestStream, plan: CallPlan) -> None:
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
        served: ServedModel,
        plan: CallPlan,
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
                version=served.version,
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
