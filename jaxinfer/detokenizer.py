"""Output tokens -> text, as they come: no half characters, no part of a stop string.

Host only: no JAX here. The text released is, for any split of the tokens into pushes, that of
decoding prompt and output together minus the prompt's, cut at the first stop string. Held back is
only the start of a character and the longest end of the text that begins a stop string.

    #  prompt | tokens .................................................
    #  text   | released            | held: may begin a stop | cut-off bytes
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxinfer.control_tokens import common_length
from jaxinfer.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class StopMatch(NamedTuple):
    start: int  # characters [start, end) of the text are the stop string
    end: int
    stop: str


def find_stop(text: str, start: int, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first, of those whose last character is at `start` or later.

    Of several that end at one place the longest. So the answer is the same whether the text comes
    by character, by token or at once.
    """
    matches = (
        StopMatch(place, place + len(stop), stop)
        for stop in stops
        if (place := text.find(stop, max(0, start - len(stop) + 1))) >= 0
    )
    return min(matches, key=lambda match: (match.end, match.start), default=None)


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: of the model.
        prompt_ids: only decides how the output's first character reads (a leading blank, the rest
            of a character that the prompt began); the U+FFFD of a character that the prompt began
            and nobody finished counts as the prompt's.
        skip_special_tokens: special tokens have no text,
        kept_special_ids: except these.
        stop: non-empty strings; the text ends before the first that is complete.
        include_stop_str_in_output: it ends behind it instead.
        min_tokens: a stop string that is complete before this many output tokens is mere text.
    """

    stopped_by: str | None  # the stop string that ended the text
    num_tokens: int  # output tokens taken, up to the one that completed the stop string

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        stop: Sequence[str],
        include_stop_str_in_output: bool,
        min_tokens: int = 0,
        kept_special_ids: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._skipped = skipped.difference(kept_special_ids)
        self._stops = tuple(stop)
        self._stop_starts = frozenset(text[0] for text in stop)
        self._max_stop = max(map(len, stop), default=0)
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self.stopped_by = None
        self.num_tokens = 0
        self._whole_texts = tokenizer.whole_texts
        self._is_between = False  # nothing is held: a token that is whole needs no look at others
        self._held = ""
        self._is_finished = False
        self._is_first = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = all(self._spelled(i) is None for i in prompt_ids)
        self._utf8.decode(self._prompt_end(prompt_ids))
        self._prompt_cut = self._utf8.getstate()[0].decode("utf-8", "replace")

    def push(self, token_id: int) -> str:
        """The text that this output token makes final; "" once a stop string was met."""
        if self._is_between:
            text = self._whole_texts[token_id]
            if text is not None and self._stop_starts.isdisjoint(text):
                self.num_tokens += 1
                return text
        return self._push(token_id)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Like `push`, with all that was held; a character cut off by the end reads as U+FFFD."""
        delta = "".join(map(self.push, token_ids))
        if not self._is_finished:
            self._is_finished, self._is_between = True, False
            delta += self._take(self._decode(b"", is_final=True))
            if self.stopped_by is None:
                delta, self._held = delta + self._held, ""
        return delta

    def _push(self, token_id: int) -> str:
        if self._is_finished:
            return ""
        self.num_tokens += 1
        spelled = self._spelled(token_id)
        if spelled is None:
            return ""
        self._is_first = False
        text = self._take(self._decode(spelled))
        has_part, _ = self._utf8.getstate()
        self._is_between = not (has_part or self._held or self._prompt_cut or self._is_finished)
        return text

    def _decode(self, spelled: bytes, *, is_final: bool = False) -> str:
        new = self._utf8.decode(spelled, is_final)
        if new and self._prompt_cut:
            known = common_length(new, self._prompt_cut)
            self._prompt_cut = ""
            return new[known:]
        return new

    def _take(self, new: str) -> str:
        """Adds whole characters; returns what no stop string can take back."""
        if not self._stops or not new:
            return new
        text = self._held + new
        if self.num_tokens >= self._min_tokens:
            match = find_stop(text, len(self._held), self._stops)
            if match is not None:
                self.stopped_by, self._is_finished, self._held = match.stop, True, ""
                return text[: match.end if self._includes_stop else match.start]
        place = self._hold_from(text)
        self._held = text[place:]
        return text[:place]

    def _hold_from(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        for place in range(max(0, len(text) - self._max_stop + 1), len(text)):
            if text[place] in self._stop_starts:
                end = text[place:]
                if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stops):
                    return place
        return len(text)

    def _spelled(self, token_id: int) -> bytes | None:
        if token_id in self._skipped:
            return None
        return self._tokenizer.spelled(token_id, is_first=self._is_first)

    def _prompt_end(self, prompt_ids: Sequence[int]) -> bytes:
        """Bytes enough to know which character the prompt leaves unfinished."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = (self._spelled(token_id) or b"") + end
            if len(end) >= _LONGEST_CHARACTER:
                break
        return end
