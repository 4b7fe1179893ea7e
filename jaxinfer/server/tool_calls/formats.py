"""The formats of tool calls that are known, and which of them a chat template speaks of.

Pure. A template is looked at for the marks that it tells its model to write; one that speaks of
another format (XML of Qwen3-Coder or GLM, say) has none of these.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.server.tool_calls import hermes, llama3, mistral
from jaxinfer.server.tool_calls.grammar import ARGUMENTS, NAME, CallStyle
from jaxinfer.server.tool_calls.parser import ToolParser

PARSERS = ("auto", "hermes", "llama3_json", "mistral", "none")
_OBJECT = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls, and how they are read and forced."""

    name: str
    parser: type[ToolParser]
    style: CallStyle
    new_id: Callable[[], str]


def format_for(parser: str, template: str) -> ToolFormat | None:
    """The format of a model.

    Args:
        parser: one of PARSERS.
        template: the model's chat template; "" if it has none.
    Returns: None for "none", and for "auto" if the template speaks of no known format.
    """
    name = _detected(template) if parser == "auto" else parser
    if name == "hermes":
        call = (
            hermes.OPEN,
            '\n{"name": "',
            NAME,
            '", "arguments": ',
            ARGUMENTS,
            "}\n",
            hermes.CLOSE,
        )
        return ToolFormat(name, hermes.HermesParser, CallStyle(call, between=("\n",)), _long_id)
    if name == "llama3_json":
        call = ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}")
        return ToolFormat(name, llama3.Llama3Parser, CallStyle(call, is_single=True), _long_id)
    if name == "mistral":
        return ToolFormat(name, mistral.MistralParser, _mistral_style(template), mistral.new_id)
    return None


def _detected(template: str) -> str:
    if mistral.CALLS in template:
        return "mistral"
    has_xml = "<function=" in template or "<arg_key>" in template
    if hermes.OPEN in template and "arguments" in template and not has_xml:
        return "hermes"
    if "ipython" in template and '"parameters": ' in template:
        return "llama3_json"
    return "none"


def _mistral_style(template: str) -> CallStyle:
    if mistral.ARGS in template:
        return CallStyle((mistral.CALLS, NAME, mistral.ARGS, ARGUMENTS))
    bracket = " [" if f"{mistral.CALLS} [" in template else "["
    return CallStyle(_OBJECT, opens=(mistral.CALLS, bracket), between=(", ",), closes=("]",))


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
