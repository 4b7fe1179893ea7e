"""Simulated canaries, told to the real `Rollout`: how many are found, how soon, by what.

Requests come at random moments, steps follow each other on a machine whose speed changes for all
alike. What the rollout would not use is left out: of the stable version's requests and steps only
those next to the canary's are made. Seconds are simulated ones, at a stated rate of requests.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.swap.scenarios import SWING_S, Machine, Scenario, scenarios
from jaxinfer.rollout import Decision, Phase, Rollout, RolloutPlan
from jaxinfer.stats import StepStats

STABLE, CANARY = "stable", "canary"
MAX_S = 100 * 24 * 3600.0  # of a canary that comes to no end


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the server is told to do."""

    requests_per_s: float = 2.0  # of both versions together
    steps_per_request: float = 2.0  # of the canary that can be compared; real ones have more


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one canary."""

    signal: str | None  # that rolled it back; None: it was promoted
    num_requests: int  # of the canary until then
    after_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What became of the canaries of a kind."""

    name: str
    is_bad: bool
    ended: Sequence[Ended]
    false_alarm_rate: float  # that is stated

    @property
    def found(self) -> list[Ended]:
        return [e for e in self.ended if e.signal is not None]

    @property
    def share(self) -> float:
        return len(self.found) / len(self.ended)

    @property
    def is_as_promised(self) -> bool:
        """Bad ones are all found; of sound ones no more than stated, but for chance."""
        if self.is_bad:
            return self.share == 1.0
        rate, n = self.false_alarm_rate, len(self.ended)
        return self.share <= rate + 3.0 * math.sqrt(rate * (1.0 - rate) / n)


@dataclass(slots=True)
class Speed:
    """The machine's, from step to step, as it would be for any step there."""

    machine: Machine
    random: Random
    _lasting: float = field(init=False, default=0.0)
    _is_burst: bool = field(init=False, default=False)

    def __post_init__(self):
        self.skip(1e9)

    def skip(self, num_steps: float) -> None:
        """That many steps later."""
        kept = self.machine.memory**num_steps
        spread = self.machine.wander * math.sqrt(1.0 - kept * kept)
        self._lasting = kept * self._lasting + self.random.gauss(0.0, spread)
        share = self.machine.burst_share
        stays = (1.0 - 1.0 / self.machine.burst_steps) ** num_steps
        self._is_burst = self.random.random() < share + (self._is_burst - share) * stays

    def step_s(self, slowdown: float, now: float) -> float:
        """Seconds of a step here."""
        swing = self.machine.swing * math.sin(2.0 * math.pi * now / SWING_S)
        noise = self.random.gauss(self._lasting + swing, self.machine.noise)
        burst = self.machine.burst_factor if self._is_burst else 1.0
        return self.machine.step_s * slowdown * burst * math.exp(noise)


