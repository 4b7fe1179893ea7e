"""A tiny model of each architecture as llama.cpp's converter wrote it (tests/data/gguf/): its
config and its tensors are those that it was converted from.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_config import hf_config
from checkpoints.gguf_fields import NEUTRAL
from checkpoints.gguf_header import read_header
from checkpoints.gguf_names import ARCHITECTURES
from checkpoints.gguf_parts import mapped_file
from checkpoints.gguf_rope import ROPE_TENSORS
from checkpoints.layout import arranged
from checkpoints.load import load_faults
from checkpoints.source import TensorSource
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import decoder_for, model_config
from tests.oracle.gguf_models import CONFIGS, tensors

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
SPELLED_OTHERWISE = {"model_type", "architectures"}  # Mistral's files are llama's
NOT_IN_THE_FILE = {"use_sliding_window"}
SAID_BY_LAYER_TYPES = {"sliding_window_pattern"}


def source_of(name: str) -> tuple[TensorSource, dict]:
    found = GGUFSource(FOLDER / f"{name}.gguf")
    return arranged(found, found.config, name), found.config


def test_there_is_a_file_of_each_architecture():
    found = {GGUFSource(file).metadata["general.architecture"] for file in FOLDER.iterdir()}
    assert found == {architecture.name for architecture in ARCHITECTURES}
    assert {file.stem for file in FOLDER.iterdir()} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_tensors_are_bit_equal_to_those_converted(name: str):
    source, _ = source_of(name)
    expected = tensors(CONFIGS[name])
    assert set(source.names()) == set(expected)
    for tensor, values in expected.items():
        assert source.info(tensor).shape == values.shape, tensor
        got = source.read(tensor)
        np.testing.assert_array_equal(got.astype(np.float32), values, err_msg=tensor)
        part = source.read(tensor, (slice(1, 5),))
        np.testing.assert_array_equal(part.astype(np.float32), values[1:5], err_msg=tensor)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_the_one_converted(name: str):
    _, config = source_of(name)
    assert model_config(config) == model_config(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_finds_each_weight_and_no_other(name: str):
    source, config = source_of(name)
    plan = decoder_for(config, dtype=jnp.dtype(jnp.float32)).weight_plan()
    assert not list(load_faults(source, plan, file=name))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_key_is_the_one_converted(name: str):
    """Of the config.json, those too that no model here reads."""
    original, (_, config) = CONFIGS[name], source_of(name)
    left_out = NOT_IN_THE_FILE | SAID_BY_LAYER_TYPES
    if name == "mistral":
        left_out |= SPELLED_OTHERWISE
    if name == "qwen2":
        left_out |= {"sliding_window"}  # which is off
    for key in original.keys() - left_out - {"rope_scaling", "bos_token_id", "eos_token_id"}:
        assert config.get(key) == original[key], key
    scaling = {"rope_type" if k == "type" else k: v for k, v in _scaling(original).items()}
    assert _scaling(config) == scaling


ODD = (0, -1, 3, 1 << 40, 1.5, float("nan"), 1e300, True, "x", ["x"], np.array([4, 4]))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_odd_value_of_any_key_is_refused_in_one_line_or_is_a_model(name: str):
    path = FOLDER / f"{name}.gguf"
    header = read_header(path, mapped_file(path))
    shapes = {tensor.name: tensor.shape for tensor in header.tensors.values()}
    factors = {name: np.ones(3, np.float32) for name in ROPE_TENSORS if name in shapes}
    prefix = header.metadata["general.architecture"]
    keys = {f"{prefix}.{key}" for key in NEUTRAL} | header.metadata.keys()
    refusals = []
    for key, value in product(sorted(keys), ODD):
        try:
            metadata = header.metadata | {key: value}
            model_config(hf_config(path, metadata, shapes, rope_tensors=factors))
        except (CheckpointError, ConfigError) as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not [text for text in refusals if "\n" in text or len(text) > 500]


def _scaling(config: dict) -> dict:
    return config.get("rope_scaling") or {}
