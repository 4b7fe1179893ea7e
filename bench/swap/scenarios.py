"""Kinds of canaries, as what the rollout sees of them.

The pools are guesses of what small chat models do; those of real ones can take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.scheduling.request import FinishReason

NUM_ANSWERS = 2000  # of a pool
MAX_TOKENS = 512  # of an answer
NUM_COMPARED = 64  # tokens of a shadowed prompt


@dataclass(frozen=True, slots=True)
class Pool:
    """What one version shows; each observation is drawn from it, with replacement."""

    answers: Sequence[RequestFacts]
    shadows: Sequence[ShadowFacts] = ()  # of a canary, beside the stable version
    slowdown: float = 1.0  # its steps, times the stable version's


@dataclass(frozen=True, slots=True)
class Machine:
    """How long steps take that should take the same time."""

    step_s: float = 0.05
    noise: float = 0.05  # standard deviation of the logarithm, of each step by itself
    wander: float = 0.0  # of a part that lasts: AR(1) from step to step
    memory: float = 0.99  # its correlation from one step to the next
    burst_share: float = 0.0  # of the steps, when something else runs
    burst_steps: float = 50.0  # mean length of such a time
    burst_factor: float = 2.5  # how much slower steps are then
    swing: float = 0.0  # amplitude of the logarithm of the speed over SWING_S


SWING_S = 900.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of canary."""

    name: str
    stable: Pool
    canary: Pool
    machine: Machine = field(default_factory=Machine)
    is_bad: bool = True


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model answers."""

    median_tokens: float = 120.0
    spread: float = 0.6  # standard deviation of the logarithm of the tokens
    endless_share: float = 0.03  # that go on until max_tokens
    loop_share: float = 0.05  # that repeat themselves


def answers(version: str, manner: Manner, random: Random) -> list[RequestFacts]:
    """A pool of them."""
    return [_answer(version, manner, random) for _ in range(NUM_ANSWERS)]


def shadows(mean: float, spread: float, kl: float, random: Random) -> list[ShadowFacts]:
    """A pool of comparisons: nats per token, with an increase of exactly that mean."""
    drawn = [random.gauss(0.0, spread) for _ in range(NUM_ANSWERS)]
    shift = mean - sum(drawn) / len(drawn)
    return [
        ShadowFacts(NUM_COMPARED, kl=kl * random.expovariate(1.0), nll_increase=shift + x)
        for x in drawn
    ]


def scenarios(random: Random, *, stable: str = "stable", canary: str = "canary") -> list[Scenario]:
    """Sound ones first."""
    usual = Manner()
    before = Pool(answers(stable, usual, random))
    like = Pool(answers(canary, usual, random), shadows(0.0, 0.08, 0.01, random))
    terser = replace(usual, median_tokens=110.0, loop_share=0.06)
    other = Pool(answers(canary, terser, random), shadows(-0.02, 0.2, 0.05, random))
    most = Pool(like.answers, shadows(0.02, 0.1, 0.02, random), slowdown=1.05)
    garbage = Manner(median_tokens=400.0, spread=0.8, endless_share=0.7, loop_share=0.6)
    dull = Manner(median_tokens=150.0, endless_share=0.12, loop_share=0.2)
    no_numbers = [replace(a, finish=FinishReason.ERROR, is_not_numbers=True) for a in like.answers]
    failing = [replace(a, finish=FinishReason.ERROR) for a in like.answers]
    wandering = Machine(noise=0.1, wander=0.2, swing=0.4)
    bursting = Machine(burst_share=0.1)
    return [
        Scenario("the same weights", before, like, is_bad=False),
        Scenario("8 % terser, fine-tuned", before, other, is_bad=False),
        Scenario("a machine that wanders and drifts", before, like, wandering, is_bad=False),
        Scenario("a machine with bursts", before, like, bursting, is_bad=False),
        Scenario("all that is tolerated: 5 %, 0.02 nats", before, most, wandering, is_bad=False),
        Scenario("not numbers", before, Pool(no_numbers)),
        Scenario("each request fails", before, Pool(failing)),
        Scenario(
            "layers swapped",
            before,
            Pool(answers(canary, garbage, random), shadows(5.0, 1.0, 5.0, random)),
        ),
        Scenario("layers swapped, no shadow", before, Pool(answers(canary, garbage, random))),
        Scenario(
            "one scale wrong",
            before,
            Pool(answers(canary, dull, random), shadows(0.4, 0.3, 0.4, random)),
        ),
        Scenario("10 % slower", before, replace(like, slowdown=1.1)),
        Scenario("10 % slower, machine wanders", before, replace(like, slowdown=1.1), wandering),
        Scenario(
            "quietly worse: +0.05 nats",
            before,
            replace(like, shadows=shadows(0.05, 0.1, 0.03, random)),
        ),
    ]


def _answer(version: str, manner: Manner, random: Random) -> RequestFacts:
    tokens = int(random.lognormvariate(0.0, manner.spread) * manner.median_tokens) + 1
    if random.random() < manner.endless_share:
        tokens = MAX_TOKENS
    has_stopped = tokens < MAX_TOKENS
    is_loop = random.random() < manner.loop_share
    return RequestFacts(
        version=version,
        finish=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        num_output_tokens=min(tokens, MAX_TOKENS),
        repetition=random.betavariate(8, 2) if is_loop else random.betavariate(1, 20),
        ttft_s=0.1,
    )
