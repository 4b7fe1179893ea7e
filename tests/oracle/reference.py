"""What transformers says about SmolLM2 on a CPU in float32.

The reference that the product is compared with, so it imports nothing of jaxinfer or checkpoints.
Needs the `oracle` extra (torch, transformers).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.oracle.gguf_file import GGUFModel


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy choices, one entry per generated token."""

    token_ids: list[int]  # the best
    second_ids: list[int]  # the second best
    margins: list[float]  # best logit minus second best, >= 0
    logprobs: list[float]  # of the best, natural logarithm

    @classmethod
    def from_logits(cls, logits: torch.Tensor) -> "Continuation":
        """Judge rows of logits f32[n, V]."""
        best = logits.topk(2, dim=-1)
        logprobs = logits.double().log_softmax(-1).amax(-1)
        return cls(
            token_ids=best.indices[:, 0].tolist(),
            second_ids=best.indices[:, 1].tolist(),
            margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
            logprobs=logprobs.tolist(),
        )


class Reference:
    """transformers' LlamaForCausalLM and a tokenizer, both made from one GGUF file."""

    def __init__(self, path: Path):
        source = GGUFModel(path)
        self._tokenizer = source.tokenizer()
        self._model: Any = LlamaForCausalLM(LlamaConfig(**source.config()))
        self._model.set_attn_implementation("eager")
        weights = {name: torch.from_numpy(rows) for name, rows in source.weights().items()}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        self._model.load_state_dict(weights, strict=True)
        self._model.eval()
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    def encode(self, text: str, *, control_tokens: bool = True) -> list[int]:
        """Token ids; with `control_tokens` False "<|im_end|>" in the text is plain characters."""
        self._tokenizer.encode_special_tokens = not control_tokens
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits f32[T, V] of every position, in one pass without a cache."""
        return self._model(torch.tensor([token_ids]), use_cache=False).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], num_new: int) -> Continuation:
        """`num_new` greedy tokens, one by one with a KV cache; the end token does not end it."""
        prompt = torch.tensor([token_ids])
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new
        )
        return Continuation.from_logits(torch.cat(output.logits))

    def score(self, token_ids: list[int]) -> np.ndarray:
        """Log-probability f64[T - 1] of each token after the first, given those before it."""
        logprobs = self.logits(token_ids)[:-1].double().log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()
