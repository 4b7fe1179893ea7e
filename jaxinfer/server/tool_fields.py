"""`tools` and `tool_choice` as wire types, and what they must be.

No engine, no template: every 4xx about their form leaves here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from jaxinfer.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 2**10  # of all of them as JSON
# "$" alone would take a last line break; "\Z" is no ECMA regular expression.
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: no parameters
    strict: bool | None = None  # without meaning here


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        """As templates print it."""
        function = self.function
        shown = {
            "name": function.name,
            "description": function.description,
            "parameters": self.schema,
        }
        return {
            "type": "function",
            "function": {name: value for name, value in shown.items() if value is not None},
        }

    @property
    def schema(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises: InvalidRequest naming the field, for what the types do not say."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools holds {len(tools)} functions; at most {MAX_TOOLS} are allowed", param="tools"
        )
    names = [tool.function.name for tool in tools]
    for i, tool in enumerate(tools):
        if tool.function.name in names[:i]:
            raise InvalidRequest(
                f"tools names the function {tool.function.name!r} twice", param="tools"
            )
        _check_schema(tool.schema, f"tools[{i}].function.parameters")
    _check_size(tools)
    _check_choice(names, choice)


def _check_schema(schema: dict[str, Any], where: str) -> None:
    if schema.get("type") != "object":
        raise InvalidRequest(
            f'{where} must be a JSON schema with "type": "object"; '
            f"got type {schema.get('type')!r:.80}",
            param="tools",
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(value, dict | bool) for value in properties.values()
    ):
        raise InvalidRequest(f"{where}.properties must map names to JSON schemas", param="tools")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{where}.required must be a list of names", param="tools")


def _check_size(tools: Sequence[Tool]) -> None:
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools takes {size} bytes as JSON; at most {MAX_TOOLS_BYTES} are allowed",
            param="tools",
        )


def _check_choice(names: Sequence[str], choice: ToolChoice | None) -> None:
    if choice in (None, "none"):
        return
    if not names:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r:.80}, a function that tools does not hold",
            param="tool_choice",
        )
