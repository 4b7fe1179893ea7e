"""The many ways in which a client says what an answer must look like -> one Guided.

OpenAI's response_format, vLLM's guided_* and structured_outputs, llama.cpp's grammar and
json_schema. An empty value means "not used"; two of them that are used exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxinfer.errors import InvalidRequest
from jaxinfer.guided import Guided
from jaxinfer.server.protocol import SamplingFields

_UNUSED = (None, False, "", [], {})
_MAKERS: Mapping[str, Callable[[Any], Guided]] = {
    "guided_json": Guided.json_schema,
    "guided_regex": lambda text: Guided.of({"regex": text}),
    "guided_choice": Guided.choice,
    "guided_grammar": lambda text: Guided.of({"grammar": text}),
    "structured_outputs": lambda value: _structured(value),
    "grammar": lambda text: Guided.of({"grammar": text}),
    "json_schema": Guided.json_schema,
    "response_format": lambda value: _formatted(value),
}
_STRUCTURED = {  # vLLM's names -> ours
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


class GuidedField(NamedTuple):
    """What was asked for, and the field that asked."""

    name: str
    guided: Guided


def guided_field(fields: SamplingFields) -> GuidedField | None:
    """None: the answer is free. Raises: InvalidRequest naming the field at fault."""
    used = [*_used(fields)]
    if not used:
        return None
    if len(used) > 1:
        names = " and ".join(name for name, _ in used)
        raise InvalidRequest(f"{names} exclude each other; send one of them", param=used[1][0])
    ((name, value),) = used
    try:
        return GuidedField(name, _MAKERS[name](value))
    except InvalidRequest as error:
        message = error.message.replace("guided", name, 1)
        raise InvalidRequest(message, param=name) from None


def _used(fields: SamplingFields) -> Iterator[tuple[str, Any]]:
    for name in _MAKERS:
        value = getattr(fields, name)
        if name == "structured_outputs" and value:  # vLLM's clients send all its names, most null
            value = _without_unused(value)
        is_text = name == "response_format" and value == {"type": "text"}
        if not is_text and value not in _UNUSED:
            yield name, value


def _without_unused(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given for name, given in value.items() if given not in _UNUSED}


def _formatted(value: Mapping[str, Any]) -> Guided:
    """OpenAI's. A json_object with a `schema` is llama.cpp's form of a json_schema."""
    kind, schema = value.get("type"), value.get("schema")
    if kind == "json_object":
        return Guided.json_object() if schema is None else Guided.json_schema(schema)
    if kind != "json_schema":
        raise InvalidRequest(
            f"guided must have the type text, json_object or json_schema; got {str(kind)[:80]!r}"
        )
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(
            "guided of the type json_schema must hold an object json_schema.schema; got none"
        )
    return Guided.json_schema(schema)


def _structured(value: Mapping[str, Any]) -> Guided:
    unknown = sorted(value.keys() - _STRUCTURED.keys())
    if unknown:
        raise InvalidRequest(
            f"guided may hold {', '.join(_STRUCTURED)}; {unknown[0][:80]!r} is not supported"
        )
    return Guided.of({_STRUCTURED[name]: given for name, given in value.items()})
