"""Grammars by llguidance: a Guided becomes a Constraint over one tokenizer's vocabulary.

Host only: no JAX. Compiling takes milliseconds to a second, so it is done off the event loop and
off the engine thread; a mask takes 10 to 300 us of the engine thread. Work is bounded by the length
of a grammar (jaxinfer/guided.py), the library's fuel, and CPU time, read after the fact; a server
also tries a grammar elsewhere first (jaxinfer/grammar_trial.py).

Every byte of an answer is checked, by the bytes that the detokenizer shows. Control tokens are
never admitted, but where a Lark grammar names one; an end token is admitted where the text is
complete.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import llguidance
import llguidance.numpy
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxinfer.constraint import Constraint, Mask
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.guided import Guided, Kind

COMPILE_S = 5.0  # CPU seconds of a thread that a grammar may take to compile
MASK_S = 0.25  # and to say what may come next
MAX_MESSAGE = 400  # characters of the library's words in an error
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between two parts of a JSON text. Without a bound, a model may write blanks for ever."""
MAX_GBNF_CHARS = 2**14  # translated in Python, in a time that grows with the square
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms a mask
    step_max_items=20_000,
    max_lexer_states=16_384,  # 1 to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)


class VocabularySource(Protocol):
    """What is read of a Tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Guidance:
    """Compiles grammars for one model. Safe to call from several threads.

    Args:
        tokenizer: its vocabulary is indexed at the first use (0.3 s for 49,152 tokens).
        vocab_size: of the model; ids past the tokenizer's are never admitted.
        trial: called with a grammar and the field's name before anything is compiled; raises
            InvalidRequest.
        clock: CPU seconds of the calling thread, so that a busy machine makes no grammar slow.
    """

    def __init__(
        self,
        tokenizer: VocabularySource,
        vocab_size: int,
        *,
        trial: Callable[[Guided, str], None] | None = None,
        clock: Callable[[], float] = time.thread_time,
    ):
        self._tokenizer, self._vocab_size, self._clock = tokenizer, vocab_size, clock
        self._trial = trial
        self._lock = threading.Lock()
        self._indexed: llguidance.LLTokenizer | None = None

    def compile(self, guided: Guided, *, param: str = "guided") -> Constraint:
        """The constraint of an answer's beginning, prepared; each choice takes a copy.

        Args:
            param: the request field that an error names.
        Raises: InvalidRequest with the library's words for a grammar that is malformed, too large,
            not supported, or admits no answer.
        """
        if not self._tokenizer.eos_token_ids:
            raise InvalidRequest(
                f"{param} needs a model with an end token; this one has none", param=param
            )
        if self._trial is not None:
            self._trial(guided, param)
        vocabulary = self._vocabulary()
        with _bounded(self._clock, COMPILE_S, param):
            grammar = _grammar(guided, param)
            matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refused(guided.kind, matcher.get_error(), param)
        constraint = GrammarConstraint(
            matcher,
            _Words(self._tokenizer.vocab_size, self._vocab_size, self._tokenizer.eos_token_ids),
            param=param,
            clock=self._clock,
        )
        constraint.prepare()
        return constraint

    def warm(self) -> None:
        """Indexes the vocabulary, if that was not done."""
        self._vocabulary()

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._indexed is None:
                self._indexed = _Vocabulary(self._tokenizer).indexed
            return self._indexed


class GrammarConstraint:
    """A `Constraint` by llguidance's matcher.

    The matcher never raises: where it fails, it admits the end tokens. So its error is looked at
    after each call.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        words: _Words,
        *,
        param: str,
        clock: Callable[[], float],
    ):
        self._matcher, self._words = matcher, words
        self._param, self._clock = param, clock
        self._mask: Mask = words.none()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> GrammarConstraint:
        copied = GrammarConstraint(
            self._matcher.deep_copy(), self._words, param=self._param, clock=self._clock
        )
        copied._mask = self._mask
        return copied

    def take(self, token_id: int) -> None:
        if not self._words.has(self._mask, token_id):
            raise EngineFailure(
                f"token {token_id} was drawn, which the grammar does not admit here"
            )
        if not self._matcher.consume_token(token_id):
            raise self._stuck(self._matcher.get_error())

    def prepare(self) -> None:
        with _bounded(self._clock, MASK_S, self._param):
            mask = self._words.filled(self._matcher)
        if self._matcher.is_error():
            raise self._stuck(self._matcher.get_error())
        if not self._matcher.is_accepting():  # a Lark grammar may name an end token
            mask = self._words.without_end(mask)
        if not mask.any():
            raise self._stuck("no token may come next")
        self._mask = mask

    def mask(self, *, may_end: bool) -> Mask:
        if may_end:
            return self._mask
        endless = self._words.without_end(self._mask)
        return endless if endless.any() else self._mask

    def _stuck(self, words: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._param}: the answer cannot go on by this grammar: {_first_words(words)}",
            param=self._param,
        )


