"""Writes tests/data/gemma3.json: what transformers and SentencePiece say about Gemma 3.

    python -m tests.oracle.make_gemma3_golden gemma-3-270m-q4_k_m.gguf

Run from the repository root, with the `oracle` extra; made once and committed. Holds logits of tiny
models with random weights, greedy continuations of Gemma 3 270M and token ids of nasty strings.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.gemma3_tiny import CASES, SHOWN, config_of, tensors_of, token_ids
from tests.oracle.make_golden import rounded, sha256, write
from tests.oracle.reference_gemma3 import GemmaFile, Reference
from tests.oracle.strings import STRINGS

GOLDEN = Path(__file__).parents[1] / "data" / "gemma3.json"
NUM_NEW = 32
PACKAGES = ("torch", "transformers", "sentencepiece", "gguf", "numpy")
BOS = 2
TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Die Hauptstadt von Deutschland ist Berlin. Die Hauptstadt von",
    "1, 1, 2, 3, 5, 8, 13,",
    "日本の首都は東京です。",
)
LONG = "The quick brown fox jumps over the lazy dog, number {}. "
LONG_TEXT = "".join(LONG.format(i) for i in range(60))  # longer than a window of 512


def weights_hash(case: str) -> str:
    """So that another random generator is not taken for a wrong model."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors_of(case).items()):
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def tiny(case: str) -> dict[str, Any]:
    reference = Reference(config_of(case), tensors_of(case))
    logits = reference.logits(token_ids(case))[list(SHOWN)].numpy()
    rows = [[float(f"{value:.7g}") for value in row] for row in logits.tolist()]
    return {"case": case, "weights": weights_hash(case), "logits": rows}


def continued(reference: Reference, file_tokens: Any, text: str) -> dict[str, Any]:
    prompt_ids = [BOS, *file_tokens.encode(text)]
    answer = reference.greedy(prompt_ids, NUM_NEW)
    return {
        "text": text,
        "prompt_ids": prompt_ids,
        "output_ids": answer.token_ids,
        "second_ids": answer.second_ids,
        "margins": rounded(answer.margins),
        "logprobs": rounded(answer.logprobs),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the golden file of Gemma 3.")
    parser.add_argument("model", type=Path, help="gemma-3-270m-q4_k_m.gguf")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="default: %(default)s")
    args = parser.parse_args(argv)
    file = GemmaFile(args.model)
    tokenizer = file.tokenizer()
    reference = Reference(file.config(), file.weights())
    golden = {
        "about": {
            "made_by": "python -m tests.oracle.make_gemma3_golden",
            "date": datetime.date.today().isoformat(),
            "model": args.model.name,
            "sha256": sha256(args.model),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "tiny": [tiny(case) for case in CASES],
        "prompts": [continued(reference, tokenizer, text) for text in (*TEXTS, LONG_TEXT)],
        "tokenizer": [{"text": text, "token_ids": tokenizer.encode(text)} for text in STRINGS],
    }
    write(args.out, golden)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
