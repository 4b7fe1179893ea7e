"""What an answer must look like, as a client says it: plain data, before anything is compiled.

No JAX, and no grammar library: jaxinfer/guidance.py makes a Constraint of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxinfer.errors import InvalidRequest

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_CHARS: Mapping[Kind, int] = {
    "json_schema": 2**17,
    "json_object": 0,
    "regex": 2**14,
    "choice": 2**17,
    "grammar": 2**16,
}
"""Of the text of each kind."""


@dataclass(frozen=True, slots=True)
class Guided:
    """One rule that the whole text of an answer follows.

    >>> Guided.of({"regex": "[0-9]{4}"})
    >>> Guided.of({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}})

    Raises: InvalidRequest if the text is longer than MAX_CHARS.
    """

    kind: Kind
    text: str = ""
    # json_schema: its JSON. regex: Rust's syntax. choice: a JSON list of strings. grammar: Lark, as
    # llguidance reads it, or GBNF, as llama.cpp does. json_object: nothing, for any JSON object.

    def __post_init__(self) -> None:
        limit = MAX_CHARS[self.kind]
        if len(self.text) > limit:
            raise _bad(f"a {self.kind} of at most {limit} characters; got {len(self.text)}")

    @classmethod
    def of(cls, value: Any) -> Guided:
        """A Guided, or a mapping with one of its kinds and what that kind takes.

        Raises: InvalidRequest for anything else.
        """
        if isinstance(value, Guided):
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise _bad(f"exactly one of {', '.join(KINDS)}; got {_shown(value)}")
        ((kind, given),) = value.items()
        if kind == "json_schema":
            return cls.json_schema(given)
        if kind == "json_object":
            return cls.json_object(given)
        if kind == "choice":
            return cls.choice(given)
        if kind not in ("regex", "grammar"):
            raise _bad(f"exactly one of {', '.join(KINDS)}; got {_shown(kind)}")
        if not isinstance(given, str) or not given:
            raise _bad(f"a {kind} that is a non-empty string; got {_shown(given)}")
        return cls(kind, given)

    @classmethod
    def json_schema(cls, schema: Any) -> Guided:
        """A schema as a mapping, or as the JSON text of one."""
        if isinstance(schema, Mapping):
            try:
                return cls("json_schema", json.dumps(schema, separators=(",", ":")))
            except (TypeError, ValueError, RecursionError) as error:
                raise _bad(f"a json_schema of JSON values: {error}") from None
        if not isinstance(schema, str):
            raise _bad(f"a json_schema that is an object; got {_shown(schema)}")
        return cls("json_schema", schema)

    @classmethod
    def json_object(cls, is_wanted: Any = True) -> Guided:
        """Any JSON object."""
        if is_wanted is not True:
            raise _bad(f"true for json_object; got {_shown(is_wanted)}")
        return cls("json_object")

    @classmethod
    def choice(cls, texts: Any) -> Guided:
        """One of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not is_list or not texts or not all(isinstance(t, str) and t for t in texts):
            raise _bad(f"a choice of non-empty strings; got {_shown(texts)}")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))


def _bad(expected: str) -> InvalidRequest:
    return InvalidRequest(f"guided must be {expected}", param="guided")


def _shown(value: Any) -> str:
    shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return shown if len(shown) <= 80 else shown[:77] + "..."