class Canary:
    """One of them, and the rollout that watches it."""

    def __init__(self, scenario: Scenario, plan: RolloutPlan, traffic: Traffic, random: Random):
        self._scenario = scenario
        self._traffic = traffic
        self._random = random
        self._speed = Speed(scenario.machine, random)
        self._now = 0.0
        self._num_requests = 0
        self._rollout = Rollout(plan, stable=STABLE, now=0.0)
        self._rollout.loaded(CANARY, 0.0)

    def run(self) -> Ended:
        """Until it is promoted or rolled back."""
        decision: Decision | None = None
        while self._rollout.phase is Phase.CANARY and self._now < MAX_S:
            decision = self._one_request() or self._rollout.tick(self._now)
        assert decision is not None, "a simulated rollout needs a plan that ends"
        signal = decision.numbers.get("signal")
        return Ended(None if signal is None else str(signal), self._num_requests, self._now)

    def _one_request(self) -> Decision | None:
        """One of the canary, and what is next to it."""
        rollout, random = self._rollout, self._random
        share, rate = rollout.share, self._traffic.requests_per_s
        self._now += random.expovariate(share * rate)
        self._num_requests += 1
        for _ in range(2):
            if random.random() > share:  # one of the stable version came since the last
                rollout.note_request(random.choice(self._scenario.stable.answers), self._now)
        decision = rollout.note_request(random.choice(self._scenario.canary.answers), self._now)
        return decision or self._steps(share) or self._shadows(share)

    def _steps(self, share: float) -> Decision | None:
        num = self._traffic.steps_per_request
        for _ in range(int(num) + (self._random.random() < num % 1.0)):
            self._speed.skip(max(1.0 / share - 1.0, 1.0))
            decision = self._step(CANARY, self._scenario.canary.slowdown)
            self._speed.skip(1.0)
            if decision := decision or self._step(STABLE, self._scenario.stable.slowdown):
                return decision
        return None

    def _step(self, version: str, slowdown: float) -> Decision | None:
        seconds = self._speed.step_s(slowdown, self._now)
        return self._rollout.note_step(StepStats("decode", 8, 8, 8, 8, seconds, version), self._now)

    def _shadows(self, share: float) -> Decision | None:
        """Of all requests since the last of the canary, whichever version they got."""
        pool = self._scenario.canary.shadows
        if not pool:
            return None
        expected = self._rollout.plan.shadow_share / share
        for _ in range(int(expected) + (self._random.random() < expected % 1.0)):
            if decision := self._rollout.note_shadow(self._random.choice(pool), self._now):
                return decision
        return None


def simulate(
    scenario: Scenario,
    *,
    num_canaries: int,
    seed: int,
    plan: RolloutPlan,
    traffic: Traffic,
) -> Findings:
    """So many canaries of a kind, each with its own chance."""
    ended = [
        Canary(scenario, plan, traffic, Random(f"{seed} {scenario.name} {i}")).run()
        for i in range(num_canaries)
    ]
    return Findings(scenario.name, scenario.is_bad, ended, plan.guard.false_alarm_rate)


def simulate_all(
    num_canaries: int = 1000,
    *,
    seed: int = 0,
    plan: RolloutPlan | None = None,
    traffic: Traffic | None = None,
) -> Iterator[Findings]:
    """Each kind of `bench.swap.scenarios`, one after the other."""
    plan = plan or RolloutPlan(shadow_share=0.1)
    for scenario in scenarios(Random(seed), stable=STABLE, canary=CANARY):
        yield simulate(
            scenario,
            num_canaries=num_canaries,
            seed=seed,
            plan=plan,
            traffic=traffic or Traffic(),
        )


def table(findings: Sequence[Findings], *, traffic: Traffic | None = None) -> Iterator[str]:
    """Text of at most 100 columns."""
    rate = (traffic or Traffic()).requests_per_s
    yield f"{'':46}{'requests of':>18}{'seconds at':>16}"
    yield f"{'':46}{'the canary':>18}{f'{rate:g} requests/s':>16}"
    yield (f"{'canary':37}{'rolled':>9}{'median':>9}{'p90':>9}{'median':>8}{'p90':>8}  mostly by")
    for one in findings:
        yield _row(one)
    sound = [one for one in findings if not one.is_bad]
    if sound:
        num = sum(len(one.found) for one in sound)
        of = sum(len(one.ended) for one in sound)
        yield (
            f"sound ones rolled back: {num} of {of:,}, that is {num / of:.2%}; stated: at most "
            f"{sound[0].false_alarm_rate:.2%} of each kind"
        )


def _row(one: Findings) -> str:
    head = f"{one.name:37}{one.share:>9.1%}"
    if not one.found:
        return head
    figures = (
        (_median([e.num_requests for e in one.found]), 9),
        (_p90([e.num_requests for e in one.found]), 9),
        (_median([e.after_s for e in one.found]), 8),
        (_p90([e.after_s for e in one.found]), 8),
    )
    by = Counter(e.signal for e in one.found).most_common(1)[0][0]
    return head + "".join(f"{figure:>{width},.0f}" for figure, width in figures) + f"  {by}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
