"""The form of the weights: what the file has, what the user asks, what a certificate allows."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from checkpoints import certificate
from checkpoints.certificate import Certificate
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from checkpoints.rounded_version import rounded_version
from checkpoints.save import CheckpointWriter
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError
from jaxinfer.runtime import weight_choice
from jaxinfer.runtime.weight_choice import ON_THE_FLY, WeightChoice
from tests.certificates import certified
from tests.tiny import write_checkpoint

INT8 = ON_THE_FLY["int8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("plain") / "model"))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of certificates in place of the package's own."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    own = certificate.shipped_certificate
    monkeypatch.setattr(weight_choice, "shipped_certificate", lambda version: own(version, folder))
    return folder


def put(folder: Path, found: Certificate, name: str = "certificate.json") -> None:
    (folder / name).write_text(json.dumps(found.to_json()))


def choose(checkpoint: Checkpoint, *, is_int8_fast: bool = False, **source: Any) -> WeightChoice:
    return weight_choice.choose_weights(
        ModelSource(**source), checkpoint, is_int8_fast=is_int8_fast
    )


def quantized(folder: Path, plain: Checkpoint) -> Checkpoint:
    """A folder that says that it is quantized; its tensors do not matter here."""
    with CheckpointWriter(folder / "out", plain) as writer:
        writer.finish(INT8)
    return open_checkpoint(folder / "out")


def test_floats_stay_floats_unless_something_says_otherwise(shipped: Path, plain: Checkpoint):
    want = WeightChoice(None, plain.version)
    assert choose(plain) == want
    assert choose(plain, is_int8_fast=True) == want
    assert choose(plain, quantization="none", is_int8_fast=True) == want
    assert want.line() == "not quantized"


def test_each_form_of_one_file_is_a_version_of_its_own(shipped: Path, plain: Checkpoint):
    forms = [choose(plain, quantization=name) for name in ("none", "int8", "int4")]
    versions = {form.version for form in forms}
    assert len(versions) == 3
    assert all(len(version) == 16 for version in versions)
    assert [form.quantization for form in forms] == [None, INT8, ON_THE_FLY["int4"]]
    assert choose(plain, quantization="int8") == forms[1]


def test_another_way_to_round_is_another_version(monkeypatch: pytest.MonkeyPatch):
    from checkpoints import rounded_version as module

    before, own = rounded_version("v", INT8), module.round_to_nearest
    monkeypatch.setattr(module, "round_to_nearest", lambda weight, kept: own(weight * 1.01, kept))
    assert rounded_version("v", INT8) != before


def test_a_rounding_that_is_asked_for_is_allowed_with_a_warning(
    shipped: Path, plain: Checkpoint, caplog: pytest.LogCaptureFixture
):
    choice = choose(plain, quantization="int4")
    assert "rounded to int4 without a certificate" in caplog.text
    assert choice.line() == "int4-g64-asym by rounding: no certificate, cost unknown"


def test_on_a_cpu_auto_takes_the_fast_form_that_a_certificate_allows(
    shipped: Path, plain: Checkpoint, caplog: pytest.LogCaptureFixture
):
    found = certified(rounded_version(plain.version, INT8))
    put(shipped, certified("another"), "a.json")
    put(shipped, found, "b.json")
    choice = choose(plain, is_int8_fast=True)
    assert (choice.quantization, choice.version) == (INT8, found.quantized)
    assert choice.certificate == found
    assert choice.line() == found.line()
    assert choose(plain, is_int8_fast=True, max_kl=0.003) == choice
    assert choose(plain, quantization="int8") == choice
    assert not caplog.records
    plain_form = WeightChoice(None, plain.version)
    assert choose(plain) == plain_form
    assert choose(plain, is_int8_fast=True, max_kl=0.002) == plain_form
    assert choose(plain, is_int8_fast=True, quantization="none") == plain_form
    with pytest.raises(CheckpointError, match=r"at most 0\.002 .*found 0\.003"):
        choose(plain, quantization="int8", max_kl=0.002)


def test_a_quantized_folder_is_served_by_its_certificate(tmp_path: Path, plain: Checkpoint):
    checkpoint = quantized(tmp_path, plain)
    found = certified(checkpoint.version, kl=0.05)
    put(checkpoint.path, found)
    want = WeightChoice(INT8, checkpoint.version, certificate=found)
    assert choose(checkpoint) == want
    assert want.line().startswith("int8 by nearest: KL 0.0500, perplexity 10.00 (+0.10 %)")


@pytest.mark.parametrize("kl", [0.0501, math.inf, math.nan])
def test_what_costs_too_much_is_refused_with_both_numbers(
    tmp_path: Path, plain: Checkpoint, kl: float
):
    checkpoint = quantized(tmp_path, plain)
    put(checkpoint.path, certified(checkpoint.version, kl=kl))
    with pytest.raises(CheckpointError, match=rf"at most 0\.05 nats .*found {kl:g} .*--max-kl"):
        choose(checkpoint)
    assert choose(checkpoint, max_kl=math.inf).quantization == INT8
    if math.isfinite(kl):
        assert choose(checkpoint, max_kl=0.06).certificate is not None


@pytest.mark.parametrize(("other", "found"), [(None, "none"), ("f" * 16, f"one of {'f' * 16}")])
def test_a_quantized_folder_without_a_certificate_of_its_own_is_refused(
    tmp_path: Path,
    plain: Checkpoint,
    other: str | None,
    found: str,
    caplog: pytest.LogCaptureFixture,
):
    checkpoint = quantized(tmp_path, plain)
    if other is not None:
        put(checkpoint.path, certified(other))
    with pytest.raises(CheckpointError, match=rf"certificate of these weights .*found {found};"):
        choose(checkpoint, max_kl=100.0)
    choice = choose(checkpoint, max_kl=math.inf)
    assert (choice.quantization, choice.certificate) == (INT8, None)
    assert choice.line() == "int8: no certificate, cost unknown"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_is_quantized_is_not_quantized_again(tmp_path: Path, plain: Checkpoint):
    checkpoint = quantized(tmp_path, plain)
    for name in ("none", "int8"):
        with pytest.raises(ConfigError, match=f"quantized already; .*got {name}"):
            choose(checkpoint, quantization=name)


@pytest.mark.parametrize("max_kl", [-0.1, math.nan])
def test_a_budget_is_a_number_of_nats(max_kl: float):
    with pytest.raises(ConfigError, match="max_kl must be nats of at least 0"):
        ModelSource(max_kl=max_kl)


def test_all_that_differs_in_format_differs_in_version():
    kinds = [WeightFormat(8), WeightFormat(8, 32), WeightFormat(8, has_zero=True), WeightFormat(4)]
    forms = [Quantization(kept) for kept in kinds]
    forms.append(Quantization(WeightFormat(8), head=None))
    forms.append(Quantization(WeightFormat(8), exceptions=(("layers.0.mlp.up_proj", None),)))
    assert len({rounded_version("v", form) for form in forms}) == len(forms)
