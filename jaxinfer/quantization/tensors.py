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
from checkpoints.load import WeightSpec, load_params
from checkpoints.load_product import ProductSpec
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.weights import HEAD, IGNORED_TENSORS


class FloatTensors:
    """Reads what `decoder` needs, as float32; embedding and head as the decoder keeps them.

    Raises: CheckpointError for a tensor that is missing, or that the decoder does not know.
    """

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder):
        self._source, self._file = checkpoint.source, str(checkpoint.path)
        self._plan = decoder.weight_plan()
        tied = (HEAD,) if decoder.config.tie_word_embeddings else ()
        self._check_names((*IGNORED_TENSORS, *tied))

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

    def _check_names(self, ignored: tuple[str, ...]) -> None:
        accepted, found = [_file_names(spec) for spec in self._plan], set(self._source.names())
        missing = [names[0] for names in accepted if found.isdisjoint(names)]
        known = {name for names in accepted for name in names}
        left = sorted(
            name for name in found - known if not any(fnmatchcase(name, p) for p in ignored)
        )
        if missing or left:
            raise CheckpointError(
                f"{self._file}: {len(missing)} tensors are missing{_such_as(missing)}, for "
                f"{len(left)} the model has no place{_such_as(left)}"
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


def _such_as(names: list[str]) -> str:
    return f" (such as {names[0]!r})" if names else ""
