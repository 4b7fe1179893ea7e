"""The float tensors of a checkpoint that is to be quantized, a part at a time, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import quantization_of
from checkpoints.load import WeightSpec, load_params
from checkpoints.load_product import ProductSpec
from jaxinfer.models.registry import Decoder
from jaxinfer.runtime.weights import HEAD, IGNORED_TENSORS

Params = dict[str, Any]


class FloatTensors:
    """Reads what `decoder` needs, as float32; embedding and head as the decoder keeps them.

    Raises: CheckpointError for a model that is quantized already, and for tensors that the decoder
        does not know.
    """

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder):
        self._source, self._file = checkpoint.source, str(checkpoint.path)
        self._plan = decoder.weight_plan()
        if quantization_of(checkpoint.config, self._file) is not None:
            raise CheckpointError(
                f"{self._file}: expected a model of floats, found one that is quantized already; "
                "give the model that it was made from"
            )
        ignored = (
            (*IGNORED_TENSORS, HEAD) if decoder.config.tie_word_embeddings else IGNORED_TENSORS
        )
        self._check_left_over(ignored)

    def top(self) -> Params:
        """What stands before and after the layers."""
        return self._read([spec for spec in self._plan if spec.path[0] != "layers"], "")

    def layer(self, index: int) -> Params:
        """Nested, by the names in the layer. Raises: CheckpointError naming a tensor that is
        missing, of another shape, or not finite.
        """
        specs = [
            replace(spec, path=spec.path[2:])
            for spec in self._plan
            if spec.path[:2] == ("layers", index)
        ]
        return self._read(specs, f"layers.{index}.")

    def _read(self, specs: list[WeightSpec | ProductSpec], prefix: str) -> Params:
        params = load_params(
            self._source,
            specs,
            dtype=np.float32,
            put=lambda array: array,
            ignore=("*",),
            file=self._file,
        )
        for name, array in leaves(params):
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{self._file}: tensor {tensor_name(prefix + name)!r}: expected finite "
                    "numbers, found NaN or infinity"
                )
        return params

    def _check_left_over(self, ignored: tuple[str, ...]) -> None:
        known = {name for spec in self._plan for name in _file_names(spec)}
        left = sorted(
            name
            for name in self._source.names()
            if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignored)
        )
        if left:
            raise CheckpointError(
                f"{self._file}: the model has no place for {len(left)} tensors, such as {left[0]!r}"
            )


def tensor_name(path: str) -> str:
    """A parameter's name in a Hugging Face checkpoint."""
    return path if path.startswith("lm_head.") else f"model.{path}"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Arrays of a nested dict, by dotted name."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _file_names(spec: WeightSpec | ProductSpec) -> tuple[str, ...]:
    if isinstance(spec, WeightSpec):
        return spec.names
    return tuple(f"{name}.weight" for name in spec.names)
