"""Writes tests/data/gguf_tokenizers.json: what llama.cpp makes of the nasty strings, by the name of
each pre-tokenizer.

    python -m tests.oracle.make_gguf_tokenizer_golden --libllama PATH

Run from the repository root; PATH is llama.cpp's libllama.so. The vocabularies are small and made
here: the names change how a text is cut, not what the words of a vocabulary are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from checkpoints.pre_tokenizers import PRE_TOKENIZERS
from tests.gguf_vocabularies import (
    BYTE_LEVEL,
    CONTROL_TOKENS,
    FORMS,
    GOLDEN,
    SPM,
    USER_DEFINED,
    comparable,
    hashes,
    write_vocabulary,
)
from tests.nasty_strings import nasty_strings

NUM_TOKENS = 1200


class Params(ctypes.Structure):
    """llama_model_params."""

    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("progress_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("others", ctypes.c_bool * 5),
    )


class LibLlama:
    """llama.cpp's tokenizers, by its C interface."""

    def __init__(self, path: Path):
        self._lib: Any = ctypes.CDLL(str(path))
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._quiet = quiet(lambda level, text, data: None)
        self._lib.llama_log_set(self._quiet, None)
        self._lib.llama_backend_init()
        self._lib.llama_model_default_params.restype = Params
        self._lib.llama_model_load_from_file.argtypes = (ctypes.c_char_p, Params)
        self._lib.llama_model_load_from_file.restype = ctypes.c_void_p
        self._lib.llama_model_get_vocab.argtypes = (ctypes.c_void_p,)
        self._lib.llama_model_get_vocab.restype = ctypes.c_void_p
        self._lib.llama_model_free.argtypes = (ctypes.c_void_p,)
        self._lib.llama_tokenize.argtypes = (
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
            *(ctypes.c_bool, ctypes.c_bool),
        )

    @contextmanager
    def vocabulary(self, file: Path) -> Generator[Any]:
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        model = self._lib.llama_model_load_from_file(str(file).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp does not load {file}")
        try:
            yield self._lib.llama_model_get_vocab(model)
        finally:
            self._lib.llama_model_free(model)

    def encode(self, vocabulary: Any, text: str) -> list[int]:
        """Special tokens in the text are found, none is added."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 16))()
        count = self._lib.llama_tokenize(vocabulary, raw, len(raw), room, len(room), False, True)
        assert count >= 0
        return list(room[:count])


def trained(texts: list[str], *, is_spm: bool) -> dict[str, Any]:
    """Tokens after the control tokens (and bytes), and the merges that make them."""
    backend = Tokenizer(models.BPE())
    if is_spm:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [] if is_spm else sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False, limit_alphabet=500
    )
    backend.train_from_iterator(sorted(texts), trainer)
    model = json.loads(backend.to_str())["model"]
    known = {*CONTROL_TOKENS, *USER_DEFINED} | {f"<0x{byte:02X}>" for byte in range(256)}
    tokens = [text for text in model["vocab"] if text not in known]
    merges = [pair for pair in model["merges"] if "".join(pair) in tokens]
    return {"tokens": tokens, "merges": [] if is_spm else [" ".join(pair) for pair in merges]}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the golden file of GGUF's tokenizers.")
    parser.add_argument("--libllama", type=Path, required=True, metavar="PATH")
    parser.add_argument("--version", required=True, help="of llama.cpp, such as b11434")
    args = parser.parse_args(argv)
    texts, library = nasty_strings(), LibLlama(args.libllama)
    clean = [text for text in texts if "\x00" not in text]
    golden: dict[str, Any] = {
        "about": {
            "made_by": "python -m tests.oracle.make_gguf_tokenizer_golden",
            "llama.cpp": args.version,
        },
        BYTE_LEVEL: trained(clean, is_spm=False),
        SPM: trained(clean, is_spm=True),
        "hashes": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for form in (*PRE_TOKENIZERS, *FORMS):
            file = Path(folder) / "vocabulary.gguf"
            write_vocabulary(file, golden, form)
            with library.vocabulary(file) as vocabulary:
                ids = [library.encode(vocabulary, comparable(form, text)) for text in texts]
            golden["hashes"][form] = hashes(ids)
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n", "utf-8")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
