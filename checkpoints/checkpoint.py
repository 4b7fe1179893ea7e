"""One model on disk, ready to use: weights, config, tokenizer, chat template, end tokens.

`open_checkpoint` takes a Hugging Face folder (its weights may be orbax's), a GGUF file (of a split
one any part), or a folder with exactly one GGUF model. No JAX here, so the host half may use it for
the tokenizer alone.

How a BOS is expressed: `tokenizer` never adds one (nor an EOS), whatever the files say: a tokenizer
that would is stripped of its post-processor, and `add_bos` says whether a prompt of plain text
begins with `bos_token`. A chat template writes its own BOS, or none, so its output is encoded as it
is. Whoever encodes plain text puts `bos_token`'s id in front if `add_bos`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from checkpoints.content_hash import content_hash
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_parts import is_one_set
from checkpoints.gguf_tokenizer import adds_bos, build_tokenizer, end_token_ids
from checkpoints.hf_folder import (
    as_ids,
    read_chat_template,
    read_json,
    read_tokenizer,
    strip_post_processor,
    token_text,
)
from checkpoints.layout import arranged
from checkpoints.orbax import OrbaxSource, is_orbax, orbax_files
from checkpoints.prequantized.source import ConvertedSource, converted_config, method_of
from checkpoints.safetensors import SafetensorsSource, weight_files
from checkpoints.source import TensorSource

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was found under one path; `close` it when the weights have been read."""

    path: Path  # the folder or the GGUF file, of a split one its first part
    source: TensorSource
    config: dict[str, Any]  # Hugging Face keys
    tokenizer: Tokenizer  # adds no BOS and no EOS
    chat_template: str | None  # Jinja
    bos_token: str | None
    eos_token: str | None
    add_bos: bool  # plain text begins with bos_token, which is then not None
    eos_token_ids: tuple[int, ...]  # any of these ends an answer; sorted
    generation_config: dict[str, Any]  # Hugging Face keys; empty if the checkpoint has none
    version: str  # hash of the content: the same wherever and under whatever name it lies
    files: tuple[Path, ...]  # that it is the hash of
    quantized_by: str | None = None  # the method of another tool, such as gptq

    def close(self) -> None:
        """Close the weights; the rest stays usable."""
        self.source.close()


def open_checkpoint(path: str | Path, *, is_mapped: bool = True) -> Checkpoint:
    """Open what lies under `path`, reading headers and small files only.

    Args:
        is_mapped: whether a weight file that is cut short while its tensors are read may end the
            process; else they are read, not mapped.
    Raises: CheckpointError naming the file or folder, what was expected and what was found.
    """
    path = Path(path)
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return _open_folder(path, is_mapped)
        return _open_gguf(only_gguf(path), is_mapped)
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a folder or a GGUF file, found nothing there")
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: expected a folder, found one weight file; give the folder that holds it "
            f"together with {CONFIG_FILE} and tokenizer.json"
        )
    return _open_gguf(path, is_mapped)


def only_gguf(folder: Path) -> Path:
    """Any file of the folder's one model. Raises: CheckpointError if there are none, or more."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1 or is_one_set(found):
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:5])
        raise CheckpointError(
            f"{folder}: expected {CONFIG_FILE} or exactly one .gguf file, found {len(found)} "
            f"({names}); give the path of one"
        )
    raise CheckpointError(f"{folder}: expected {CONFIG_FILE} (or one .gguf file), found neither")


def _open_folder(folder: Path, is_mapped: bool) -> Checkpoint:
    config = read_json(folder / CONFIG_FILE)
    quantized_by = method_of(config)
    generation_config = read_json(folder / "generation_config.json", optional=True)
    tokenizer_config = read_json(folder / "tokenizer_config.json", optional=True)
    tokenizer = read_tokenizer(folder)
    found, weights = _weights(folder, is_mapped)
    source, config = _ours(found, config, str(folder))
    bos_token = token_text(folder, tokenizer_config, config, tokenizer, "bos_token")
    eos_token = token_text(folder, tokenizer_config, config, tokenizer, "eos_token")
    adds = strip_post_processor(folder, tokenizer, bos_token)
    flag = tokenizer_config.get("add_bos_token")
    files = [folder / CONFIG_FILE, folder / "tokenizer.json", *weights]
    end_ids = {
        *as_ids(folder / CONFIG_FILE, config.get("eos_token_id")),
        *as_ids(folder / "generation_config.json", generation_config.get("eos_token_id")),
    }
    if eos_token is not None and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
        end_ids.add(eos_id)
    return Checkpoint(
        path=folder,
        source=source,
        config=config,
        tokenizer=tokenizer,
        chat_template=read_chat_template(folder, tokenizer_config),
        bos_token=bos_token,
        eos_token=eos_token,
        add_bos=bos_token is not None and (flag if isinstance(flag, bool) else adds),
        eos_token_ids=tuple(sorted(end_ids)),
        generation_config=generation_config,
        version=content_hash(files),
        files=tuple(files),
        quantized_by=quantized_by,
    )


def _ours(
    source: TensorSource, config: dict[str, Any], file: str
) -> tuple[TensorSource, dict[str, Any]]:
    """Tensors by the names and in the parts that models here know, and the config of these."""
    if method_of(config) is None:
        return arranged(source, config, file), config
    converted = ConvertedSource(source, config, file)
    own = arranged(converted, config, file)
    return own, converted_config(config, own, converted.kept)


def _weights(folder: Path, is_mapped: bool) -> tuple[TensorSource, list[Path]]:
    """And the files that they are in."""
    if is_orbax(folder):
        return OrbaxSource(folder), orbax_files(folder)
    return SafetensorsSource(folder, is_mapped=is_mapped), weight_files(folder)


def _open_gguf(path: Path, is_mapped: bool) -> Checkpoint:
    source = GGUFSource(path, is_mapped=is_mapped)
    path, config = source.path, source.config
    tokenizer = build_tokenizer(path, source.metadata)
    _check_vocabulary(path, tokenizer, config)
    bos_token = _token(tokenizer, config, "bos_token_id")
    template = source.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        source=arranged(source, config, str(path)),
        config=config,
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        bos_token=bos_token,
        eos_token=_token(tokenizer, config, "eos_token_id"),
        add_bos=bos_token is not None and adds_bos(path, source.metadata),
        eos_token_ids=end_token_ids(source.metadata),
        generation_config={},
        version=content_hash(source.files),
        files=source.files,
    )


def _check_vocabulary(path: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    size = tokenizer.get_vocab_size()
    if size > config["vocab_size"]:
        raise CheckpointError(
            f"{path}: expected at most {config['vocab_size']} tokens (rows of token_embd.weight), "
            f"found {size}"
        )


def _token(tokenizer: Tokenizer, config: Mapping[str, Any], key: str) -> str | None:
    index = config.get(key)
    return None if index is None else tokenizer.id_to_token(index)
