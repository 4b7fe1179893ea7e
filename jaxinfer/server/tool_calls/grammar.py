"""Lark grammars (as llguidance reads them) that force calls in a model's own format.

Pure: the text of a grammar; nothing is compiled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME, ARGUMENTS = "{name}", "{arguments}"
# Blanks as models were taught them, and no others: one that likes blanks would write only those.
_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a model writes calls; a part is literal text, a mark, NAME or ARGUMENTS."""

    call: Sequence[str]
    opens: Sequence[str] = ()
    between: Sequence[str] = ()
    closes: Sequence[str] = ()
    is_single: bool = False  # the model makes one call at most


def call_grammar(
    style: CallStyle,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    is_single: bool,
    control_ids: Mapping[str, int],
) -> str:
    """An answer of one call or more, and nothing else.

    Args:
        schemas: JSON schema of the arguments by the function's name; only these may be called.
        is_single: exactly one call.
        control_ids: ids of those marks that are control tokens.
    """

    def spelled(parts: Sequence[str]) -> Iterator[str]:
        for part in parts:
            control = control_ids.get(part)
            yield json.dumps(part) if control is None else f"<[{control}]>"

    more = (
        "" if is_single or style.is_single else f"({' '.join([*spelled(style.between), 'call'])})*"
    )
    start = [*spelled(style.opens), "call", more, *spelled(style.closes)]
    lines = [
        f"start: {' '.join(filter(None, start))}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(schemas)))}",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        named = [name if part == NAME else part for part in style.call]
        place = named.index(ARGUMENTS)
        parts = [*spelled(named[:place]), f"arguments_{i}", *spelled(named[place + 1 :])]
        lines.append(f"call_{i}: {' '.join(parts)}")
        lines.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': _SPACING})}")
    return "\n".join(lines)
