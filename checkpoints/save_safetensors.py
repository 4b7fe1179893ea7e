"""An opened checkpoint, quantized or not, written again as a folder of safetensors."""

from __future__ import annotations

from pathlib import Path

from checkpoints.certificate import CERTIFICATE_FILE, carried_certificate
from checkpoints.checkpoint import Checkpoint
from checkpoints.formats import quantization_of
from checkpoints.save import CheckpointWriter


def save_safetensors(out: Path, original: Checkpoint) -> None:
    """A folder with the same tensors, config, tokenizer and certificate; there at once or not.

    Blocks of a GGUF file are written as the float32 numbers that they stand for; products have the
    names that models here give them. Host memory: one shard.
    Raises: CheckpointError if `out` exists, the disk has no room, or writing fails.
    """
    source = original.source
    kept = quantization_of(original.config, str(original.path))
    num_bytes = sum(source.info(name).nbytes for name in source.names())
    with CheckpointWriter(out, original, num_bytes=num_bytes) as writer:
        for name in source.names():
            writer.add_tensor(name, source.read(name))
        certificate = carried_certificate(
            original.path, original.version, writer.draft(kept).version
        )
        if certificate is not None:
            writer.add_json(CERTIFICATE_FILE, certificate.to_json())
        writer.finish(kept)
