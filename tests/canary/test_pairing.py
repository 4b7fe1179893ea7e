"""Who is compared with whom."""

from __future__ import annotations

from typing import Literal

from jaxinfer.canary.pairing import MAX_APART_S, MAX_WAITING, Pairing, StepPairing
from jaxinfer.stats import StepStats


def step(
    seconds: float,
    *,
    kind: Literal["prefill", "decode"] = "decode",
    bucket: int = 8,
    rows: int = 4,
    tokens: int = 4,
) -> StepStats:
    return StepStats(kind, rows, tokens, bucket, rows, seconds)


def test_the_newest_of_the_other_version_is_taken_and_only_once():
    pairing = Pairing[str]()
    assert pairing.note("s1", is_canary=False) is None
    assert pairing.note("s2", is_canary=False) is None
    assert pairing.note("c1", is_canary=True) == ("c1", "s2")
    assert pairing.note("c2", is_canary=True) == ("c2", "s1")
    assert pairing.note("c3", is_canary=True) is None
    assert pairing.note("s3", is_canary=False) == ("c3", "s3")


def test_those_who_wait_are_bounded():
    pairing = Pairing[int]()
    for i in range(10 * MAX_WAITING):
        pairing.note(i, is_canary=False)
    pairs = [pairing.note(-1, is_canary=True) for _ in range(10 * MAX_WAITING)]
    assert sum(pair is not None for pair in pairs) == MAX_WAITING


def test_after_forgetting_nobody_waits():
    pairing = Pairing[str]()
    pairing.note("s", is_canary=False)
    pairing.forget()
    assert pairing.note("c", is_canary=True) is None


def alternating(*steps: StepStats, apart_s: float = 0.1) -> list[tuple[float, float]]:
    """Canary first, then by turns; the first follows a step of the stable version."""
    pairing = StepPairing()
    pairing.note(step(9.0, bucket=512), 0.0, is_canary=False)
    pairs = [
        pairing.note(stats, i * apart_s, is_canary=i % 2 == 0) for i, stats in enumerate(steps)
    ]
    return [(pair.canary, pair.stable) for pair in pairs if pair]


def test_neighbours_are_paired_canary_first_or_not():
    assert alternating(step(1.0), step(2.0), step(3.0), step(4.0)) == [(1.0, 2.0), (3.0, 4.0)]


def test_another_kind_bucket_or_number_of_rows_is_not_compared():
    assert not alternating(step(1.0), step(2.0, kind="prefill"))
    assert not alternating(step(1.0), step(2.0, bucket=16))
    assert not alternating(step(1.0, rows=3), step(2.0, rows=4))


def test_prefills_of_about_the_same_tokens_are_compared():
    like = [step(float(t), kind="prefill", bucket=128, tokens=t) for t in (100, 101)]
    unlike = [step(float(t), kind="prefill", bucket=128, tokens=t) for t in (100, 120)]
    assert alternating(*like) == [(100.0, 101.0)]
    assert not alternating(*unlike)


def test_steps_far_apart_are_not_compared():
    assert not alternating(step(1.0), step(2.0), apart_s=MAX_APART_S + 1)


def test_a_step_after_its_own_version_is_not_compared_with_one_after_the_other():
    pairing = StepPairing()
    assert pairing.note(step(1.0), 0.0, is_canary=False) is None
    assert pairing.note(step(1.0), 0.1, is_canary=False) is None
    assert pairing.note(step(2.0), 0.2, is_canary=True) is None  # the weights change here
    assert pairing.note(step(3.0), 0.3, is_canary=False) == (2.0, 3.0)  # and here
    assert pairing.note(step(1.0), 0.4, is_canary=False) is None


def test_of_many_steps_of_one_version_only_the_last_waits():
    pairing = StepPairing()
    for i in range(100):
        pairing.note(step(float(i)), 0.0, is_canary=False)
    assert [pending.duration_s for pending in pairing._pending.values()] == [99.0]
