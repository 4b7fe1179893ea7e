"""A certificate for tests; only what it is of and what it costs matters to them."""

from __future__ import annotations

from checkpoints.certificate import Answer, Certificate, LayerError, Perplexity


def certified(quantized: str, kl: float = 0.003) -> Certificate:
    known = Perplexity(10.0, 9.0, 11.0)
    return Certificate(
        original="0" * 16,
        quantized=quantized,
        format="int8",
        method="nearest",
        seed=0,
        calibration_hash="",
        num_calibration_tokens=0,
        held_out_hash="h",
        num_held_out_tokens=10_000,
        kl=kl,
        kl_p99=0.1,
        perplexity=known,
        original_perplexity=known,
        perplexity_change=Perplexity(0.001, 0.0, 0.002),
        agreement=0.99,
        num_bytes=100,
        original_bytes=400,
        layer_errors=(LayerError("layers.0.mlp.up_proj", "int8", 0.004, 0.005),),
        answers=(Answer("Hi", "Hello.", "Hello!"),),
    )