class _Words:
    """Masks over a model's vocabulary, of which the tokenizer has the first ids."""

    def __init__(self, num_own: int, vocab_size: int, end_ids: frozenset[int]):
        self._num_own, self._num_all = -(-num_own // 32), -(-vocab_size // 32)
        self._vocab_size = vocab_size
        ends = self.none()
        for end in end_ids:
            if end < vocab_size:
                ends.view(np.uint32)[end // 32] |= np.uint32(1 << end % 32)
        self._rest = ~ends

    def none(self) -> Mask:
        return np.zeros(self._num_all, np.int32)

    def filled(self, matcher: llguidance.LLMatcher) -> Mask:
        """What the matcher admits, in a new array."""
        own = np.zeros((1, self._num_own), np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, own)
        mask, number = self.none(), min(self._num_own, self._num_all)
        mask[:number] = own[0, :number]
        return mask

    def without_end(self, mask: Mask) -> Mask:
        return mask & self._rest

    def has(self, mask: Mask, token_id: int) -> bool:
        return token_id < self._vocab_size and bool(mask[token_id // 32] >> token_id % 32 & 1)


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each id, and a function of bytes.

    The function gives the tokens of a text that the grammar forces, so that the model sees the
    spelling that it knows. It may not raise.
    """

    def __init__(self, tokenizer: VocabularySource):
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.spelled(i) or b"" for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None
        self._indexed: llguidance.LLTokenizer | None = None
        self.indexed = self._indexed = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=sorted(tokenizer.eos_token_ids)
        )

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        is_plain = self._tokenizer.special_token_ids.isdisjoint(ids)
        if is_plain and b"".join(self.tokens[i] for i in ids) == text:
            return ids
        # A text that spells a control token, or a tokenizer that puts a blank before it.
        return [] if self._indexed is None else self._indexed.greedy_tokenize(text.decode())


def _grammar(guided: Guided, param: str) -> str:
    """In llguidance's own form. Raises: InvalidRequest."""
    try:
        return _FORMS[guided.kind](guided.text)
    except ValueError as error:
        raise _refused(guided.kind, str(error), param) from None


def _from_schema(text: str) -> str:
    options: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)


def _from_lark_or_gbnf(text: str) -> str:
    if _IS_LARK.search(text):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"GBNF may have at most {MAX_GBNF_CHARS} characters; got {len(text)}")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # of its parser: of no class in particular
        raise ValueError(f"neither Lark with a rule `start` nor GBNF: {error}") from None


def _from_choice(text: str) -> str:
    """One terminal: as many rules as there are texts would be far more work."""
    return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, json.loads(text)))


_IS_LARK = re.compile(r"^[ \t]*(start[ \t]*:(?!:=)|%llguidance\b)", re.MULTILINE)
_FORMS: Mapping[Kind, Callable[[str], str]] = {
    "json_schema": _from_schema,
    "json_object": lambda text: _from_schema('{"type":"object"}'),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": _from_choice,
    "grammar": lambda text: _from_lark_or_gbnf(text),
}


@contextmanager
def _bounded(clock: Callable[[], float], limit_s: float, param: str) -> Generator[None]:
    """Work on a grammar. Raises: InvalidRequest if it took more than `limit_s`."""
    started = clock()
    yield
    took = clock() - started
    if took > limit_s:
        raise InvalidRequest(
            f"{param}: this grammar took {took:.2f} s of work at once; at most {limit_s:g} s are "
            "allowed, so use a simpler one",
            param=param,
        )


def _refused(kind: Kind, words: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: not a usable {kind}: {_first_words(words)}", param=param)


def _first_words(words: str) -> str:
    shown = words.replace("<non-verbose/>", "").strip()
    return shown if len(shown) <= MAX_MESSAGE else shown[:MAX_MESSAGE] + "..."
