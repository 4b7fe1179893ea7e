"""The committed golden file is still what transformers says.

Runs with the `oracle` extra and the default model's file in the user's cache folder, where serving
puts it. The engine is compared with the golden file elsewhere: nothing of the product is used here.
"""

import hashlib
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.prompts import PROMPTS, SCORED_TEXTS, fit
from tests.oracle.strings import STRINGS

# torch and transformers warn about themselves, differently in each version.
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text("utf-8"))
BY_NAME = {entry["name"]: entry for entry in GOLDEN["prompts"]}
MODELS = Path(".cache") / "jaxinfer" / "models"  # below the home folder
NEAR_TIE = 1e-3  # logits; below it another summation order may choose the second best


@pytest.fixture(scope="module")
def model_path() -> Path:
    path = Path.home() / MODELS / "smollm2-135m-instruct" / GOLDEN["about"]["model"]
    if not path.is_file():
        pytest.skip(f"needs the default model's file in ~/{MODELS}; `make serve` fetches it")
    return path


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}; pip install '.[oracle]'")
    from tests.oracle.reference import Reference

    return Reference(model_path)


def close(values: Any) -> Any:
    """Logits or logprobs within what float32 and the 5 recorded digits leave open."""
    return pytest.approx(values, abs=1e-3, rel=1e-4)


def same_or_near_tie(entry: dict[str, Any], found: list[int]) -> bool:
    """Whether the tokens are the recorded ones up to the end, or up to a near tie's second best."""
    for expected, second, margin, token in zip(
        entry["output_ids"], entry["second_ids"], entry["margins"], found, strict=True
    ):
        if token != expected:
            return margin < NEAR_TIE and token == second
    return True


def test_the_model_file_is_the_one_that_the_golden_file_names(model_path):
    assert hashlib.sha256(model_path.read_bytes()).hexdigest() == GOLDEN["about"]["sha256"]


def test_every_prompt_is_recorded_with_the_text_and_tokens_of_the_list(reference):
    assert list(BY_NAME) == [prompt.name for prompt in PROMPTS]
    for prompt in PROMPTS:
        entry = BY_NAME[prompt.name]
        expected = fit(prompt, reference.encode, reference.decode)
        assert (entry["text"], entry["prompt_ids"]) == expected


@pytest.mark.parametrize("name", ["capital", "chat-capital", "german"])
def test_generating_again_with_a_cache_gives_the_recorded_tokens(reference, name):
    entry = BY_NAME[name]
    found = reference.greedy(entry["prompt_ids"], GOLDEN["about"]["num_new"])
    assert same_or_near_tie(entry, found.token_ids)
    if found.token_ids == entry["output_ids"]:
        assert found.margins == close(entry["margins"])
        assert found.logprobs == close(entry["logprobs"])


@pytest.mark.parametrize("name", list(BY_NAME))
def test_one_pass_over_prompt_and_answer_without_a_cache_agrees_with_the_record(reference, name):
    from tests.oracle.reference import Continuation

    entry = BY_NAME[name]
    num_prompt = len(entry["prompt_ids"])
    logits = reference.logits(entry["prompt_ids"] + entry["output_ids"])
    found = Continuation.from_logits(logits[num_prompt - 1 : -1])
    for i, margin in enumerate(entry["margins"]):
        if margin >= NEAR_TIE:
            assert found.token_ids[i] == entry["output_ids"][i]
    assert found.margins == close(entry["margins"])
    assert found.logprobs == close(entry["logprobs"])


def test_the_second_best_tokens_are_second_where_the_third_is_not_close(reference):
    entry = BY_NAME["chat-capital"]
    num_prompt = len(entry["prompt_ids"])
    logits = reference.logits(entry["prompt_ids"] + entry["output_ids"])[num_prompt - 1 : -1]
    best = logits.topk(3, dim=-1)
    clear = [
        i
        for i, row in enumerate(best.values.tolist())
        if all(a - b > NEAR_TIE for a, b in pairwise(row))
    ]
    assert len(clear) > 50
    assert [best.indices[i, 1].item() for i in clear] == [entry["second_ids"][i] for i in clear]


@pytest.mark.parametrize("number", range(len(SCORED_TEXTS)))
def test_scoring_again_gives_the_recorded_logprobs(reference, number):
    entry = GOLDEN["scored"][number]
    assert entry["text"] == SCORED_TEXTS[number]
    assert entry["token_ids"] == reference.encode(entry["text"])
    logprobs = reference.score(entry["token_ids"])
    assert logprobs.tolist() == close(entry["logprobs"])
    assert -logprobs.mean() == close(entry["mean_nll"])


def test_every_string_still_has_the_recorded_token_ids(reference):
    assert [entry["text"] for entry in GOLDEN["tokenizer"]] == list(STRINGS)
    for entry in GOLDEN["tokenizer"]:
        plain_ids = reference.encode(entry["text"], control_tokens=False)
        assert reference.encode(entry["text"]) == entry["token_ids"]
        assert plain_ids == entry.get("plain_ids", entry["token_ids"])
        assert reference.decode(entry["token_ids"]) == entry.get("decoded", entry["text"])
