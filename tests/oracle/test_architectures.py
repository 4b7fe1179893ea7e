"""The committed logits of the tiny models are still what transformers says, with a cache too.

Runs with the `oracle` extra. Our own models are compared with the record elsewhere
(tests/models/test_architectures.py): nothing of the product is used here.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.architectures import CASES, SHOWN

# torch and transformers warn about themselves, differently in each version.
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "architectures.json").read_text("utf-8"))
RECORDED = {entry["case"]: np.array(entry["logits"]) for entry in GOLDEN["models"]}
CHANGES_WITHIN = "phi3, longrope of long texts"
"""With a cache transformers turns its first tokens by the short factors, whatever comes after."""
ERROR = 1e-5  # of the largest logit: another order of sums in another version


@pytest.fixture(scope="module")
def maker() -> Any:
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}; pip install '.[oracle]'")
    from tests.oracle import make_architectures_golden

    return make_architectures_golden


@pytest.mark.parametrize(
    ("case", "num_first"),
    [
        *(pytest.param(case, None, id=f"{case}, at once") for case in CASES),
        *(
            pytest.param(case, 130, id=f"{case}, prefill, then tokens")
            for case in CASES
            if case != CHANGES_WITHIN
        ),
    ],
)
def test_transformers_says_it_again(maker: Any, case: str, num_first: int | None):
    found, want = maker.logits(case, num_first=num_first), RECORDED[case]
    assert found.shape == (len(SHOWN), CASES[case]["vocab_size"])
    np.testing.assert_allclose(found, want, rtol=0, atol=ERROR * np.abs(want).max())
