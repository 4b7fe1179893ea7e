"""A nested dict of arrays out of a `TensorSource`, one tensor at a time.

The model says what it needs as a list of `WeightSpec`; every shape is checked before the first
allocation, every tensor must be used and every spec filled. One of two files of this package that
import JAX, learned_rounding.py being the other. Host memory: the mapped file and, for each thread,
about one converted tensor.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import DTypeLike

from checkpoints.aligned import aligned_empty, row_chunks
from checkpoints.errors import CheckpointError
from checkpoints.load_product import ProductSpec, check_parts, read_product
from checkpoints.source import TensorInfo, TensorSource

R = TypeVar("R")
ParamPath = tuple[str | int, ...]  # of a parameter

MAX_LISTED = 5
Infos = dict[str, TensorInfo]
"""By the part of the spec's name: `weight` alone for what is one tensor of floats."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter of the model.

    path: where it goes, e.g. ("layers", 0, "q_proj"); an int is a position in a list.
    names: accepted Hugging Face tensor names; the first that the source has is used.
    shape: what the model needs.
    """

    path: ParamPath
    names: tuple[str, ...]
    shape: tuple[int, ...]


def load_params(
    source: TensorSource,
    specs: Sequence[WeightSpec | ProductSpec],
    *,
    dtype: DTypeLike,
    put: Callable[[np.ndarray], Any] = jax.device_put,
    ignore: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    is_quantized: bool = False,
    num_threads: int = 1,
    must_be_finite: bool = False,
    file: str,
) -> dict[str, Any]:
    """Fill every spec and use every tensor.

    Args:
        dtype: of all parameters that are not quantized; each tensor is converted on its own.
        put: host array -> device array. The host array is a fresh copy that nothing else holds, so
            aliasing it is safe, also when the file changes or is closed later.
        ignore: fnmatch patterns of tensor names that need no spec.
        progress: called after each tensor with its bytes in the source (`TensorInfo.nbytes`).
        is_quantized: the source says that it is: floats for a quantized product are refused, not
            rounded.
        num_threads, must_be_finite: as in `read_params`; `put` and `progress` are called by the
            caller's own thread.
        file: what error messages call the source.
    Returns: a nested dict; where a path has an int, a list.
    Raises: as `read_params`.
    """
    tree: dict[str | int, Any] = {}
    parts = read_params(
        source,
        specs,
        dtype=dtype,
        ignore=ignore,
        is_quantized=is_quantized,
        num_threads=num_threads,
        must_be_finite=must_be_finite,
        file=file,
    )
    with closing(parts):
        for arrays, num_bytes in parts:
            for path, array in arrays.items():
                _place(tree, path, put(array))
            if progress is not None:
                progress(num_bytes)
    return _with_lists(tree)


def read_params(
    source: TensorSource,
    specs: Sequence[WeightSpec | ProductSpec],
    *,
    dtype: DTypeLike,
    ignore: Sequence[str] = (),
    is_quantized: bool = False,
    num_threads: int = 1,
    must_be_finite: bool = False,
    file: str,
) -> Generator[tuple[dict[ParamPath, np.ndarray], int]]:
    """The same on the host, a spec at a time, each with its bytes in the source.

    Args:
        num_threads: that read and convert; 0: the caller's own, nothing ahead of what it takes.
        must_be_finite: whether numbers are looked at that are neither rounded nor scales: there
            one bad number is one bad number, here it is a whole scale.
    Raises: CheckpointError, before the first is read, for a missing, left-over or wrongly shaped
        tensor; then for scales that are no scales, and for numbers that are not finite in floats
        that are to be rounded, or in any if they must be.
    """
    for fault in load_faults(source, specs, ignore=ignore, is_quantized=is_quantized, file=file):
        raise CheckpointError(fault)
    chosen = _match(source, specs, is_quantized)
    target = np.dtype(dtype)

    def made(spec: WeightSpec | ProductSpec, infos: Infos) -> dict[ParamPath, np.ndarray]:
        if isinstance(spec, WeightSpec):
            array = _converted(source, infos["weight"], target, file if must_be_finite else None)
            return {spec.path: array}
        parts = read_product(source, infos, spec, file)
        return {(*spec.path, name): part for name, part in parts.items()}

    with closing(_in_order(made, zip(specs, chosen, strict=True), num_threads)) as results:
        for infos, arrays in zip(chosen, results, strict=True):
            yield arrays, sum(info.nbytes for info in infos.values())


def _in_order(
    function: Callable[..., R], arguments: Iterable[tuple[Any, ...]], num_threads: int
) -> Generator[R]:
    """Results in the order of their arguments; at most num_threads + 1 are under way or waiting."""
    if not num_threads:
        yield from itertools.starmap(function, arguments)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for each in arguments:
                waiting.append(pool.submit(function, *each))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def load_faults(
    source: TensorSource,
    specs: Sequence[WeightSpec | ProductSpec],
    *,
    ignore: Sequence[str] = (),
    is_quantized: bool = False,
    file: str,
) -> Generator[str]:
    """What `read_params` would refuse before it reads a tensor, all of it; the first is what it
    raises.
    """
    chosen = _match(source, specs, is_quantized)
    yield from _left_faults(source, specs, chosen, ignore, file)
    for spec, infos in zip(specs, chosen, strict=True):
        try:
            if infos:
                _check(spec, infos, file)
        except CheckpointError as error:
            yield str(error)


def _match(
    source: TensorSource, specs: Sequence[WeightSpec | ProductSpec], is_quantized: bool
) -> list[Infos]:
    """The tensors of each spec; none for one that stays empty."""
    available = set(source.names())
    chosen = [_names_of(spec, available, is_quantized) for spec in specs]
    return [{part: source.info(name) for part, name in names.items()} for names in chosen]


def _left_faults(
    source: TensorSource,
    specs: Sequence[WeightSpec | ProductSpec],
    chosen: Sequence[Infos],
    ignore: Sequence[str],
    file: str,
) -> Generator[str]:
    """Specs that stay empty, and tensors that are left over."""
    available = set(source.names())
    missing = [
        name
        for spec, infos in zip(specs, chosen, strict=True)
        if not infos
        for name in _missing_of(spec, available)
    ]
    if missing:
        yield f"{file}: expected {_listed(missing)}, found {len(available)} tensors without"
    left = available.difference(info.name for infos in chosen for info in infos.values())
    left = {name for name in left if not any(fnmatchcase(name, pattern) for pattern in ignore)}
    if left:
        yield (
            f"{file}: expected only tensors that the model uses, found also {_listed(sorted(left))}"
        )


def _names_of(
    spec: WeightSpec | ProductSpec, available: set[str], is_quantized: bool
) -> dict[str, str]:
    """The tensor's name by part; empty if the source has not all of them."""
    for name in spec.names:
        if isinstance(spec, WeightSpec):
            parts = {"weight": name}
        elif f"{name}.weight" in available and not is_quantized:
            parts = {"weight": f"{name}.weight"}
        else:
            parts = _parts_of(spec, name)
        if available.issuperset(parts.values()):
            return parts
    return {}


