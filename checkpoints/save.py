"""Writing a model as a Hugging Face folder, quantized or not, one tensor after the other.

Whoever opens the folder finds the tokenizer, template and end tokens of the original, whatever
form that has. Knows how tensors are kept, not how they are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from checkpoints.content_hash import content_hash
from checkpoints.errors import CheckpointError, first_line
from checkpoints.formats import CONFIG_KEY, Quantization
from checkpoints.hf_folder import TOKENIZER_FILE
from checkpoints.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsSource, weight_files
from checkpoints.small_files import as_json, write_small_files
from checkpoints.source import TensorSource
from checkpoints.unfinished import UnfinishedFolder

SHARD_BYTES = 512 << 20  # of tensors, held until they are written together
CONFIG_DRAFT = "config.draft"  # becomes CONFIG_FILE last: without it nothing opens the folder


class CheckpointWriter:
    """A folder `out`, there once `finish` has returned, and not before.

        with CheckpointWriter(out, original) as writer:
            writer.add_tensor("model.norm.weight", norm)
            ...
            writer.finish(quantization)

    Left without `finish`, by an error too, nothing remains. Tensors have Hugging Face names;
    those of a quantized product are the parts of a `QTensor`, such as `….up_proj.q`.

    Args:
        original: its config, tokenizer, template and end tokens are those of the new folder.
        num_bytes: of all tensors, about; None: as 8-bit weights take.
    Raises: CheckpointError if `out` exists, another process writes it, or the disk has no room;
        every method if it cannot write.
    """

    def __init__(self, out: Path, original: Checkpoint, *, num_bytes: int | None = None):
        self._original = original
        needed = bytes_at_8_bits(original.source) if num_bytes is None else num_bytes
        self._folder = UnfinishedFolder(Path(out), needed)
        self._held: dict[str, np.ndarray] = {}
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._num_bytes = 0
        self._float_dtypes: set[str] = set()
        self._is_sealed = False

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.discard()

    def add_tensor(self, name: str, array: np.ndarray) -> None:
        """Args: array: is held for a while, so it must not change.

        Raises: ValueError for a name that was added before.
        """
        assert not self._is_sealed, "tensors are added before draft and finish"
        if name in self._names:
            raise ValueError(f"tensor {name!r} is added twice")
        held = sum(held.nbytes for held in self._held.values())
        if self._held and held + array.nbytes > SHARD_BYTES:
            self._write_shard()
        self._names.add(name)
        self._num_bytes += array.nbytes
        if name.endswith((".weight", ".bias")):
            self._float_dtypes.add(array.dtype.name)
        self._held[name] = np.ascontiguousarray(array).reshape(array.shape)

    def add_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A file beside the weights, such as certificate.json."""
        assert name != CONFIG_FILE, "config.json is the writer's own"
        self._write(name, as_json(value))

    def add_text(self, name: str, text: str) -> None:
        """The same of a text, such as a report."""
        self._write(name, text.encode())

    def draft(self, quantization: Quantization | None) -> Checkpoint:
        """The model as it will be, readable while it is not finished, to measure it.

        Its `version` is that of the finished folder. No tensor can be added afterwards.
        """
        self._seal(quantization)
        weights = weight_files(self._folder.path)
        files = [self._folder.path / name for name in (CONFIG_DRAFT, TOKENIZER_FILE)] + weights
        return replace(
            self._original,
            path=self._folder.path,
            source=SafetensorsSource(self._folder.path),
            config=self._config(quantization),
            version=content_hash(files),
            files=tuple(files),
        )

    def finish(self, quantization: Quantization | None) -> None:
        """Everything to its place, at once."""
        self._seal(quantization)
        try:
            self._folder.sync()  # before there is a config.json, whatever becomes of the machine
            os.replace(self._folder.path / CONFIG_DRAFT, self._folder.path / CONFIG_FILE)
        except OSError as error:
            raise self._folder.failure(error) from None
        self._folder.finish()

    def _seal(self, quantization: Quantization | None) -> None:
        """All but config.json's name."""
        if not self._is_sealed:
            self._is_sealed = True
            self._write_shard()
            try:
                self._name_shards()
                write_small_files(self._folder.path, self._original)
            except OSError as error:
                raise self._folder.failure(error) from None
        self._write(CONFIG_DRAFT, as_json(self._config(quantization)))

    def _write_shard(self) -> None:
        path = self._folder.path / f"shard-{len(self._shards)}"
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except OSError as error:
            raise self._folder.failure(error) from None
        except SafetensorError as error:  # as the library calls a failing write
            raise CheckpointError(
                f"{self._folder.out}: expected to write its tensors, found {first_line(error)}; "
                "nothing is left of it"
            ) from None
        self._shards.append(list(self._held))
        self._held = {}

    def _name_shards(self) -> None:
        """One is model.safetensors, several have an index."""
        count, weight_map = len(self._shards), dict[str, str]()
        for i, names in enumerate(self._shards):
            file = SINGLE_FILE
            if count > 1:
                file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._folder.path / f"shard-{i}", self._folder.path / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            sizes = {"total_size": self._num_bytes}
            self.add_json(INDEX_FILE, {"metadata": sizes, "weight_map": weight_map})

    def _config(self, quantization: Quantization | None) -> dict[str, Any]:
        own = (CONFIG_KEY, "dtype", "torch_dtype")
        config = {key: value for key, value in self._original.config.items() if key not in own}
        if len(self._float_dtypes) == 1:
            config["torch_dtype"] = next(iter(self._float_dtypes))
        if quantization is not None:
            config[CONFIG_KEY] = quantization.to_config()
        return config

    def _write(self, name: str, content: bytes) -> None:
        try:
            (self._folder.path / name).write_bytes(content)
        except OSError as error:
            raise self._folder.failure(error) from None


def bytes_at_8_bits(source: TensorSource) -> int:
    """Of all tensors: a byte for each number of a matrix, four for each of a vector."""
    total = 0
    for name in source.names():
        info = source.info(name)
        size = int(np.prod(info.shape, dtype=np.int64))
        total += size if len(info.shape) > 1 else 4 * size
    return total
