"""Random streams over real vocabularies: what is shown is what decoding at once gives, and no text
waits longer than it must.

The rules are written here once more, over whole texts; only the places where sentences end come
from SentenceEnds, which tests/test_sentence_end.py compares with rules of its own.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.choice import Choice
from jaxinfer.config import SamplingParams
from jaxinfer.detokenizer import Detokenizer
from jaxinfer.outputs import RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.sentence_end import SentenceEnds
from jaxinfer.tokenizer import Tokenizer
from tests.conftest import DEFAULT_MODEL, MODELS
from tests.tiny_tokenizers import byte_fallback, metaspace, wrapped

TEXTS = (
    "He left. She said: “No!” Then e.g. Dr. Who came at 3.5 m. The end? Yes… maybe. ",
    "日本語の文章です。「本当？」はい。中文！ वह गया। 👩‍👩‍👧 family 🌶 é ď. ",
    "Steps:\n\n1. One.\n2. Two\n- a\n\n```py\nx = 1.\n# a. B\n```\nDone. So ",
    "abcabc abcab cab bcabca ab. Ab\n\n",
)
WORDS = ("the", "cat", "sat", "on", "mat", "St", "op", "日", "本", "é", "🌶", ".", "。", "\n", "```")
MORE = (
    *("", " ", "a", "A", " A", ".", "\n", "\n\n", "\nA", "\n```\n", "```\n", "``\n", "`\n"),
    *("\n~~~\n", "~~~\n", "~~\n", "~\n"),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and ids that are parts of characters."""

    tokenizer: Tokenizer
    cut: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        ids = range(tokenizer.vocab_size)
        cut = [i for i in ids if "\ufffd" in tokenizer.token_text(i)]
        return cls(tokenizer, tuple(cut))

    def ids(self, choose: random.Random) -> list[int]:
        """Text, arbitrary tokens, and bytes that seldom are UTF-8."""
        ids: list[int] = []
        for _ in range(choose.randint(1, 5)):
            kind = choose.random()
            if kind < 0.6:
                text = choose.choice(TEXTS)
                start = choose.randrange(len(text))
                ids += self.tokenizer.encode(text[start : start + choose.randint(1, 25)])
            elif kind < 0.8 or not self.cut:
                top = self.tokenizer.vocab_size + 2
                ids += [choose.randrange(top) for _ in range(choose.randint(1, 5))]
            else:
                ids += choose.choices(self.cut, k=choose.randint(1, 5))
        return ids


def sentencepiece() -> Tokenizer:
    """Byte fallback and thousands of pieces."""
    backend = byte_fallback()
    pieces = [f"{a}{b}{c}" for a in ("", "▁", "▁▁") for b in WORDS for c in WORDS + TEXTS[1:2]]
    pieces += [chr(code) for code in range(0x4E00, 0x4E00 + 3000)]
    known = backend.get_vocab()
    backend.add_tokens([piece for piece in dict.fromkeys(pieces) if piece not in known])
    return wrapped(backend)


@pytest.fixture(scope="module", params=["smollm2", "byte_fallback", "metaspace"])
def vocabulary(request: pytest.FixtureRequest, users_home: Path) -> Vocabulary:
    if request.param == "byte_fallback":
        return Vocabulary.of(sentencepiece())
    if request.param == "metaspace":
        return Vocabulary.of(wrapped(metaspace()))
    path = next((users_home / MODELS / DEFAULT_MODEL).glob("*.gguf"), None)
    if path is None:
        pytest.skip(f"{DEFAULT_MODEL} is not there; a first `make serve` fetches it")
    checkpoint = open_checkpoint(path)
    backend, eos = checkpoint.tokenizer, checkpoint.eos_token_ids
    return Vocabulary.of(wrapped(backend, eos_token_ids=eos))


# ---- the rules, over whole texts


