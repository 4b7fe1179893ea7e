"""Which form of a kernel runs."""

import pytest

from pallas_kernels.backend import resolve_backend


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_reference_form_runs_everywhere(name: str):
    assert resolve_backend(name) == "reference"


@pytest.mark.parametrize("name", ["pallas", "", "Reference"])
def test_a_form_that_does_not_exist_is_refused(name: str):
    with pytest.raises(ValueError, match=f"must be auto or one of reference; got '{name}'"):
        resolve_backend(name)
