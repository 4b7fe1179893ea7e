"""Asks both versions, behind the users' backs: how a canary differs on the same prompts.

No HTTP and no JAX. Everything belongs to the event loop. Of the calls that were answered a share is
taken. For each, both versions are made to read the same part of the user's own prompt (teacher
forcing, jaxinfer/forced.py): that tells how likely either finds a human's text, and how far apart
their next tokens are. Where a record is kept, the version that did not answer is also given the
whole request, to show both outputs.

So that no user is slowed noticeably: none begins while anybody waits on either engine; it is of a
lower priority than any class, so whoever needs its seat or pages takes them; a prompt is looked at
up to MAX_PROMPT tokens, an output up to MAX_OUTPUT. And all this takes MAX_BUSY of the time at
most: then it rests, as long as users are there. (While it works, steps of two versions alternate:
users' tokens come up to twice as slowly.) Calls gather meanwhile, up to MAX_QUEUED, of which the
oldest is dropped. They are looked at together, since they share their steps: one of eight rows
takes no longer than one of a single row.

A run in which the canary's logits are no numbers, and the stable version's are, is told as a
request of the canary's. Otherwise failures here, refusals and requests that are too late tell
nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Literal

from jaxinfer.canary.divergence import shadow_facts
from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.canary.token_distance import edit_distance, first_difference
from jaxinfer.errors import JaxInferError, NotNumbers
from jaxinfer.forced import Forced, forced_sampling
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.server.answered import Answered
from jaxinfer.server.shadow_record import ShadowOutput, ShadowRecord, fields_of
from jaxinfer.server.shadow_run import ShadowRun, run_on

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.shadow_file import ShadowFile

log = logging.getLogger(__name__)

WINDOW, MIN_WINDOW = 32, 8  # tokens of a prompt that are compared
MAX_PROMPT = 1024  # tokens: a window lies within the first of them; longer ones are not recorded
MAX_OUTPUT = 256  # tokens that a record shows
MAX_QUEUED = 8
MAX_BUSY = 0.08
LOOK_AGAIN_S = 0.25

Outcome = Literal[
    "compared",
    "dropped",  # there was no quiet moment for it, before others came
    "too_short",  # the prompt
    "too_late",  # fewer than MIN_WINDOW tokens by its deadline
    "failed",  # the stable version
    "canary_failed",
    "refused",  # by an engine: it holds fewer tokens, or shuts down
]


class Shadow:
    """Compares a canary with the stable version until it is closed: one for each trial.

    Two versions with different vocabularies cannot be compared by tokens: then it does nothing.

    Args:
        share: of the answered calls, 0..1.
        random: which calls, and which part of their prompts.
        on_facts: told of each comparison.
        on_failure: told of each in which the canary's logits were no numbers.
        record: where both outputs are kept; None: nowhere.
        max_busy: share of the time that may be spent here while there are users, 0..1.
        wall_clock: seconds since the epoch, for the record.
        look_again_s: seconds between two looks whether the engines are quiet.
    """

    def __init__(
        self,
        stable: ServedModel,
        canary: ServedModel,
        *,
        share: float,
        random: Random,
        on_facts: Callable[[ShadowFacts], None],
        on_failure: Callable[[RequestFacts], None],
        record: ShadowFile | None = None,
        max_busy: float = MAX_BUSY,
        wall_clock: Callable[[], float] = time.time,
        look_again_s: float = LOOK_AGAIN_S,
    ):
        self._stable, self._canary = stable, canary
        self._share, self._random = share, random
        self._on_facts, self._on_failure = on_facts, on_failure
        self._record = record
        self._rest_per_s = 1 / max_busy - 1
        self._wall_clock, self._look_again_s = wall_clock, look_again_s
        self.outcomes: Counter[Outcome] = Counter()
        self._queue: deque[Answered] = deque()
        self._numbers = itertools.count()
        self._speaks_alike: bool | None = None  # None: not known yet
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def note(self, answered: Answered) -> None:
        """A call was answered. Returns at once."""
        versions = (self._stable.version, self._canary.version)
        if self._is_closed or self._speaks_alike is False:
            return
        if answered.model.version not in versions or self._random.random() >= self._share:
            return
        if len(self._queue) == MAX_QUEUED:
            self._queue.popleft()
            self.outcomes["dropped"] += 1
        self._queue.append(answered)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Ends what it does; nothing is told after the call, and no request of it is left when this
        returns.
        """
        self._is_closed = True
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _work(self) -> None:
        """Until nothing waits."""
        if self._speaks_alike is None:
            self._speaks_alike = await self._canary.off_loop(self._have_same_tokens)
        if not self._speaks_alike:
            log.warning("no shadow comparison: the versions have different vocabularies")
            self._queue.clear()
        while self._queue:
            await self._wait_until_quiet()
            clock = self._stable.engine.clock
            started_s = clock()
            batch = list(self._queue)
            self._queue.clear()
            await asyncio.gather(*map(self._look_at, batch))
            await self._rest(clock() + self._rest_per_s * (clock() - started_s))

    async def _look_at(self, answered: Answered) -> None:
        try:
            facts = await self._compare(answered.request)
            if self._record is not None and self._record.is_on:
                await self._show_both(answered, facts, self._record)
        except JaxInferError:
            self.outcomes["refused"] += 1
        except Exception:  # a fault of ours, of which no user knows
            log.exception("a shadow comparison failed")

    def _have_same_tokens(self) -> bool:
        """Runs on a thread of the tokenizer pool: a vocabulary is long."""
        return self._stable.tokenizer.hash == self._canary.tokenizer.hash

    async def _wait_until_quiet(self) -> None:
        while any(engine.pool_stats.num_waiting for engine in self._engines):
            await asyncio.sleep(self._look_again_s)

    async def _rest(self, until_s: float) -> None:
        """Up to a time of the engine's clock, or until there are no users."""
        while self._stable.engine.clock() < until_s and any(e.num_open for e in self._engines):
            await asyncio.sleep(self._look_again_s)

    @property
    def _engines(self) -> tuple[AsyncEngine, AsyncEngine]:
        """Which may be one."""
        return self._stable.engine, self._canary.engine

    # ---- the same text, read by both

    async def _compare(self, request: Request) -> ShadowFacts | None:
        """Returns: what was told; None: it came to nothing."""
        prompt = request.token_ids[:MAX_PROMPT]
        width = min(WINDOW, len(prompt) - 1)
        if width < MIN_WINDOW:
            self.outcomes["too_short"] += 1
            return None
        start = self._random.randint(1, len(prompt) - width)
        text = prompt[start : start + width]
        stable = await self._forced(self._stable, request, prompt[:start], text)
        if stable.finish is FinishReason.ERROR:
            self.outcomes["failed"] += 1
            return None
        await self._wait_until_quiet()
        canary = await self._forced(self._canary, request, prompt[:start], text)
        if canary.finish is FinishReason.ERROR:
            self._tell_failure(canary)
            return None
        facts = shadow_facts(stable.logprobs, canary.logprobs)
        if facts is None or facts.num_tokens < MIN_WINDOW:
            self.outcomes["too_late"] += 1
            return None
        self.outcomes["compared"] += 1
        self._on_facts(facts)
        return facts

    async def _forced(
        self, model: ServedModel, request: Request, prompt: tuple[int, ...], text: tuple[int, ...]
    ) -> ShadowRun:
        forced = Request(
            self._name(),
            prompt,
            forced_sampling(len(text)),
            cache_salt=request.cache_salt,
            constraint=Forced(text, model.engine.vocab_size),
        )
        return await run_on(model, forced)

    def _tell_failure(self, run: ShadowRun) -> None:
        """If its logits were no numbers. Of others it says nothing, as of runs that end well: they
        would count for more than the stable version's. Steps that fail are judged as such.
        """
        self.outcomes["canary_failed"] += 1
        if not isinstance(run.error, NotNumbers):
            return
        self._on_failure(
            RequestFacts(
                version=self._canary.version,
                finish=FinishReason.ERROR,
                num_output_tokens=len(run.token_ids),
                repetition=0.0,
                ttft_s=None,
                is_not_numbers=True,
            )
        )

    def _name(self) -> str:
        return f"shadow-{self._canary.version}-{next(self._numbers)}"

    # ---- the same request, answered by both

    async def _show_both(
        self, answered: Answered, facts: ShadowFacts | None, record: ShadowFile
    ) -> None:
        request = answered.request
        if len(request.token_ids) > MAX_PROMPT:
            return
        is_stables = answered.model.version == self._stable.version
        other = self._canary if is_stables else self._stable
        cap = min(request.sampling.output_cap or MAX_OUTPUT, MAX_OUTPUT)
        sampling = replace(request.sampling, n=1, logprobs=None, output_cap=cap)
        await self._wait_until_quiet()
        run = await run_on(other, replace(request, request_id=self._name(), sampling=sampling))
        if run.finish is FinishReason.ERROR and is_stables:
            self._tell_failure(run)
        time_s = self._wall_clock()
        record.write(
            await other.off_loop(lambda: self._recorded(answered, run, facts, is_stables, time_s))
        )

    def _recorded(
        self,
        answered: Answered,
        run: ShadowRun,
        facts: ShadowFacts | None,
        is_stables: bool,
        time_s: float,
    ) -> ShadowRecord:
        """Runs on a thread of the tokenizer pool."""
        request, tokenizer = answered.request, answered.model.tokenizer
        choice = answered.choices[0]
        said, text = choice.token_ids[:MAX_OUTPUT], choice.text
        if len(said) < len(choice.token_ids):
            text = tokenizer.decode(said)
        users = ShadowOutput(text, len(said), choice.finish)
        others = ShadowOutput(run.text, len(run.token_ids), run.finish)
        stable, canary = (users, others) if is_stables else (others, users)
        return ShadowRecord(
            time_s=time_s,
            stable=self._stable.version,
            canary=self._canary.version,
            answered_by=answered.model.version,
            prompt=tokenizer.decode(request.token_ids, skip_special_tokens=False),
            sampling=fields_of(request.sampling),
            is_same_draw=request.sampling.is_greedy or request.sampling.seed is not None,
            stable_output=stable,
            canary_output=canary,
            first_difference=first_difference(said, run.token_ids),
            edit_distance=edit_distance(said, run.token_ids),
            facts=facts,
        )
