"""What transformers and SentencePiece say about Gemma 3 on a CPU in float32.

Imports nothing of jaxinfer or checkpoints. Needs the `oracle` extra.
"""

from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from sentencepiece import sentencepiece_model_pb2
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.oracle.reference import Continuation

USER_DEFINED = 4
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IGNORED = ("architectures", "model_type", "hidden_act")


class Reference:
    """transformers' Gemma3ForCausalLM."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray]):
        arguments = {key: value for key, value in config.items() if key not in IGNORED}
        self._model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**arguments))
        self._model.set_attn_implementation("eager")
        state = {name: torch.from_numpy(rows) for name, rows in weights.items()}
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        self._model.load_state_dict(state, strict=True)
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits f32[T, V] of every position, in one pass without a cache."""
        return self._model(torch.tensor([token_ids]), use_cache=False).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], num_new: int) -> Continuation:
        """`num_new` greedy tokens, one by one with a KV cache."""
        ids, cache, rows = torch.tensor([token_ids]), None, []
        for _ in range(num_new):
            out = self._model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
            ids = rows[-1].argmax().reshape(1, 1)
        return Continuation.from_logits(torch.stack(rows))


class GemmaFile:
    """Gemma 3 270M's GGUF."""

    def __init__(self, path: Path):
        self._reader = GGUFReader(path)
        self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}

    def config(self) -> dict[str, Any]:
        """The arguments of transformers' Gemma3TextConfig; what is not here has its default."""
        get = self._metadata.__getitem__
        return {
            "vocab_size": len(get("tokenizer.ggml.tokens")),
            "hidden_size": get("gemma3.embedding_length"),
            "intermediate_size": get("gemma3.feed_forward_length"),
            "num_hidden_layers": get("gemma3.block_count"),
            "num_attention_heads": get("gemma3.attention.head_count"),
            "num_key_value_heads": get("gemma3.attention.head_count_kv"),
            "head_dim": get("gemma3.attention.key_length"),
            "max_position_embeddings": get("gemma3.context_length"),
            "sliding_window": get("gemma3.attention.sliding_window"),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor as f32 [out, in] under its Hugging Face name; norms less their 1."""
        weights = {}
        for tensor in self._reader.tensors:
            rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            part, kind = tensor.name.split(".")[-2], tensor.name.rsplit(".", 1)[0]
            if part.endswith("norm"):
                rows = rows - np.float32(1)
            if kind in TOP_NAMES:
                name = TOP_NAMES[kind]
            else:
                name = f"model.layers.{tensor.name.split('.')[1]}.{LAYER_NAMES[part]}"
            weights[f"{name}.weight"] = np.ascontiguousarray(rows)
        return weights

    def tokenizer(self) -> sentencepiece.SentencePieceProcessor:
        """SentencePiece itself over the file's pieces, scores and types."""
        model = sentencepiece_model_pb2.ModelProto()
        names = ("tokens", "scores", "token_type")
        columns = (self._metadata[f"tokenizer.ggml.{name}"] for name in names)
        for text, score, kind in zip(*columns, strict=True):
            piece = model.pieces.add()
            # Converters write the spaces of user-defined pieces as spaces.
            piece.piece = text.replace(" ", "▁") if kind == USER_DEFINED else text
            piece.score, piece.type = score, 2 if text == "<unk>" else int(kind)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        trainer.model_type = trainer.BPE
        trainer.byte_fallback, trainer.vocab_size = True, len(model.pieces)
        trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
        trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = "<pad>", "<eos>", "<bos>"
        normalizer.name = "identity"
        normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
