"""Which form of a kernel runs."""

from __future__ import annotations

import pytest

from pallas_kernels.backend import Backend, resolve_backend


def test_auto_is_the_reference_form_on_a_cpu_and_pallas_on_a_gpu():
    assert resolve_backend("auto", platform="cpu") == Backend("reference")
    found = resolve_backend("auto", platform="gpu", compute_capability="9.0")
    assert found == Backend("pallas", "sm_90", is_exact=True)


@pytest.mark.parametrize(
    ("capability", "gpu"),
    [("8.0", "sm_80"), ("8.6", "sm_80"), ("8.9", "sm_80"), ("9.0", "sm_90"), ("10.0", "sm_80")],
)
def test_tiles_follow_the_generation(capability: str, gpu: str):
    assert resolve_backend("pallas", platform="gpu", compute_capability=capability).gpu == gpu


@pytest.mark.parametrize("name", ["interpret", "reference"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_form_that_runs_everywhere_is_taken_by_name(name: str, platform: str):
    assert resolve_backend(name, platform=platform, compute_capability="9.0").form == name


def test_an_older_gpu_gets_the_reference_form():
    assert resolve_backend("auto", platform="gpu", compute_capability="7.5").form == "reference"


@pytest.mark.parametrize(("platform", "capability"), [("cpu", None), ("gpu", "7.5"), ("gpu", None)])
def test_pallas_without_a_gpu_for_it_is_refused(platform: str, capability: str | None):
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU .* got platform .*auto or referenc"):
        resolve_backend("pallas", platform=platform, compute_capability=capability)


@pytest.mark.parametrize("name", ["triton", "", "Reference"])
def test_a_form_that_does_not_exist_is_refused(name: str):
    with pytest.raises(ValueError, match=f"one of pallas, interpret, reference; got '{name}'"):
        resolve_backend(name, platform="cpu")


def test_exactness_is_on_unless_it_is_switched_off():
    assert resolve_backend("auto", platform="cpu").is_exact
    assert not resolve_backend("auto", platform="cpu", is_exact=False).is_exact