@dataclass(frozen=True, slots=True)
class Case:
    """One stream: what the model says and what was asked for."""

    tokenizer: Tokenizer
    prompt: list[int]
    ids: list[int]
    sampling: SamplingParams

    def certain(self, num_ids: int, *, is_final: bool) -> str:
        """The output's text after so many tokens; unless final, without a started character."""
        skipped = self.tokenizer.special_token_ids if self.sampling.skip_special_tokens else ()
        parts: list[bytes] = []
        start = 0
        for place, token_id in enumerate([*self.prompt, *self.ids[:num_ids]]):
            spelled = None
            if token_id not in skipped:
                spelled = self.tokenizer.spelled(token_id, is_first=not parts)
            if spelled is not None:
                parts.append(spelled)
            if place + 1 == len(self.prompt):
                start = len(b"".join(parts).decode())
        return codecs.utf_8_decode(b"".join(parts), "replace", is_final)[0][start:]

    def safe(self, text: str) -> str:
        """`text` without the longest end that may become a stop string."""
        starts = {stop[:n] for stop in self.sampling.stop for n in range(1, len(stop))}
        held = max((len(start) for start in starts if text.endswith(start)), default=0)
        return text[: len(text) - held]

    def end(self) -> tuple[int, bool]:
        """Tokens up to the last one, and whether that is an end token."""
        sampling = self.sampling
        ends = set(sampling.stop_token_ids)
        ends |= set() if sampling.ignore_eos else self.tokenizer.eos_token_ids
        limit = sampling.binding_cap or sampling.max_tokens or 0
        for number, token_id in enumerate(self.ids[:limit], 1):
            if token_id in ends and number > sampling.min_tokens:
                return number, True
        return limit, False

    def stopped(self, text: str, num_ids: int) -> str | None:
        """`text` up to the stop string that is complete first; None: there is none."""
        sampling = self.sampling
        for end in range(1, len(text) + 1):
            met = [stop for stop in sampling.stop if text.endswith(stop, 0, end)]
            if met and self.token_that_brought(text[:end], num_ids) >= sampling.min_tokens:
                shows = sampling.include_stop_str_in_output
                return text[: end if shows else end - max(map(len, met))]
        return None

    def token_that_brought(self, text: str, num_ids: int) -> int:
        if not self.sampling.min_tokens:
            return num_ids
        counts = range(num_ids + 1)
        return next(
            (n for n in counts if self.certain(n, is_final=False).startswith(text)), num_ids
        )

    def start(self) -> int | None:
        """Characters that are shown when the window opens; None: nothing is cut at a sentence."""
        cap = self.sampling.binding_cap
        if cap in (None, 1) or self.sampling.truncate == "token":  # half of 1 is no window
            return None
        opens_at = cap - min(64, cap // 2)
        return len(self.safe(self.certain(opens_at, is_final=False)))

    def whole(self) -> tuple[str, FinishReason]:
        """All that is to be shown."""
        count, is_token = self.end()
        shows_token = is_token and self.sampling.include_stop_str_in_output
        num_shown = count - (is_token and not shows_token)
        text = self.certain(num_shown, is_final=True)
        stopped = self.stopped(text, num_shown)
        if stopped is not None or is_token:
            return text if stopped is None else stopped, FinishReason.STOP
        start = self.start()
        return text if start is None else cut(text, start), FinishReason.LENGTH


def cut(text: str, start: int) -> str:
    """What is left of `text` at the cap; `start` characters came before the window."""
    ends = SentenceEnds()
    ends.feed(text)
    ends.finish()
    for end in (ends.sentence, ends.line):
        if end >= start:
            return text[:end]
    return text


# ---- random cases


def random_case(vocabulary: Vocabulary, choose: random.Random) -> Case:
    tokenizer = vocabulary.tokenizer
    prompt = tokenizer.encode(choose.choice(("", "the cat", "日")))
    ids = vocabulary.ids(choose)
    text = Case(tokenizer, prompt, ids, SamplingParams()).certain(len(ids), is_final=True) or "a"
    stops = random_stops(text, choose)
    is_capped = choose.random() < 0.5
    min_tokens = 0
    if choose.random() < 0.3 and "\ufffd" not in "".join(stops):
        min_tokens = choose.randint(1, len(ids))
    sampling = SamplingParams(
        max_tokens=None if is_capped else choose.randint(max(1, min_tokens), len(ids)),
        output_cap=choose.randint(1, len(ids)) if is_capped else None,
        truncate=choose.choice(("sentence", "sentence", "token")),
        min_tokens=min_tokens,
        stop=stops,
        stop_token_ids=tuple(choose.sample(ids, 1)) if choose.random() < 0.1 else (),
        ignore_eos=choose.random() < 0.3,
        include_stop_str_in_output=choose.random() < 0.3,
        skip_special_tokens=choose.random() < 0.7,
    )
    return Case(tokenizer, prompt, ids, sampling)


def random_stops(text: str, choose: random.Random) -> tuple[str, ...]:
    """Parts of the text, some with another end, so that they begin and do not come."""
    stops: list[str] = []
    while choose.random() < 0.5 and len(stops) < 4:
        place = choose.randrange(len(text))
        part = text[place : place + choose.randint(1, 6)]
        stops.append(part + choose.choice(("", "", "#", part)))
    return tuple(stops)


# ---- the stream


def read_now(stream: RequestStream) -> Ids[RequestOutput]:
    """What waits in the stream; there is something."""
    try:
        stream.read().send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("nothing to read")


def check_stream(case: Case, choose: random.Random) -> None:
    request = Request("r", tuple(case.prompt) or (0,), case.sampling)
    sequence = Sequence(request, index=0, seed=0, version="v")
    sampling = case.sampling
    sequence.max_total_tokens = LengthLimit(10**6, 10**6).total_tokens(
        sequence.num_prompt_tokens, sampling.max_tokens, sampling.binding_cap
    )
    detokenizer = Detokenizer(
        case.tokenizer,
        prompt_ids=case.prompt,
        skip_special_tokens=sampling.skip_special_tokens,
        stop=sampling.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
    choice = Choice(sequence, eos_token_ids=case.tokenizer.eos_token_ids, detokenizer=detokenizer)
    stream = RequestStream((request,), on_close=lambda _: None, on_loss=lambda _: None)
    whole, reason = case.whole()
    start = case.start()
    shown, read, last = "", "", None
    for number, token_id in enumerate(case.ids, 1):
        sequence.token_ids.append(token_id)
        last = choice.take(token_id, (), 0.0)
        stream.push(last, 0.0)
        shown += last.text
        assert whole.startswith(shown), "what is shown is not taken back"
        if last.finish_reason is not None:
            break
        check_held(case, number, shown, start)
        if choose.random() < 0.4:  # a reader at a pace of its own
            read += "".join(output.text for output in read_now(stream))
    assert last is not None
    final = read_now(stream)[-1]
    assert read + final.text == shown == whole
    assert last.finish_reason is final.finish_reason is reason
    has_cap = reason is FinishReason.LENGTH and sampling.binding_cap is not None
    assert (last.truncation is not None) is has_cap
    assert final.truncation == last.truncation


def check_held(case: Case, number: int, shown: str, start: int | None) -> None:
    """What is held may still become a stop string, a character, or a tail that is dropped."""
    safe = case.safe(case.certain(number, is_final=False))
    cap = case.sampling.binding_cap
    if start is None or cap is None or number <= cap - min(64, cap // 2):
        assert shown == safe
    elif shown != safe:
        assert safe.startswith(shown)
        assert any(cut(safe + more, start) == shown for more in MORE), (safe, shown)


def check_streams(vocabulary: Vocabulary, number: int, seed: int) -> None:
    for at in range(number):
        choose = random.Random(f"{seed} {at}")
        case = random_case(vocabulary, choose)
        try:
            check_stream(case, choose)
        except AssertionError as error:
            raise AssertionError(f"stream {at} of seed {seed}: {case}") from error


def test_random_streams_show_what_decoding_at_once_gives(vocabulary: Vocabulary):
    check_streams(vocabulary, 700, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_streams(vocabulary: Vocabulary):
    """34,000 for each vocabulary."""
    check_streams(vocabulary, 34_000, seed=2)


def test_whole_texts_are_those_of_the_tokenizers_library(vocabulary: Vocabulary):
    choose = random.Random(3)
    tokenizer = vocabulary.tokenizer
    for _ in range(200):
        ids = tokenizer.encode(choose.choice(TEXTS)[choose.randrange(20) :])
        case = Case(tokenizer, [], ids, SamplingParams())
        assert case.certain(len(ids), is_final=True) == tokenizer._backend.decode(ids)
