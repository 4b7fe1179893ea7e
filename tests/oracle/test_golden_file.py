"""The golden file is well formed and says what its readers count on; no model, no torch."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.oracle.prompts import PROMPTS, SCORED_TEXTS
from tests.oracle.strings import STRINGS

PATH = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"
GOLDEN = json.loads(PATH.read_text("utf-8"))
VOCAB_SIZE = 49152
IM_START, IM_END = 1, 2


def are_token_ids(ids: list[int]) -> bool:
    return all(type(token) is int and 0 <= token < VOCAB_SIZE for token in ids)


def test_it_is_small_enough_to_commit_and_says_where_it_comes_from():
    assert PATH.stat().st_size < 150_000
    about = GOLDEN["about"]
    assert re.fullmatch(r"[0-9a-f]{64}", about["sha256"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", about["date"])
    assert {"torch", "transformers", "tokenizers", "gguf"} <= set(about["versions"])
    assert "/" not in about["model"]


def test_it_holds_the_listed_prompts_scored_texts_and_strings():
    assert [entry["name"] for entry in GOLDEN["prompts"]] == [prompt.name for prompt in PROMPTS]
    assert [entry["text"] for entry in GOLDEN["scored"]] == list(SCORED_TEXTS)
    assert [entry["text"] for entry in GOLDEN["tokenizer"]] == list(STRINGS)


@pytest.mark.parametrize("entry", GOLDEN["prompts"], ids=lambda entry: entry["name"])
def test_a_prompt_has_its_length_and_64_of_everything(entry):
    prompt = next(prompt for prompt in PROMPTS if prompt.name == entry["name"])
    assert len(entry["prompt_ids"]) == prompt.num_tokens
    assert entry["text"].startswith(prompt.head)
    assert entry["text"].endswith(prompt.tail)
    for field in ("output_ids", "second_ids", "margins", "logprobs"):
        assert len(entry[field]) == GOLDEN["about"]["num_new"] == 64
    assert are_token_ids(entry["prompt_ids"] + entry["output_ids"] + entry["second_ids"])


@pytest.mark.parametrize("entry", GOLDEN["prompts"], ids=lambda entry: entry["name"])
def test_the_best_token_is_not_the_second_best_and_its_numbers_are_possible(entry):
    assert all(a != b for a, b in zip(entry["output_ids"], entry["second_ids"], strict=True))
    assert all(margin >= 0 for margin in entry["margins"])
    # The best of V tokens has at least probability 1/V; margin m bounds it by 1 / (1 + e^-m).
    for margin, logprob in zip(entry["margins"], entry["logprobs"], strict=True):
        assert -math.log(VOCAB_SIZE) < logprob <= -math.log1p(math.exp(-margin)) + 1e-4


def test_the_answers_do_not_stop_at_the_end_token():
    ends = [e["output_ids"].index(IM_END) for e in GOLDEN["prompts"] if IM_END in e["output_ids"]]
    assert any(end < 32 for end in ends)


def test_chat_prompts_hold_control_tokens_as_single_ids():
    chats = [entry for entry in GOLDEN["prompts"] if entry["name"].startswith("chat-")]
    assert len(chats) == 4
    for entry in chats:
        assert entry["prompt_ids"][0] == IM_START
        assert entry["prompt_ids"].count(IM_START) == entry["text"].count("<|im_start|>")
        assert entry["prompt_ids"].count(IM_END) == entry["text"].count("<|im_end|>")


@pytest.mark.parametrize("entry", GOLDEN["scored"], ids=lambda entry: entry["text"][:11])
def test_a_scored_text_has_a_logprob_for_every_token_but_the_first(entry):
    assert are_token_ids(entry["token_ids"])
    assert len(entry["logprobs"]) == len(entry["token_ids"]) - 1
    assert all(logprob < 0 for logprob in entry["logprobs"])
    mean = -sum(entry["logprobs"]) / len(entry["logprobs"])
    assert entry["mean_nll"] == pytest.approx(mean, abs=1e-3)


def test_strings_have_ids_and_another_plain_form_only_where_they_spell_a_control_token():
    for entry in GOLDEN["tokenizer"]:
        plain_ids = entry.get("plain_ids", entry["token_ids"])
        assert are_token_ids(entry["token_ids"] + plain_ids)
        assert ("plain_ids" in entry) == any(token <= 16 for token in entry["token_ids"])
        assert all(token > 16 for token in plain_ids)


def test_only_a_string_with_a_byte_that_has_no_token_decodes_to_something_else():
    others = {
        entry["text"]: entry["decoded"] for entry in GOLDEN["tokenizer"] if "decoded" in entry
    }
    assert others == {text: text.replace("\x04", "") for text in STRINGS if "\x04" in text}


def test_every_ascii_digit_is_a_token_of_its_own():
    entry = next(entry for entry in GOLDEN["tokenizer"] if entry["text"] == "1234567890")
    assert len(entry["token_ids"]) == 10
    assert len(set(entry["token_ids"])) == 10
