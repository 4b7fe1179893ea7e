"""The tools of one request: what its template gets, how its answer is read and how it is forced.

No HTTP. Here meet the request's fields, the model's format and the sampling parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.config import SamplingParams
from jaxinfer.errors import InvalidRequest
from jaxinfer.guided import Guided
from jaxinfer.server.tool_calls.formats import PARSERS, ToolFormat
from jaxinfer.server.tool_calls.grammar import call_grammar
from jaxinfer.server.tool_calls.mistral import with_short_ids
from jaxinfer.server.tool_fields import NamedToolChoice, Tool, check_tools

if TYPE_CHECKING:
    from jaxinfer.server.protocol import ChatRequest
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.tool_calls.parser import ToolParser


def offered_tools(fields: ChatRequest) -> list[Tool]:
    """Those that the model is told of: with tool_choice "none", no tools."""
    return [] if fields.tool_choice == "none" else fields.tools or []


def with_tools(
    served: ServedModel, fields: ChatRequest, sampling: SamplingParams
) -> SamplingParams:
    """`sampling` for a request with tools: marks of calls have text, a forced call is a grammar.

    Raises: InvalidRequest for tools that are malformed, or that this model cannot use.
    """
    check_tools(fields.tools or [], fields.tool_choice)
    tools = offered_tools(fields)
    if not tools:
        return sampling
    known = _format(served)
    control_ids = served.tokenizer.control_ids(known.parser.marks)
    sampling = replace(sampling, kept_special_ids=tuple(control_ids.values()))
    if fields.tool_choice in (None, "auto"):
        return sampling
    if isinstance(fields.tool_choice, NamedToolChoice):
        tools = [t for t in tools if t.function.name == fields.tool_choice.function.name]
    grammar = call_grammar(
        known.style,
        {tool.function.name: tool.schema for tool in tools},
        is_single=len(tools) == 1 or fields.parallel_tool_calls is False,
        control_ids=control_ids,
    )
    return with_tool_constraint(sampling, grammar)


def with_tool_constraint(sampling: SamplingParams, grammar: str) -> SamplingParams:
    """`sampling` that admits only what `grammar` (Lark) does.

    Raises: InvalidRequest if the request has a grammar of its own, or if this one is too long.
    """
    if sampling.guided is not None:
        raise InvalidRequest(
            "a forced tool_choice excludes response_format and guided fields; send one of them",
            param="tool_choice",
        )
    try:
        return replace(sampling, guided=Guided("grammar", grammar))
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("guided", "tools", 1), param="tools") from None


def tool_parser(served: ServedModel, fields: ChatRequest) -> ToolParser | None:
    """A reader of one choice; None: the request has no tools."""
    tools = offered_tools(fields)
    if not tools:
        return None
    known = _format(served)
    hides = fields.skip_special_tokens is not False
    return known.parser(
        names=[tool.function.name for tool in tools],
        hidden=served.tokenizer.control_ids(known.parser.marks) if hides else (),
        new_id=known.new_id,
        max_calls=1 if fields.parallel_tool_calls is False else None,
    )


def messages_for_template(served: ServedModel, messages: list[dict[str, Any]]) -> list[Any]:
    """`messages` with ids of calls that the model's template takes."""
    known = served.tool_format
    return with_short_ids(messages) if known and known.name == "mistral" else messages


def check_template(served: ServedModel) -> None:
    """Raises: InvalidRequest if the model would not see the tools."""
    template = served.tokenizer.chat_template
    if template is not None and not template.reads_tools:
        raise InvalidRequest(
            "this model's chat template does not know tools; send none, or give the server a "
            "template that does with --chat-template",
            param="tools",
        )


def _format(served: ServedModel) -> ToolFormat:
    check_template(served)
    if served.tool_format is None:
        raise InvalidRequest(
            "this server does not know how this model writes calls of tools; send no tools, or "
            f"name the format with --tool-call-parser ({', '.join(PARSERS[1:-1])})",
            param="tools",
        )
    return served.tool_format
