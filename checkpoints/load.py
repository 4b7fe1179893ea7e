"""A nested dict of arrays out of a `TensorSource`, one tensor at a time.

The model says what it needs as a list of `WeightSpec`; every shape is checked before the first
allocation, every tensor must be used and every spec filled. The only file of this package that
imports JAX. Host memory: the mapped file and one converted tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from checkpoints.errors import CheckpointError
from checkpoints.source import TensorInfo, TensorSource

CHUNK_BYTES = 8 << 20  # converted at once; what a dequantization needs besides its result
ALIGNMENT = 64  # bytes; XLA's CPU client takes a host array so aligned without another copy
MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter of the model.

    path: where it goes, e.g. ("layers", 0, "q_proj"); an int is a position in a list.
    names: accepted Hugging Face tensor names; the first that the source has is used.
    shape: what the model needs.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]


def load_params(
    source: TensorSource,
    specs: Sequence[WeightSpec],
    *,
    dtype: DTypeLike,
    put: Callable[[np.ndarray], Any] = jax.device_put,
    ignore: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    file: str,
) -> dict[str, Any]:
    """Fill every spec and use every tensor.

    Args:
        dtype: of all parameters; each tensor is converted on its own.
        put: host array -> device array. The host array is a fresh copy that nothing else holds, so
            aliasing it is safe, also when the file changes or is closed later.
        ignore: fnmatch patterns of tensor names that need no spec.
        progress: called after each tensor with its bytes in the source (`TensorInfo.nbytes`).
        file: what error messages call the source.
    Returns: a nested dict; where a path has an int, a list.
    Raises: CheckpointError for a missing, left-over or wrongly shaped tensor.
    """
    chosen = _choose(source, specs, ignore, file)
    for spec, info in zip(specs, chosen, strict=True):
        _check(spec, info, file)
    target = np.dtype(dtype)
    tree: dict[str | int, Any] = {}
    for spec, info in zip(specs, chosen, strict=True):
        _place(tree, spec.path, put(_converted(source, info, target)))
        if progress is not None:
            progress(info.nbytes)
    return _with_lists(tree)


def _choose(
    source: TensorSource, specs: Sequence[WeightSpec], ignore: Sequence[str], file: str
) -> list[TensorInfo]:
    """The tensor of each spec. Raises if a spec stays empty or a tensor is left over."""
    available = set(source.names())
    chosen = [next((name for name in spec.names if name in available), None) for spec in specs]
    missing = [spec.names[0] for spec, name in zip(specs, chosen, strict=True) if name is None]
    if missing:
        raise CheckpointError(
            f"{file}: expected {_listed(missing)}, found {len(available)} tensors without"
        )
    left = available.difference(name for name in chosen if name is not None)
    left = {name for name in left if not any(fnmatchcase(name, pattern) for pattern in ignore)}
    if left:
        raise CheckpointError(
            f"{file}: expected only tensors that the model uses, found also {_listed(sorted(left))}"
        )
    return [source.info(name) for name in chosen if name is not None]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MAX_LISTED])
    more = " ..." if len(names) > MAX_LISTED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _check(spec: WeightSpec, info: TensorInfo, file: str) -> None:
    if info.shape != spec.shape:
        raise CheckpointError(
            f"{file}: tensor {info.name!r} has shape {info.shape}, the model needs {spec.shape}"
        )
    if info.dtype.kind in "iub":  # ml_dtypes' floating types are of kind "V"
        raise CheckpointError(
            f"{file}: tensor {info.name!r} has dtype {info.dtype}, the model needs a floating one"
        )


def _converted(source: TensorSource, info: TensorInfo, dtype: np.dtype) -> np.ndarray:
    """A copy of the tensor as `dtype`, made some rows at a time."""
    out = _aligned_empty(info.shape, dtype)
    if not info.shape:
        out[...] = source.read(info.name)
        return out
    row_bytes = max(1, info.nbytes // max(1, info.shape[0]))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, info.shape[0], step):
        rows = slice(start, min(start + step, info.shape[0]))
        out[rows] = source.read(info.name, (rows,))
    return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _place(tree: dict[str | int, Any], path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    assert path[-1] not in tree, f"two specs have the path {path}"
    tree[path[-1]] = value


def _with_lists(tree: Any) -> Any:
    """Dicts with int keys, which must run from 0 without a gap, become lists."""
    if not isinstance(tree, dict):
        return tree
    if any(isinstance(key, int) for key in tree):
        return [_with_lists(tree[i]) for i in range(len(tree))]
    return {key: _with_lists(value) for key, value in tree.items()}
