"""Chat messages as clients send them -> as chat templates expect them.

Host only: no JAX here, no Jinja either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.errors import InvalidRequest


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with what templates expect: content is one str, tool-call arguments are a dict, and
    tool_calls are there only if there are some.

    Text parts are joined with a newline (as vLLM does). None or no content is "" where tool calls
    stand in for it.

    Raises: InvalidRequest naming the message and the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object; got {message!r:.80}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(
            f"{where}.role must be a non-empty string; got {role!r:.80}", param="messages"
        )
    plain = {**map_texts(message, str), "content": _plain_content(message, where)}
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be a list", param="messages")
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return plain


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"{where} must be an object with function.name, as in the answer that it came from; "
            f"got {call!r:.80}",
            param="messages",
        )
    arguments = _plain_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _plain_content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(
            _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    raise InvalidRequest(
        f"{where}.content must be a string or a list of text parts; got {content!r:.80}",
        param="messages",
    )


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be an object; got {part!r:.80}", param="messages")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise InvalidRequest(
            f"{where} has type {kind!r:.80}; this model reads only parts of type 'text'",
            param="messages",
        )
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string; got {text!r:.80}", param="messages")
    return text


def _plain_arguments(arguments: Any) -> Any:
    """OpenAI sends a JSON string, templates expect an object; what is no JSON object stays, since
    an answer that was cut off comes back too.
    """
    if arguments is None or arguments == "":
        return {}
    try:
        parsed = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested dicts and lists with every text (keys too) replaced by `change` of it.

    Raises: InvalidRequest if they are nested too deeply to be copied.
    """
    try:
        return _mapped(value, change)
    except RecursionError as error:
        raise InvalidRequest("messages or tools are nested too deeply", param="messages") from error


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change): _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
