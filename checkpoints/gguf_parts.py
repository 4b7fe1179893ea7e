"""The files of a GGUF model: one, or the parts that it was split into.

Parts are called NAME-00002-of-00003.gguf and lie in one folder; the first has the metadata. Only
the given file and those beside it with its own NAME are opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_header import GGUFHeader, read_header

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
COUNT, NUMBER, NUM_TENSORS = "split.count", "split.no", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """One file with its head."""

    path: Path
    mapped: np.ndarray  # uint8[size]
    header: GGUFHeader


def is_one_set(files: Sequence[Path]) -> bool:
    """Whether all are called as parts of the same model are."""
    names = [_PART_NAME.fullmatch(file.name) for file in files]
    return None not in names and len({(name[1], name[3]) for name in names if name}) == 1


def read_parts(path: Path) -> list[GGUFPart]:
    """The file, or all parts of the model that it is one of, in their order.

    Raises: CheckpointError for a damaged file, a part that is missing or another than its name
        says, and parts of different models.
    """
    given = _read(path)
    count = _number(given, COUNT)
    if count in (None, 0, 1):
        return [given]
    name = _PART_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{path}: expected a name like model-00001-of-00003.gguf, for it is part of a split of "
            f"{count}; give the parts their names back"
        )
    parts: list[GGUFPart] = []
    for i in range(count):
        part = path.with_name(f"{name[1]}-{i + 1:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{part}: expected part {i + 1} of {count}, found no such file")
        parts.append(given if part == path else _read(part))
        _check_number(parts[-1], i, count)
    _check_together(parts)
    return parts


def _read(path: Path) -> GGUFPart:
    mapped = mapped_file(path)
    return GGUFPart(path, mapped, read_header(path, mapped))


def mapped_file(path: Path) -> np.ndarray:
    """uint8[size]. Raises: CheckpointError for an empty file, or one that can't be read."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: expected a GGUF file, found an empty one")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from None


def _check_number(part: GGUFPart, index: int, count: int) -> None:
    number, of = _number(part, NUMBER), _number(part, COUNT)
    if number != index or of != count:
        found = "another file" if number is None or of is None else f"part {number + 1} of {of}"
        raise CheckpointError(f"{part.path}: expected part {index + 1} of {count}, found {found}")


def _number(part: GGUFPart, key: str) -> int | None:
    value = part.header.metadata.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise CheckpointError(
        f"{part.path}: expected metadata {key!r} to be an integer, found {value!r:.60}"
    )


def _check_together(parts: Sequence[GGUFPart]) -> None:
    """That no tensor is in two parts, and as many are there as the first says."""
    found: dict[str, Path] = {}
    for part in parts:
        for name in part.header.tensors:
            if name in found:
                raise CheckpointError(
                    f"{part.path}: expected tensor {name!r} once, found it in {found[name]} too: "
                    f"parts of different models?"
                )
            found[name] = part.path
    total = _number(parts[0], NUM_TENSORS)
    if total not in (None, len(found)):
        raise CheckpointError(
            f"{parts[0].path}: expected {total} tensors in its {len(parts)} parts, found "
            f"{len(found)}: parts of different models?"
        )
