"""How the requests of a canary end, beside those of the stable version.

Each is compared with one of the stable version that ended about then. Who got which version was
drawn by a hash, so that under the null either of a pair could have been the canary's; for that,

- requests that began before the stage are left out, of both versions: at first only short ones of
  the canary's have ended, but long ones of the other's, too;
- answers count from twice the longest one's time into the stage: with a small share of the steps
  the canary's take longer, so that its short ones end first once more;
- a key that chose the version counts once per stage where answers are judged, and where requests
  come to nothing: the hash drew users and conversations, not their requests, and one with a habit
  of its own is one observation;
- what a client ended is left out.
"""

from __future__ import annotations

import math

from jaxinfer.canary.facts import RequestFacts
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.incidents import Incidents
from jaxinfer.canary.pairing import Pairing
from jaxinfer.canary.signal import Signal, difference, rank
from jaxinfer.scheduling.request import FinishReason

MAX_FAILING = 0.4  # of its requests may fail or be too late, whatever the stable version does
MAX_LONGEST_S = 60.0  # of an answer whose time is waited for: one that hangs blinds nobody for long
MAX_KEYS = 4096  # of a version, kind and stage that are remembered; beyond, the first count again
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class RequestSignals:
    """Those that are on; failures always are.

    Of failures, a pair says something if just one of it failed: as often the canary's as the
    other's, under the null. Without a stable version's request there is no pair, so a second
    signal looks at the canary alone. That one counts missed deadlines, too: beside the other
    version's they would count against any canary, which has fewer of the steps.
    """

    def __init__(self, guard: Guard):
        self._failed = Signal("failed_requests", "share", 0.5)
        self._failing = Signal("failing", "share", MAX_FAILING)
        self._length: Signal | None = None
        self._repetition: Signal | None = None
        self._cut: Signal | None = None
        if guard.max_length_rank is not None:
            self._length = Signal(
                "output_length", "tokens", guard.max_length_rank, is_two_sided=True
            )
        if guard.max_repetition_rank is not None:
            self._repetition = Signal("repetition", "share", guard.max_repetition_rank)
        if guard.max_cut_increase is not None:
            self._cut = Signal("cut_answers", "share", 0.5 + guard.max_cut_increase / 2)
        quality = (self._length, self._repetition, self._cut)
        self.all = (
            self._failed,
            self._failing,
            *(signal for signal in quality if signal),
        )
        self._outcomes = Pairing[FinishReason]()
        self._answers = Pairing[RequestFacts]()
        self._incidents = Incidents()
        self._since_s = -math.inf
        self._longest_s = 0.0  # of the answers so far
        self._counted = _Counted()

    def begin_stage(self, now: float) -> None:
        """Other keys than before may get the canary."""
        self._since_s = now
        self._counted = _Counted()
        self._outcomes.forget()
        self._answers.forget()

    def note(self, facts: RequestFacts, now: float, *, is_canary: bool) -> None:
        if facts.finish is FinishReason.ABORT:
            return
        is_failure = facts.finish is FinishReason.ERROR and is_canary
        if is_failure and not self._incidents.begins(now):
            return
        if is_canary:
            has_come_to_nothing = facts.finish not in ANSWERED
            self._failing.see(has_come_to_nothing)
            self._failing.bet(has_come_to_nothing)
        has_settled = self._has_settled(facts, now)
        if facts.e2e_s is not None and now - facts.e2e_s < self._since_s:
            return
        if facts.finish not in ANSWERED:
            if self._counted.is_new(facts, is_canary=is_canary):
                self._note_outcome(facts.finish, is_canary=is_canary)
            return
        self._note_outcome(facts.finish, is_canary=is_canary)
        if has_settled and self._counted.is_new(facts, is_canary=is_canary):
            self._note_answer(facts, is_canary=is_canary)

    def _has_settled(self, facts: RequestFacts, now: float) -> bool:
        """Whether long answers of this stage have had the time to end, by those before this one."""
        has_settled = now - self._since_s >= 2.0 * self._longest_s
        if facts.finish in ANSWERED and facts.e2e_s is not None:
            self._longest_s = min(max(self._longest_s, facts.e2e_s), MAX_LONGEST_S)
        return has_settled

    def _note_outcome(self, finish: FinishReason, *, is_canary: bool) -> None:
        pair = self._outcomes.note(finish, is_canary=is_canary)
        if pair is None:
            return
        failed = [finish is FinishReason.ERROR for finish in pair]
        self._failed.see(*failed)
        if failed[0] != failed[1]:
            self._failed.bet(failed[0])

    def _note_answer(self, facts: RequestFacts, *, is_canary: bool) -> None:
        pair = self._answers.note(facts, is_canary=is_canary)
        if pair is None:
            return
        canary, stable = pair
        if self._length:
            self._length.see(canary.num_output_tokens, stable.num_output_tokens)
            self._length.bet(rank(canary.num_output_tokens, stable.num_output_tokens))
        if self._repetition:
            self._repetition.see(canary.repetition, stable.repetition)
            self._repetition.bet(rank(canary.repetition, stable.repetition))
        if self._cut:
            cut = [answer.finish is FinishReason.LENGTH for answer in pair]
            self._cut.see(*cut)
            self._cut.bet(difference(*cut))


class _Counted:
    """Whose answers, and whose requests that came to nothing, were counted: keys, oldest first."""

    def __init__(self) -> None:
        self._keys: dict[tuple[bool, FinishReason], dict[str, None]] = {}

    def is_new(self, facts: RequestFacts, *, is_canary: bool) -> bool:
        """Whether its key is not among those of its version and kind; it is then."""
        kind = FinishReason.STOP if facts.finish in ANSWERED else facts.finish
        if not facts.key:
            return True
        keys = self._keys.setdefault((is_canary, kind), {})
        if facts.key in keys:
            return False
        if len(keys) >= MAX_KEYS:
            del keys[next(iter(keys))]
        keys[facts.key] = None
        return True
