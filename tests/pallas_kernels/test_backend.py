"""Which form of a kernel runs."""

from __future__ import annotations

import pytest

from pallas_kernels.backend import REFERENCE, Backend, resolve_backend


def test_auto_is_the_reference_form_on_a_cpu_and_pallas_on_a_gpu():
    assert resolve_backend("auto", platform="cpu") == Backend("reference")
    found = resolve_backend("auto", platform="gpu", compute_capability="9.0")
    assert found == Backend("pallas", "sm_90", is_exact=True)


@pytest.mark.parametrize(
    ("capability", "gpu"),
    [("8.0", "sm_80"), ("8.6", "sm_80"), ("8.9", "sm_80"), ("9.0", "sm_90"), ("12.0", "sm_80")],
)
def test_tiles_follow_the_generation(capability: str, gpu: str):
    assert resolve_backend("pallas", platform="gpu", compute_capability=capability).gpu == gpu


@pytest.mark.parametrize("name", ["interpret", "reference"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_form_that_runs_everywhere_is_taken_by_name(name: str, platform: str):
    assert resolve_backend(name, platform=platform, compute_capability="9.0").form == name


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_an_older_or_another_gpu_gets_the_reference_form(capability: str):
    for name in ("auto", "reference"):
        found = resolve_backend(name, platform="gpu", compute_capability=capability)
        assert found.form == "reference"


@pytest.mark.parametrize("capability", ["10.0", "10.3", "11.0"])
def test_a_gpu_whose_instructions_follow_the_rows_is_not_called_exact(capability: str):
    with pytest.raises(ValueError, match=f"on compute capability {capability}, .*no-batch-invar"):
        resolve_backend("auto", platform="gpu", compute_capability=capability)
    found = resolve_backend("auto", platform="gpu", compute_capability=capability, is_exact=False)
    assert (found.form, found.gpu, found.is_exact) == ("pallas", "sm_80", False)


def test_exact_programs_of_a_gpu_leave_nothing_to_timing():
    assert Backend("pallas").compiler_options == {
        "xla_allow_excess_precision": False,
        "xla_gpu_experimental_enable_fusion_autotuner": False,
    }
    for backend in (REFERENCE, Backend("interpret"), Backend("pallas", is_exact=False)):
        assert backend.compiler_options == {}


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
