"""What lies under a path, as far as it can be told: of a damaged or unknown checkpoint, too.

Where it does not open, each part is read by itself, so that a fault in one leaves the others. Heads
and small files only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from checkpoints.checkpoint import CONFIG_FILE, Checkpoint, only_gguf, open_checkpoint
from checkpoints.content_hash import content_hash
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_header import GGUFHeader, read_header
from checkpoints.gguf_parts import mapped_file
from checkpoints.gguf_tokenizer import build_tokenizer
from checkpoints.hf_folder import TOKENIZER_FILE, read_chat_template, read_json, read_tokenizer
from checkpoints.orbax import OrbaxSource, is_orbax, orbax_files
from checkpoints.safetensors import infos_of, weight_files
from checkpoints.source import TensorInfo

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file has it."""

    name: str  # the file's own
    shape: tuple[int, ...]
    kind: str  # dtype, or GGUF's block type
    nbytes: int


@dataclass(slots=True)
class Contents:
    """Empty where a part is not there, or could not be read."""

    path: Path  # the folder or the GGUF file
    format: str
    checkpoint: Checkpoint | None = None  # None: it does not open
    files: list[Path] = field(default_factory=list[Path])  # that the version is the hash of
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # Hugging Face keys
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])  # GGUF's own
    tensors: list[StoredTensor] = field(default_factory=list[StoredTensor])
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    version: str | None = None
    faults: list[str] = field(default_factory=list[str])  # one line each

    def add_fault(self, line: str) -> None:
        """Once."""
        if line not in self.faults:
            self.faults.append(line)

    def part(self, read: Callable[[], R]) -> R | None:
        """What `read` gives; None, and one fault more, if it can't."""
        try:
            return read()
        except CheckpointError as error:
            self.add_fault(str(error))
            return None

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """How many tensors there are of each kind and their bytes; the largest share first."""
        found: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            count, nbytes = found.get(tensor.kind, (0, 0))
            found[tensor.kind] = count + 1, nbytes + tensor.nbytes
        return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))


def read_contents(path: Path) -> Contents:
    """Close its checkpoint. Raises: CheckpointError if there is nothing under `path`."""
    if not path.exists():
        raise CheckpointError(f"{path}: expected a folder or a GGUF file, found nothing there")
    file = _gguf_file(path)
    is_gguf = file is not None or not path.is_dir()
    form = "GGUF" if is_gguf else "orbax folder" if is_orbax(path) else "safetensors folder"
    found = Contents(file or path, form)
    checkpoint = found.checkpoint = found.part(lambda: open_checkpoint(path))
    if checkpoint is not None:
        found.config, found.files = checkpoint.config, list(checkpoint.files)
        found.tokenizer, found.chat_template = checkpoint.tokenizer, checkpoint.chat_template
        found.version = checkpoint.version
    read = _read_gguf if is_gguf else _read_folder
    read(found)
    return found


def _gguf_file(path: Path) -> Path | None:
    if not path.is_dir() or (path / CONFIG_FILE).is_file():
        return None
    try:
        return only_gguf(path)
    except CheckpointError:  # which opening it says, too
        return None


def _read_folder(found: Contents) -> None:
    folder = found.path
    has_orbax = is_orbax(folder)
    list_files = orbax_files if has_orbax else weight_files
    weights = found.part(lambda: list_files(folder)) or sorted(folder.glob("*.safetensors"))
    for file in [folder] if has_orbax else weights:
        infos = found.part(lambda file=file: _orbax_infos(file) if has_orbax else infos_of(file))
        found.tensors += _stored(infos or ())
    if found.checkpoint is not None:
        return
    found.config = found.part(lambda: read_json(folder / CONFIG_FILE)) or {}
    found.tokenizer = found.part(lambda: read_tokenizer(folder))
    words = found.part(lambda: read_json(folder / "tokenizer_config.json", optional=True))
    found.chat_template = found.part(lambda: read_chat_template(folder, words or {}))
    small = (folder / CONFIG_FILE, folder / TOKENIZER_FILE)
    found.files = [file for file in (*small, *weights) if file.is_file()]


def _orbax_infos(folder: Path) -> list[TensorInfo]:
    source = OrbaxSource(folder)
    try:
        return [source.info(name) for name in source.names()]
    finally:
        source.close()


def _stored(infos: Iterable[TensorInfo]) -> list[StoredTensor]:
    return [StoredTensor(info.name, info.shape, info.dtype.name, info.nbytes) for info in infos]


def _read_gguf(found: Contents) -> None:
    """Of a split one all parts, if it opens; else the one that was given."""
    path = found.path
    found.files = found.files or [path]
    header = None
    for file in reversed(found.files):
        header = found.part(lambda file=file: read_header(file, mapped_file(file)))
        found.tensors = [*(_blocks(header) if header else ()), *found.tensors]
    if header is None:
        return
    found.metadata = header.metadata
    if found.checkpoint is not None:
        return
    found.config = found.part(lambda: GGUFSource(path).config) or {}
    found.tokenizer = found.part(lambda: build_tokenizer(path, header.metadata))
    template = header.metadata.get("tokenizer.chat_template")
    found.chat_template = template if isinstance(template, str) else None
    found.version = found.part(lambda: content_hash([path]))


def _blocks(header: GGUFHeader) -> list[StoredTensor]:
    return [
        StoredTensor(tensor.name, tensor.shape, tensor.type.name, tensor.nbytes)
        for tensor in header.tensors.values()
    ]
