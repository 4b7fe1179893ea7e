"""A call that has been parsed, before its prompts are token ids, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from jaxinfer.config import SamplingParams
from jaxinfer.server.guided import guided_field
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.protocol import ChatRequest, CompletionRequest, parse
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.time_limits import TimeLimits
from jaxinfer.server.tool_use import tool_parser
from jaxinfer.server.version_wish import CONVERSATION_HEADER, VersionWish, key_of
from jaxinfer.server.writers import Shape

if TYPE_CHECKING:
    from jaxinfer.constraint import Constraint
    from jaxinfer.server.tool_calls.parser import ToolParser


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A body, before a model is chosen for it."""

    fields: ChatRequest | CompletionRequest
    unknown: frozenset[str]  # names of fields
    wish: VersionWish
    key: str  # of the user or conversation

    @classmethod
    def read(
        cls,
        body: bytes,
        wire: type[ChatRequest | CompletionRequest],
        headers: Headers,
        names: Collection[str],
    ) -> ParsedCall:
        """`names`: of the served model. Raises: InvalidRequest."""
        fields, unknown = parse(body, wire)
        wish = VersionWish.read(headers, fields.model, names)
        return cls(fields, unknown, wish, key_of(fields, headers.get(CONVERSATION_HEADER)))

    def pinned_to(self, version: str) -> ParsedCall:
        """The same call, and no other version may answer it."""
        return replace(self, wish=replace(self.wish, pinned=version))


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A parsed call and the model that answers it, before its prompts are token ids."""

    fields: ChatRequest | CompletionRequest
    model: str  # the name it asked for, without a version
    sampling: SamplingParams
    priority_class: PriorityClass
    time_limits: TimeLimits  # from arrival
    num_prompts: int
    key: str | None  # that chose the version; None: the caller did

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.sampling.n

    @property
    def uses_max_completion_tokens(self) -> bool:
        return getattr(self.fields, "max_completion_tokens", None) is not None


def most_tokens(sampling: SamplingParams, served: ServedModel) -> int:
    """That a choice may produce, before it is known how long its prompt is."""
    bounds = (served.max_model_len - 1, sampling.max_tokens, sampling.output_cap)
    return min(bound for bound in bounds if bound is not None)


async def constraint_of(served: ServedModel, plan: CallPlan) -> Constraint | None:
    """Compiled off the event loop. Raises: InvalidRequest naming the client's field."""
    grammar = plan.sampling.grammar
    if grammar is None:
        return None
    field = guided_field(plan.fields)
    param = "tools" if field is None else field.name
    return await served.compile(grammar, param)


def shape_of(served: ServedModel, plan: CallPlan) -> Shape:
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


def _tool_parsers(served: ServedModel, plan: CallPlan) -> list[ToolParser]:
    fields = plan.fields
    if not isinstance(fields, ChatRequest):
        return []
    parsers = [tool_parser(served, fields) for _ in range(plan.num_choices)]
    return [parser for parser in parsers if parser is not None]
