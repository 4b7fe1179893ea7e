"""A model written again as safetensors is the same model."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.certificate import read_certificate
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from checkpoints.rounding import round_to_nearest
from checkpoints.save import CheckpointWriter
from checkpoints.save_safetensors import save_safetensors
from tests.certificates import certified

INT4 = Quantization(WeightFormat(4, 32, has_zero=True), head=None)


@pytest.fixture(params=["gguf", "float16 folder", "quantized folder"])
def original(tmp_path: Path, tiny, request: pytest.FixtureRequest) -> Checkpoint:
    folder = tmp_path / "original"
    folder.mkdir()
    if request.param == "gguf":
        vocabulary = tiny.vocabulary(tiny.byte_level(), "smollm")
        return open_checkpoint(tiny.gguf(folder / "m.gguf", tiny.model(), vocabulary))
    found = open_checkpoint(tiny.folder(folder / "float", tiny.model()))
    kept = INT4 if request.param == "quantized folder" else None
    with CheckpointWriter(folder / "out", found) as writer:
        for name in found.source.names():
            tensor = found.source.read(name)
            if kept is None or tensor.ndim == 1 or "embed" in name:
                dtype = ml_dtypes.bfloat16 if kept else np.float16
                writer.add_tensor(name, tensor.astype(dtype))
                continue
            assert kept.weights is not None
            for part, array in round_to_nearest(tensor, kept.weights).parts().items():
                writer.add_tensor(f"{name.removesuffix('weight')}{part}", array)
        if kept is not None:
            certificate = certified(writer.draft(kept).version)
            writer.add_json("certificate.json", certificate.to_json())
        writer.finish(kept)
    return open_checkpoint(folder / "out")


def test_tensors_config_and_words_are_the_originals(tmp_path: Path, original: Checkpoint):
    save_safetensors(tmp_path / "out", original)
    found = open_checkpoint(tmp_path / "out")
    for name in ("chat_template", "bos_token", "eos_token", "add_bos", "eos_token_ids"):
        assert getattr(found, name) == getattr(original, name), name
    found.config.pop("torch_dtype")
    original.config.pop("torch_dtype", None)
    assert found.config == original.config
    assert set(found.source.names()) == set(original.source.names())
    for name in found.source.names():
        want = original.source.read(name)
        assert found.source.info(name).dtype == want.dtype
        assert found.source.read(name).tobytes() == want.tobytes()
    certificate = read_certificate(original.path) if original.path.is_dir() else None
    copied = read_certificate(tmp_path / "out")
    assert (copied is None) is (certificate is None)
    if copied is not None:
        assert copied == certified(found.version)


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path, original: Checkpoint):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="expected a folder that is not there yet"):
        save_safetensors(tmp_path / "out", original)
    assert list((tmp_path / "out").iterdir()) == []
