"""An opened checkpoint, quantized or not, written again in orbax's form."""

from __future__ import annotations

from pathlib import Path

from checkpoints.certificate import CERTIFICATE_FILE, carried_certificate
from checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from checkpoints.content_hash import content_hash
from checkpoints.errors import CheckpointError, first_line
from checkpoints.hf_folder import TOKENIZER_FILE
from checkpoints.orbax import orbax_files, write_arrays
from checkpoints.small_files import as_json, write_small_files
from checkpoints.unfinished import UnfinishedFolder


def save_orbax(out: Path, original: Checkpoint) -> None:
    """A folder with the same tensors, config, tokenizer and certificate; there at once or not.

    Host memory: what the original's tensors take as read; those of safetensors are mapped.
    Raises: CheckpointError if `out` exists, the disk has no room, or writing fails.
    """
    source = original.source
    tensors = {name: source.read(name) for name in source.names()}
    folder = UnfinishedFolder(Path(out), sum(tensor.nbytes for tensor in tensors.values()))
    try:
        write_arrays(folder.path, tensors)
        write_small_files(folder.path, original)
        (folder.path / CONFIG_FILE).write_bytes(as_json(original.config))
        _write_certificate(folder.path, original)
        folder.finish()
    except OSError as error:
        raise folder.failure(error) from None
    except ValueError as error:  # as orbax and tensorstore say that they could not write
        raise CheckpointError(
            f"{out}: expected to write its tensors, found {first_line(error)}; "
            "nothing is left of it"
        ) from None
    finally:
        folder.discard()


def _write_certificate(folder: Path, original: Checkpoint) -> None:
    files = [folder / CONFIG_FILE, folder / TOKENIZER_FILE, *orbax_files(folder)]
    certificate = carried_certificate(original.path, original.version, content_hash(files))
    if certificate is not None:
        (folder / CERTIFICATE_FILE).write_bytes(as_json(certificate.to_json()))
