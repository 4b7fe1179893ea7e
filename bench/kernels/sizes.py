"""The shapes that are timed and checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mixture:
    """Of experts."""

    count: int
    per_token: int
    dim: int
    hidden_dim: int

    @property
    def weight(self) -> tuple[int, int]:
        """[out, in] of all experts' products."""
        return self.count * self.hidden_dim, self.dim


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, and of the steps it makes."""

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    hidden_dim: int
    vocab_size: int
    mixture: Mixture
    page_size: int  # tokens
    group: int  # weights that share a scale
    rows: tuple[int, ...]  # of a decode step
    contexts: tuple[int, ...]  # tokens, of each row of a decode step
    chunks: tuple[int, ...]  # tokens of a prefill step
    checked: tuple[int, ...]  # numbers of rows whose bits are compared; the last is the most


SEVEN_B = Sizes(
    heads=32,
    kv_heads=8,
    head_dim=128,
    dim=4096,
    hidden_dim=14336,
    vocab_size=128256,
    mixture=Mixture(count=128, per_token=8, dim=2048, hidden_dim=768),  # Qwen3-30B-A3B
    page_size=64,
    group=128,
    rows=(1, 8, 32, 64),
    contexts=(1024, 8192),
    chunks=(512, 2048),
    checked=tuple(range(1, 65)),
)
SMALL = Sizes(
    heads=4,
    kv_heads=2,
    head_dim=64,
    dim=256,
    hidden_dim=384,
    vocab_size=1000,
    mixture=Mixture(count=4, per_token=2, dim=256, hidden_dim=64),
    page_size=16,
    group=128,
    rows=(1, 8),
    contexts=(96,),
    chunks=(24,),
    checked=(1, 3, 8),
)