def _missing_of(spec: WeightSpec | ProductSpec, available: set[str]) -> list[str]:
    """What the source lacks: of a product, its weight or those parts that have no others there."""
    if isinstance(spec, WeightSpec):
        return [spec.names[0]]
    for name in spec.names:
        parts = _parts_of(spec, name).values()
        lacking = [part for part in parts if part not in available]
        if 0 < len(lacking) < len(parts):
            return lacking
    return list(_parts_of(spec, spec.names[0]).values())


def _parts_of(spec: ProductSpec, name: str) -> dict[str, str]:
    return {part: f"{name}.{part}" for part in spec.part_shapes()}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name!r:.150}" for name in names[:MAX_LISTED])
    more = " ..." if len(names) > MAX_LISTED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _check(spec: WeightSpec | ProductSpec, infos: Infos, file: str) -> None:
    if isinstance(spec, ProductSpec) and "weight" not in infos:
        check_parts(infos, spec, file)
        return
    info = infos["weight"]
    if info.shape != spec.shape:
        raise CheckpointError(
            f"{file}: tensor {info.name!r} has shape {info.shape}, the model needs {spec.shape}"
        )
    if info.dtype.kind in "iub":  # ml_dtypes' floating types are of kind "V"
        raise CheckpointError(
            f"{file}: tensor {info.name!r} has dtype {info.dtype}, the model needs a floating one"
        )


def _converted(
    source: TensorSource, info: TensorInfo, dtype: np.dtype, finite_file: str | None
) -> np.ndarray:
    """A copy of the tensor as `dtype`, made some rows at a time.

    finite_file: None if its numbers need not be finite.
    """
    out = aligned_empty(info.shape, dtype)
    if not info.shape:
        out[...] = source.read(info.name)
        return out
    for rows in row_chunks(info):
        out[rows] = source.read(info.name, (rows,))
        if finite_file is not None and not np.isfinite(out[rows]).all():
            raise CheckpointError(
                f"{finite_file}: tensor {info.name!r}: expected finite numbers of {dtype}, "
                "found NaN or infinity"
            )
    return out


def _place(tree: dict[str | int, Any], path: ParamPath, value: Any) -> None:
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
