"""Seeded damage to files: of their bytes, or of the JSON in them."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        1 << 31,
        (1 << 32) - 1,
        1 << 62,
        1 << 64,
        -(1 << 63),
        10**400,
    ),
    *(0.5, 1e308, float("inf"), float("nan"), "", "x", "\ud800", "../x", "/etc/passwd", "a\x00b"),
    *([], {}, [[]], [{}], {"a": {}}, [1, "b", None], "x" * 10_000, [0] * 10_000),
)
HOSTILE_WORDS = (
    0,
    1,
    3,
    255,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 60,
    (1 << 63) - 1,
    (1 << 64) - 1,
)


def damaged_bytes(random: Random, raw: bytes, head: int) -> bytes:
    """Some of the first `head` bytes are others, or the file is cut, or a piece moved or gone."""
    found = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(max(1, min(head, len(found))))
        kind = random.randrange(6)
        if kind == 0:
            found[at : at + 1] = random.randbytes(1)
        elif kind == 1:
            form = random.choice(("<I", "<Q"))
            word = random.choice(HOSTILE_WORDS) % (1 << 8 * struct.calcsize(form))
            found[at : at + struct.calcsize(form)] = struct.pack(form, word)
        elif kind == 2:
            del found[at : at + random.choice((1, 4, 8, 100))]
        elif kind == 3:
            found[at:at] = found[at : at + random.choice((1, 8, 100))]
        elif kind == 4:
            found[at : at + 8] = random.randbytes(8)
        else:
            del found[random.randrange(len(found) or 1) :]
    return bytes(found)


def damaged_json(random: Random, value: Any) -> Any:
    """A copy with some places changed, gone, or in another's place."""
    found = [copy.deepcopy(value)]
    for _ in range(random.choice((1, 1, 2, 4))):
        places = list(_places(found))
        holder, key = random.choice(places)
        kind = random.randrange(6)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1:
            other, at = random.choice(places)
            holder[key], other[at] = other[at], holder[key]
        elif kind == 2:
            other, at = random.choice(places)
            holder[key] = copy.deepcopy(other[at])
        elif kind == 3 and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif kind == 4 and type(holder[key]) is int:
            holder[key] += random.choice((-1, 1, holder[key], 1 << 40, -holder[key]))
        else:
            holder[key] = random.choice(HOSTILE_VALUES)
    return found[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where a value stands; of long lists (vocabularies), only some."""
    if isinstance(value, list | dict):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys[:: max(1, len(keys) // 50)]:
            yield value, key
            yield from _places(value[key])
