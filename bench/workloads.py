"""What is asked of the engine in each measure, and what its time says.

Knows the engine only as `run`: requests that are all there at once; it returns when all have
finished. Prompts are random ordinary words, so that no prompt begins like another by accident and
the prefix cache never hits unless a workload means it to. Requests are greedy and generate exactly
the asked number of tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

MAX_WORD_ID = 20_000  # the commoner half of a vocabulary; ids follow frequency in a BPE
MIN_LETTERS = 3
MIXED_SEED = 7  # of the lengths: the same in every repetition


class Request(NamedTuple):
    token_ids: list[int]
    num_output: int  # tokens


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


Run = Callable[[Sequence[Request]], None]
Clock = Callable[[], float]
Figures = dict[str, float]  # per metric; the name's ending is the unit


class Disturbed(Exception):
    """The times contradict each other: something else had the machine."""


def word_ids(tokenizer: Vocabulary) -> list[int]:
    """Ids of tokens that are a lower-case word with its blank; of all ordinary ones if none is."""
    ordinary = [
        i
        for i in range(min(tokenizer.vocab_size, MAX_WORD_ID))
        if i not in tokenizer.special_token_ids and tokenizer.token_bytes(i)
    ]
    return [i for i in ordinary if _is_word(tokenizer.token_bytes(i))] or ordinary


def _is_word(spelled: bytes) -> bool:
    word = spelled[1:]  # bytes.isalpha and islower know ASCII only
    return spelled[:1] == b" " and len(word) >= MIN_LETTERS and word.isalpha() and word.islower()


class Prompts:
    """A reproducible stream of random words."""

    def __init__(self, words: Sequence[int], seed: str):
        self._words = words
        self._random = Random(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._words, k=num_tokens)


class Workload(Protocol):
    """A measure; a call is one repetition."""

    @property
    def title(self) -> str: ...
    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        """Raises: Disturbed."""
        ...


def timed(run: Run, requests: Sequence[Request], clock: Clock) -> float:
    """Seconds that `requests` take."""
    start = clock()
    run(requests)
    return clock() - start


@dataclass(frozen=True, slots=True)
class Decode:
    """One stream. The time of one token more or less is the prompt's, so it is taken away."""

    num_input: int = 32
    num_output: int = 128

    @property
    def title(self) -> str:
        return f"1 stream, {self.num_input} in, {self.num_output} out"

    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        one = timed(run, [Request(prompts(self.num_input), 1)], clock)
        all_s = timed(run, [Request(prompts(self.num_input), self.num_output)], clock)
        if all_s <= one:
            raise Disturbed(
                f"{self.num_output} tokens took {all_s:.3f} s and one token {one:.3f} s; "
                "measure again on a quieter machine"
            )
        return {
            "decode_tokens_per_s": (self.num_output - 1) / (all_s - one),
            "with_prompt_tokens_per_s": self.num_output / all_s,
        }


@dataclass(frozen=True, slots=True)
class Prefill:
    """One long prompt and one token."""

    num_input: int = 1024

    @property
    def title(self) -> str:
        return f"1 prompt, {self.num_input} in, 1 out"

    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        seconds = timed(run, [Request(prompts(self.num_input), 1)], clock)
        return {"prefill_tokens_per_s": self.num_input / seconds, "ttft_s": seconds}


@dataclass(frozen=True, slots=True)
class Concurrent:
    """Equal requests, all at once."""

    num_requests: int
    num_input: int = 128
    num_output: int = 64

    @property
    def title(self) -> str:
        return f"{self.num_requests} at once, {self.num_input} in, {self.num_output} out"

    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        requests = [
            Request(prompts(self.num_input), self.num_output) for _ in range(self.num_requests)
        ]
        return {"output_tokens_per_s": _num_output(requests) / timed(run, requests, clock)}


@dataclass(frozen=True, slots=True)
class Mixed:
    """Requests of many lengths, all at once."""

    num_requests: int = 32
    num_input: tuple[int, int] = (16, 512)  # least and most, both possible
    num_output: tuple[int, int] = (8, 128)

    @property
    def title(self) -> str:
        return (
            f"{self.num_requests} at once, {_range(self.num_input)} in, "
            f"{_range(self.num_output)} out"
        )

    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        random = Random(MIXED_SEED)
        requests = [
            Request(prompts(random.randint(*self.num_input)), random.randint(*self.num_output))
            for _ in range(self.num_requests)
        ]
        seconds = timed(run, requests, clock)
        num_output = _num_output(requests)
        num_input = sum(len(request.token_ids) for request in requests)
        return {
            "output_tokens_per_s": num_output / seconds,
            "all_tokens_per_s": (num_input + num_output) / seconds,
        }


@dataclass(frozen=True, slots=True)
class Prefix:
    """Requests with one beginning, one after another: the first misses the prefix cache."""

    num_shared: int = 768
    num_own: int = 16
    num_requests: int = 16

    @property
    def title(self) -> str:
        return f"{self.num_requests} in turn, {self.num_shared} shared + {self.num_own} in, 1 out"

    def __call__(self, run: Run, prompts: Prompts, clock: Clock) -> Figures:
        head = prompts(self.num_shared)
        first, *later = (
            timed(run, [Request(head + prompts(self.num_own), 1)], clock)
            for _ in range(self.num_requests)
        )
        hit = statistics.median(later)
        return {"miss_ttft_s": first, "hit_ttft_s": hit, "miss_over_hit": first / hit}


def _range(limits: tuple[int, int]) -> str:
    return f"{limits[0]}..{limits[1]}"


def _num_output(requests: Sequence[Request]) -> int:
    return sum(request.num_output for request in requests)


WORKLOADS: dict[str, Workload] = {
    "decode": Decode(),
    "prefill": Prefill(),
    "conc8": Concurrent(8),
    "conc32": Concurrent(32),
    "mixed": Mixed(),
    "prefix": Prefix(),
}
WARM_UP = ((1, 32, 8), (2, 64, 4))  # requests, tokens in, tokens out


def warm_up(run: Run, prompts: Prompts) -> None:
    for num_requests, num_input, num_output in WARM_UP:
        run([Request(prompts(num_input), num_output) for _ in range(num_requests)])
