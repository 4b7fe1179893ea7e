"""The weight of one product as integers and scales: out of a quantized checkpoint, or rounded on
the way in from a float one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from checkpoints.aligned import aligned_empty, row_chunks
from checkpoints.errors import CheckpointError
from checkpoints.formats import WeightFormat, packed_group
from checkpoints.qtensor import QTensor, spread
from checkpoints.rounding import LEAST_SCALE, levels, round_to_nearest
from checkpoints.source import TensorInfo, TensorSource

PART_DTYPES = {
    "q": np.int8,
    "scale": np.float32,
    "zero": np.int8,
    "x_scale": np.float32,
    "order": np.int32,
}


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """One quantized weight: the parameters q and scale; zero, x_scale and order if it has them.

    path: where they go, e.g. ("layers", 0, "mlp", "up_proj").
    names: accepted Hugging Face names without the last part; the first that the source has is used.
    shape: [out, in] of the weight.
    kept: its format in the checkpoint, or to be rounded to.
    is_unpacked: four-bit integers are held one in a byte with their zero points subtracted, where
        a device multiplies int8 only.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shape: tuple[int, int]
    kept: WeightFormat
    is_unpacked: bool = False

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the file's parts."""
        num_outputs, num_inputs = self.shape
        groups = self.kept.groups(num_inputs)
        width = num_inputs
        if self.kept.bits == 4:
            width = groups * packed_group(self.kept.group_size, num_inputs) // 2
        shapes: dict[str, tuple[int, ...]] = {
            "q": (num_outputs, width),
            "scale": (groups, num_outputs),
        }
        if self.kept.has_zero:
            shapes["zero"] = (groups, num_outputs)
        if self.kept.activations == "int8_static":
            shapes["x_scale"] = ()
        if self.kept.has_order:
            shapes["order"] = (num_inputs,)
        return shapes


def read_product(
    source: TensorSource, infos: dict[str, TensorInfo], spec: ProductSpec, file: str
) -> dict[str, np.ndarray]:
    """The parameters by name, on the host. `infos` are of the parts, or of one float `weight`."""
    if "weight" in infos:
        return _rounded(source, infos["weight"], spec, file)
    parts = {name: _copied(source, info) for name, info in infos.items()}
    _check_numbers(parts, infos, spec, file)
    if not (spec.is_unpacked and spec.kept.bits == 4):
        return parts
    others = {name: parts.pop(name) for name in ("x_scale", "order") if name in parts}
    return others | _unpacked(QTensor.from_parts(parts, spec.kept, spec.shape[1]))


def check_parts(infos: dict[str, TensorInfo], spec: ProductSpec, file: str) -> None:
    """Raises: CheckpointError for a part of another shape or dtype."""
    for part, shape in spec.part_shapes().items():
        info, dtype = infos[part], np.dtype(PART_DTYPES[part])
        if info.shape != shape or info.dtype != dtype:
            raise CheckpointError(
                f"{file}: tensor {info.name!r} is {info.dtype} {info.shape}, "
                f"the model's {spec.kept.name} needs {dtype} {shape}"
            )


def _check_numbers(
    parts: dict[str, np.ndarray], infos: dict[str, TensorInfo], spec: ProductSpec, file: str
) -> None:
    """Raises: CheckpointError for a scale or a zero point that no method of ours makes."""
    for name, part in parts.items():
        if name == "q":  # any integer is one
            continue
        if name == "order":
            _check_order(part, infos[name], file)
            continue
        low, high = _bounds(name, spec.kept)
        is_bad = ~((part >= low) & (part <= high))  # NaN too
        if is_bad.any():
            at = tuple(map(int, np.argwhere(is_bad)[0]))
            raise CheckpointError(
                f"{file}: tensor {infos[name].name!r} has {part[at]} at {at}, "
                f"expected numbers from {low:g} to {high:g}"
            )


def _check_order(order: np.ndarray, info: TensorInfo, file: str) -> None:
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise CheckpointError(
            f"{file}: tensor {info.name!r}: expected each of {len(order)} inputs once, found others"
        )


def _bounds(part: str, kept: WeightFormat) -> tuple[float, float]:
    if part == "zero":
        return levels(kept)
    return (LEAST_SCALE if part == "x_scale" else 0.0), float(np.finfo(np.float32).max)


def _copied(source: TensorSource, info: TensorInfo) -> np.ndarray:
    out = aligned_empty(info.shape, info.dtype)
    out[...] = source.read(info.name)
    return out


def _rounded(
    source: TensorSource, info: TensorInfo, spec: ProductSpec, file: str
) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for rows, chunk in _quantized_chunks(source, info, spec.kept, file):
        parts = _unpacked(chunk) if spec.is_unpacked else chunk.parts()
        for name, part in parts.items():
            if name not in out:
                shape = list(part.shape)
                shape[0 if name == "q" else 1] = spec.shape[0]
                out[name] = aligned_empty(tuple(shape), part.dtype)
            out[name][rows if name == "q" else (slice(None), rows)] = part
    return out


def _quantized_chunks(
    source: TensorSource, info: TensorInfo, kept: WeightFormat, file: str
) -> Iterator[tuple[slice, QTensor]]:
    for rows in row_chunks(info):
        weight = np.asarray(source.read(info.name, (rows,)), np.float32)
        try:
            yield rows, round_to_nearest(weight, kept)
        except ValueError as error:
            raise CheckpointError(f"{file}: tensor {info.name!r}: {error}") from None


def _unpacked(quantized: QTensor) -> dict[str, np.ndarray]:
    """One integer in a byte; of four bits, less its zero point, which int8 holds."""
    kept, q = quantized.format, quantized.q
    if kept.bits == 8 or quantized.zero is None:
        return replace(quantized, format=replace(kept, bits=8)).parts()
    q = q - spread(quantized.zero, kept, q.shape[1])
    return {"q": q, "scale": quantized.scale}
