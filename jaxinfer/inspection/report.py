"""An inspection as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.contents import Contents
from checkpoints.formats import CONFIG_KEY
from jaxinfer.inspection.loading import Loading

SIZES = {  # our word -> config.json's names, GGUF's last
    "layers": ("num_hidden_layers", "block_count"),
    "width": ("hidden_size", "embedding_length"),
    "MLP width": ("intermediate_size", "feed_forward_length"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "KV heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head size": ("head_dim", "attention.key_length"),
    "experts": ("num_experts", "num_local_experts", "expert_count"),
    "experts per token": ("num_experts_per_tok", "expert_used_count"),
    "expert width": ("moe_intermediate_size", "expert_feed_forward_length"),
    "context": ("max_position_embeddings", "context_length"),
    "vocabulary": ("vocab_size", "vocab_size"),
}
SHOWN = 100  # characters of a value out of a file


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is there, and what would become of it."""

    contents: Contents
    loading: Loading | None  # None: it is not known what the model is

    @property
    def would_load(self) -> bool:
        return self.loading is not None and not self.contents.faults

    def to_json(self) -> dict[str, Any]:
        contents, checkpoint = self.contents, self.contents.checkpoint
        return {
            "path": str(contents.path),
            "format": contents.format,
            "version": contents.version,
            "files": {
                str(file.relative_to(contents.path)) if file != contents.path else file.name: (
                    file.stat().st_size
                )
                for file in contents.files
            },
            "architecture": architecture(contents),
            "sizes": sizes(contents),
            "tensors": [
                dataclasses.asdict(tensor) | {"shape": list(tensor.shape)}
                for tensor in contents.tensors
            ],
            "tensors_by_kind": {
                kind: {"tensors": count, "bytes": nbytes}
                for kind, (count, nbytes) in contents.by_kind().items()
            },
            "tokenizer": tokenizer_kind(contents),
            "tokens": None if contents.tokenizer is None else contents.tokenizer.get_vocab_size(),
            "has_chat_template": contents.chat_template is not None,
            "bos_token": checkpoint and checkpoint.bos_token,
            "eos_token": checkpoint and checkpoint.eos_token,
            "eos_token_ids": list(checkpoint.eos_token_ids) if checkpoint else [],
            "quantization": quantization(contents),
            "loading": None if self.loading is None else _loading_json(self.loading),
            "faults": contents.faults,
            "would_load": self.would_load,
        }

    def lines(self) -> Iterator[str]:
        """For people; the last says whether it would load."""
        yield str(self.contents.path)
        for name, text in self._rows():
            yield f"  {name:14}{text}"
        if self.would_load:
            yield "Would load."
            return
        yield "Would not load:"
        yield from (f"  {fault}" for fault in self.contents.faults)

    def _rows(self) -> Iterator[tuple[str, str]]:
        contents = self.contents
        total = sum(file.stat().st_size for file in contents.files)
        yield "format", f"{contents.format}, {_many(len(contents.files), 'file')}, {_mib(total)}"
        yield "version", contents.version or "unknown"
        yield "architecture", architecture(contents) or "unknown"
        yield "sizes", ", ".join(f"{key} {n:,}" for key, n in sizes(contents).items()) or "unknown"
        yield "quantization", quantization(contents) or "none"
        kinds = [
            f"{count} {kind} ({_mib(nbytes)})"
            for kind, (count, nbytes) in contents.by_kind().items()
        ]
        yield "tensors", ", ".join(kinds) or "unknown"
        yield "tokenizer", self._tokenizer()
        yield "template", "none" if contents.chat_template is None else "yes"
        if self.loading is not None:
            yield from _loading_rows(self.loading)

    def _tokenizer(self) -> str:
        contents, checkpoint = self.contents, self.contents.checkpoint
        if contents.tokenizer is None:
            return "unknown"
        words = f"{tokenizer_kind(contents)}, {contents.tokenizer.get_vocab_size():,} tokens"
        if checkpoint is None:
            return words
        begins = f"BOS {checkpoint.bos_token!r:.{SHOWN}}" if checkpoint.add_bos else "no BOS"
        ends = ", ".join(map(str, checkpoint.eos_token_ids)) or "none"
        return f"{words}; {begins} in front of text; EOS {checkpoint.eos_token!r:.{SHOWN}} ({ends})"


def architecture(contents: Contents) -> str | None:
    """What the file calls it."""
    names = contents.config.get("architectures")
    if isinstance(names, list) and names:
        return ", ".join(map(str, names))[:SHOWN]
    found = names or contents.metadata.get("general.architecture")
    return None if found is None else str(found)[:SHOWN]


def sizes(contents: Contents) -> dict[str, int]:
    """Those that the files name, whatever they are worth."""
    prefix = contents.metadata.get("general.architecture")
    found = dict[str, int]()
    for word, (*keys, gguf_key) in SIZES.items():
        named = [contents.config.get(key) for key in keys]
        for size in (*named, contents.metadata.get(f"{prefix}.{gguf_key}")):
            if type(size) is int and size < 1 << 63:
                found.setdefault(word, size)
    return found


def tokenizer_kind(contents: Contents) -> str | None:
    """Such as BPE, or BPE with byte fallback."""
    if contents.tokenizer is None:
        return None
    model = contents.tokenizer.model
    fallback = " with byte fallback" if getattr(model, "byte_fallback", False) else ""
    return f"{type(model).__name__}{fallback}"


def quantization(contents: Contents) -> str | None:
    """The method by which it was quantized, by config.json."""
    if contents.checkpoint is not None and contents.checkpoint.quantized_by is not None:
        return contents.checkpoint.quantized_by
    found = contents.config.get(CONFIG_KEY)
    if found is None:
        return None
    return str(found.get("quant_method", "unknown") if isinstance(found, Mapping) else found)[
        :SHOWN
    ]


def _loading_json(loading: Loading) -> dict[str, Any]:
    return {
        "parameters": loading.num_parameters,
        "weights": loading.form,
        "dtype": loading.dtype,
        "weights_bytes": loading.weights_bytes,
        "weights_bytes_by_form": loading.other_forms,
        "kv_bytes_per_token": loading.kv_token_bytes,
        "memory_bytes": loading.budget.total_bytes,
        "context_tokens_that_fit": loading.num_context_tokens,
    }


def _loading_rows(loading: Loading) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{loading.num_parameters:,}"
    yield "loaded as", f"{loading.dtype}, {loading.form}: {_mib(loading.weights_bytes)}"
    forms = ", ".join(f"{name} {_mib(size)}" for name, size in loading.other_forms.items())
    yield "other forms", forms
    per_token = ", ".join(f"{name} {size:,}" for name, size in loading.kv_token_bytes.items())
    yield "KV cache", f"bytes per token: {per_token}"
    total, tokens = loading.budget.total_bytes, loading.num_context_tokens
    if total is None or tokens is None:
        yield "memory", "not told by the system"
        return
    whole = " (all of it)" if tokens == loading.config.max_position_embeddings else ""
    yield "memory", f"{_mib(total)}; beside the weights {tokens:,} tokens of context{whole}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
