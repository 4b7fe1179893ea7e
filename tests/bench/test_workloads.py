"""What each measure asks of the engine, and the figures that it makes of the time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from bench.workloads import (
    WORKLOADS,
    Concurrent,
    Decode,
    Disturbed,
    Mixed,
    Prefill,
    Prefix,
    Prompts,
    Request,
    warm_up,
    word_ids,
)
from tests.bench.stopwatch import Stopwatch
from tests.tiny_tokenizers import byte_fallback

WORDS = list(range(1000, 9000))


class Pieces:
    """A vocabulary of given spellings; the last two are special."""

    def __init__(self, *spelled: bytes):
        self._spelled = (*spelled, b" end", b" begin")

    @property
    def vocab_size(self) -> int:
        return len(self._spelled)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset((self.vocab_size - 2, self.vocab_size - 1))

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelled[token_id]


def asked(name: str, repetitions: int = 1) -> list[list[tuple[int, int]]]:
    """Tokens in and out of each request of each call."""
    watch, prompts = Stopwatch(), Prompts(WORDS, name)
    for _ in range(repetitions):
        WORKLOADS[name](watch.run, prompts, watch)
    return [[(len(r.token_ids), r.num_output) for r in call] for call in watch.calls]


def test_words_are_lower_case_with_a_blank_and_three_letters():
    pieces = Pieces(
        b" cat", b"cat", b" Cat", b" at", b" c4t", b" mat\n", b"", b" \xc3\xa9t\xc3\xa9", b" dog"
    )
    assert word_ids(pieces) == [0, 8]


def test_words_are_the_commoner_ones():
    assert word_ids(Pieces(*[b" word"] * 20_010)) == list(range(20_000))


def test_without_words_every_ordinary_token_serves():
    assert word_ids(Pieces(b"a", b"", b"bc")) == [0, 2]


def test_words_are_found_behind_a_sentencepiece_blank():
    from jaxinfer.tokenizer import Tokenizer

    tokenizer = Tokenizer(
        byte_fallback(),
        chat_template=None,
        bos_token="<s>",
        eos_token="</s>",
        add_bos=None,
        eos_token_ids=(2,),
    )
    assert {tokenizer.token_bytes(i) for i in word_ids(tokenizer)} >= {b" the"}


def test_prompts_are_reproducible_and_never_come_twice():
    first, again = Prompts(WORDS, "decode"), Prompts(WORDS, "decode")
    drawn = [first(32) for _ in range(50)]
    assert drawn == [again(32) for _ in range(50)]
    assert len({tuple(prompt[:4]) for prompt in drawn}) == 50
    assert {len(prompt) for prompt in drawn} == {32}
    assert {word for prompt in drawn for word in prompt} <= set(WORDS)


def test_each_workload_has_prompts_of_its_own():
    assert Prompts(WORDS, "conc8")(32) != Prompts(WORDS, "conc32")(32)


def test_decode_asks_for_one_token_and_then_for_128():
    assert asked("decode") == [[(32, 1)], [(32, 128)]]


def test_prefill_is_one_prompt_of_1024_tokens():
    assert asked("prefill") == [[(1024, 1)]]


@pytest.mark.parametrize(("name", "number"), [("conc8", 8), ("conc32", 32)])
def test_concurrent_requests_come_all_at_once(name: str, number: int):
    assert asked(name) == [[(128, 64)] * number]


def test_mixed_lengths_are_in_their_ranges_and_the_same_in_every_repetition():
    first, second = asked("mixed", repetitions=2)
    assert first == second
    assert len(first) == 32
    assert all(16 <= i <= 512 and 8 <= o <= 128 for i, o in first)


def test_mixed_lengths_are_those_of_the_other_engines_measurements():
    random = Random(7)
    assert asked("mixed") == [
        [(random.randint(16, 512), random.randint(8, 128)) for _ in range(32)]
    ]
    assert asked("mixed")[0][:3] == [(181, 27), (218, 91), (40, 17)]


def test_prefix_requests_share_768_tokens_and_come_one_by_one():
    watch = Stopwatch()
    WORKLOADS["prefix"](watch.run, Prompts(WORDS, "prefix"), watch)
    prompts = [request.token_ids for (request,) in watch.calls]
    assert len(prompts) == 16
    assert len({tuple(prompt[:768]) for prompt in prompts}) == 1
    assert len({tuple(prompt[768:]) for prompt in prompts}) == 16
    assert {len(prompt) for prompt in prompts} == {784}


def test_another_repetition_begins_with_another_prefix():
    watch, prompts = Stopwatch(), Prompts(WORDS, "prefix")
    for _ in range(2):
        WORKLOADS["prefix"](watch.run, prompts, watch)
    assert watch.calls[0][0].token_ids[:768] != watch.calls[16][0].token_ids[:768]


def figures(workload) -> dict[str, float]:
    watch = Stopwatch()
    return workload(watch.run, Prompts(WORDS, "any"), watch)


def test_decode_counts_the_tokens_after_the_first():
    # 32 ms for the prompt, 10 ms for each of 127 tokens
    assert figures(Decode()) == pytest.approx(
        {"decode_tokens_per_s": 100.0, "with_prompt_tokens_per_s": 128 / 1.302}
    )


def test_decode_of_contradicting_times_is_no_figure():
    watch = Stopwatch()

    def slow_first(requests: Sequence[Request]) -> None:
        watch.now += 1.0 if requests[0].num_output == 1 else 0.5

    with pytest.raises(Disturbed, match=r"128 tokens took 0\.500 s and one token 1\.000 s"):
        Decode()(slow_first, Prompts(WORDS, "decode"), watch)


def test_prefill_counts_prompt_tokens():
    assert figures(Prefill()) == pytest.approx({"prefill_tokens_per_s": 1000.0, "ttft_s": 1.024})


def test_concurrent_counts_the_output_of_all():
    # 2 x (10 ms + 4 x 10 ms)
    assert figures(Concurrent(2, 10, 5)) == pytest.approx({"output_tokens_per_s": 10 / 0.1})


def test_mixed_counts_output_and_all_tokens():
    # 4 x (10 ms + 10 ms)
    assert figures(Mixed(4, (10, 10), (2, 2))) == pytest.approx(
        {"output_tokens_per_s": 8 / 0.08, "all_tokens_per_s": 48 / 0.08}
    )


def test_prefix_sets_the_first_against_the_median_of_the_later():
    watch, seconds = Stopwatch(), iter([1.0, 0.5, 0.1, 0.2])

    def run(requests: Sequence[Request]) -> None:
        watch.now += next(seconds)

    got = Prefix(8, 2, num_requests=4)(run, Prompts(WORDS, "prefix"), watch)
    assert got == pytest.approx({"miss_ttft_s": 1.0, "hit_ttft_s": 0.2, "miss_over_hit": 5.0})


def test_titles_say_the_sizes():
    assert {name: workload.title for name, workload in WORKLOADS.items()} == {
        "decode": "1 stream, 32 in, 128 out",
        "prefill": "1 prompt, 1024 in, 1 out",
        "conc8": "8 at once, 128 in, 64 out",
        "conc32": "32 at once, 128 in, 64 out",
        "mixed": "32 at once, 16..512 in, 8..128 out",
        "prefix": "16 in turn, 768 shared + 16 in, 1 out",
    }


def test_the_engine_is_warmed_up_alone_and_with_company():
    watch = Stopwatch()
    warm_up(watch.run, Prompts(WORDS, "warm up"))
    assert [[(len(r.token_ids), r.num_output) for r in call] for call in watch.calls] == [
        [(32, 8)],
        [(64, 4), (64, 4)],
    ]
