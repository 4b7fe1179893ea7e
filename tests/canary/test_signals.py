"""What each signal makes of what it sees: observations by hand, and false alarms by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.request_signals import MAX_KEYS
from jaxinfer.canary.signal import Evidence, difference, rank, scaled
from jaxinfer.canary.signals import Signals
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import StepStats

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ERROR, ABORT, TIMEOUT = FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT
ALL = Guard(max_kl=0.1)


def facts(
    finish: FinishReason = STOP,
    *,
    tokens: int = 100,
    repetition: float = 0.1,
    e2e_s: float | None = None,
    key: str = "",
) -> RequestFacts:
    return RequestFacts("", finish, tokens, repetition, 0.1, e2e_s=e2e_s, key=key)


def made(guard: Guard = ALL) -> Signals:
    return Signals(guard, has_shadow=True)


def feed(signals: Signals, canary: RequestFacts, stable: RequestFacts, num: int = 1) -> int:
    """Pairs of requests, a second apart, until the alarm. Returns: how many."""
    for i in range(num):
        signals.note_request(stable, i, is_canary=False)
        if signals.note_request(canary, i, is_canary=True):
            return i + 1
    return num + 1


def of(signals: Signals, name: str) -> Evidence:
    return next(e for e in signals.evidence() if e.name == name)


def test_the_scales_by_hand():
    assert [difference(c, s) for c, s in ((True, False), (True, True), (False, True))] == [
        1,
        0.5,
        0,
    ]
    assert [rank(2, 1), rank(1, 1), rank(1, 2)] == [1.0, 0.5, 0.0]
    assert [scaled(x, -1, 3) for x in (-9, -1, 0, 3, 9)] == [0, 0, 0.25, 1, 1]


def test_the_rate_is_divided_over_the_signals_that_are_on():
    thresholds = {e.name: e.threshold for e in made().evidence()}
    assert thresholds.pop("not_numbers") == 1.0
    assert len(thresholds) == 9
    assert set(thresholds.values()) == {9 / 0.01}
    few = Signals(Guard(false_alarm_rate=0.05, max_slowdown=None), has_shadow=False)
    assert {e.threshold for e in few.evidence()[1:]} == {6 / 0.05}
    assert "step_time" not in {e.name for e in few.evidence()}


def test_one_request_that_is_not_numbers_is_enough():
    bad = RequestFacts("", ERROR, 0, 0.0, None, is_not_numbers=True)
    signals = made()
    assert signals.note_request(bad, 0.0, is_canary=False) is None
    alarm = signals.note_request(bad, 0.0, is_canary=True)
    assert alarm
    assert (alarm.name, alarm.canary, alarm.num_observations) == ("not_numbers", 1.0, 1)


def test_a_canary_whose_requests_all_fail_is_found_after_about_ten():
    assert 8 <= feed(made(), facts(ERROR), facts(), 20) <= 12


def test_a_canary_that_begins_to_fail_after_a_good_while_is_found_soon():
    signals = made()
    feed(signals, facts(), facts(), 5000)
    assert feed(signals, facts(ERROR), facts(), 50) <= 20


def test_failures_are_found_without_a_request_of_the_stable_version():
    signals = made()
    alarms = [signals.note_request(facts(ERROR), i, is_canary=True) for i in range(12)]
    alarm = next(a for a in alarms if a)
    assert (alarm.name, alarm.stable) == ("failing", None)


def test_failures_that_both_have_say_nothing_of_the_canary():
    signals = made()
    random = Random(1)
    for i in range(400):
        for is_canary in (False, True):
            finish = ERROR if random.random() < 0.3 else STOP
            assert not signals.note_request(facts(finish), i, is_canary=is_canary)
    assert of(signals, "failed_requests").e_value < 10


def test_rare_failures_that_the_stable_version_never_has_are_found():
    signals = made()
    alarms = 0
    for i in range(2000):
        signals.note_request(facts(), i, is_canary=False)
        is_bad = i % 50 == 0
        alarms += bool(signals.note_request(facts(ERROR if is_bad else STOP), i, is_canary=True))
        if alarms:
            assert i <= 50 * 16
            return
    pytest.fail("one of fifty fails and nobody says so")


def test_failures_of_one_moment_count_once():
    signals = made()
    for i in range(200):
        signals.note_request(facts(), 1.0 + i / 1e5, is_canary=False)
        assert not signals.note_request(facts(ERROR), 1.0 + i / 1e5, is_canary=True)
    assert of(signals, "failing").num_observations == 1


def test_requests_that_their_client_ended_are_left_out():
    signals = made()
    feed(signals, facts(ABORT), facts(), 500)
    assert {e.num_observations for e in signals.evidence()} == {0, 500}  # not_numbers counts all


def test_deadlines_count_against_a_canary_that_misses_most_of_them_and_not_beside_the_others():
    signals = made()
    assert feed(signals, facts(TIMEOUT), facts(), 50) == 10
    assert of(signals, "failing").is_alarm
    signals = made()
    for i in range(1000):
        assert feed(signals, facts(TIMEOUT if i % 3 == 0 else STOP), facts()) == 2
    assert of(signals, "failed_requests").canary == 0.0


@pytest.mark.parametrize(
    ("name", "canary"),
    [
        ("output_length", facts(tokens=101)),
        ("output_length", facts(tokens=99)),
        ("repetition", facts(repetition=0.2)),
        ("cut_answers", facts(LENGTH)),
    ],
)
def test_answers_that_always_differ_are_found(name: str, canary: RequestFacts):
    signals = made()
    assert feed(signals, canary, facts(), 60) <= 30
    assert of(signals, name).is_alarm


def test_answers_that_differ_as_much_as_is_tolerated_are_not():
    signals = made()
    random = Random(3)
    for i in range(1500):
        is_longer = random.random() < 0.65
        canary = facts(LENGTH if i % 10 == 0 else STOP, tokens=101 if is_longer else 99)
        assert feed(signals, canary, facts()) == 2


def test_less_repetition_is_no_fault():
    assert feed(made(), facts(repetition=0.0), facts(repetition=0.1), 300) == 301


def test_requests_from_before_the_stage_are_not_compared():
    signals = made()
    signals.begin_stage(100.0)
    for i in range(50):
        signals.note_request(facts(tokens=9, e2e_s=60.0), 101.0 + i, is_canary=False)
        signals.note_request(facts(e2e_s=0.5), 101.0 + i, is_canary=True)
    assert of(signals, "output_length").num_observations == 0
    signals.note_request(facts(e2e_s=60.0), 230.0, is_canary=False)
    signals.note_request(facts(e2e_s=0.5), 230.0, is_canary=True)
    assert of(signals, "output_length").num_observations == 1


def test_a_key_counts_once_in_a_stage():
    signals = made()
    for i in range(100):
        signals.note_request(facts(key=f"user {i}"), i, is_canary=False)
        assert not signals.note_request(facts(tokens=900, key="a talker"), i, is_canary=True)
    assert of(signals, "output_length").num_observations == 1
    assert of(signals, "failed_requests").num_observations == 100
    signals.begin_stage(100.0)
    signals.note_request(facts(key="a talker"), 100.0, is_canary=True)
    signals.note_request(facts(key="user 0"), 100.0, is_canary=False)
    assert of(signals, "output_length").num_observations == 2


@pytest.mark.parametrize("finish", [ERROR, TIMEOUT])
def test_a_user_whose_requests_come_to_nothing_is_one_observation(finish: FinishReason):
    signals = made(Guard(max_length_rank=None))
    for i in range(200):
        signals.note_request(facts(key=f"user {i}"), i, is_canary=False)
        signals.note_request(facts(key=f"user {i}"), i, is_canary=True)
        signals.note_request(facts(key=f"user {i}"), i, is_canary=False)
        assert not signals.note_request(facts(finish, key="unlucky"), i, is_canary=True)
    assert of(signals, "failing").num_observations == 400


def ramp(random: Random, *, has_e2e: bool, slowdown: float) -> str | None:
    """A quarter of 200 requests/s from second 20 on; a token takes 50 ms, the canary's `slowdown`
    times as long. Returns: the alarm.
    """
    ended: list[tuple[float, bool, int, float]] = []
    for i in range(200 * 60):
        began, tokens = i / 200, random.randint(20, 200)
        is_canary = began >= 20 and random.random() < 0.25
        took_s = tokens / 20 * (slowdown if is_canary else 1.0)
        ended.append((began + took_s, is_canary, tokens, took_s))
    signals = made()
    signals.begin_stage(20.0)
    for now, is_canary, tokens, took_s in sorted(ended):
        seen = facts(tokens=tokens, e2e_s=took_s if has_e2e else None)
        if 20 <= now < 60 and (alarm := signals.note_request(seen, now, is_canary=is_canary)):
            return alarm.name
    return None


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_short_answers_that_end_first_do_not_make_a_canary_look_terse(slowdown: float):
    assert ramp(Random(1), has_e2e=False, slowdown=slowdown) == "output_length"  # else: no ramp
    assert [ramp(Random(i), has_e2e=True, slowdown=slowdown) for i in range(2)] == [None] * 2


def test_answers_count_once_the_long_ones_have_had_the_time_to_end():
    signals = made()
    signals.begin_stage(100.0)
    for now, num in ((101.0, 0), (119.0, 0), (120.0, 1)):
        signals.note_request(facts(e2e_s=10.0), now, is_canary=False)
        signals.note_request(facts(e2e_s=0.5), now, is_canary=True)
        assert of(signals, "output_length").num_observations == num, now
    assert of(signals, "failed_requests").num_observations == 2  # began in the stage


def talkers(random: Random, *, has_key: bool) -> str | None:
    """12 users, each with a habit, of whom a quarter gets a canary that answers alike."""
    habits = [random.randint(20, 400) for _ in range(12)]
    signals = made()
    for i in range(2000):
        user = random.randrange(12)
        seen = facts(tokens=habits[user] + i % 5, key=f"user {user}" if has_key else "")
        if alarm := signals.note_request(seen, i, is_canary=user < 3):
            return alarm.name
    return None


def test_a_few_users_with_habits_of_their_own_do_not_make_a_canary_look_different():
    assert any(talkers(Random(i), has_key=False) for i in range(8))  # else this shows nothing
    assert not any(talkers(Random(i), has_key=True) for i in range(8))


def test_the_keys_that_are_remembered_are_bounded():
    signals = made()
    for i in range(MAX_KEYS + 1):
        signals.note_request(facts(key=str(i)), i, is_canary=True)
    assert len(signals._requests._counted._keys[True, STOP]) == MAX_KEYS


def test_a_long_prompt_with_much_better_text_does_not_hide_many_worse_ones():
    signals = made()
    shadows = [ShadowFacts(10, 0.0, -10.0), *[ShadowFacts(10, 0.0, 0.3)] * 100]
    assert any(signals.note_shadow(each) for each in shadows)


def test_shadows_as_far_as_is_tolerated_are_not_found_and_those_beyond_are():
    random = Random(5)

    def found(kl: float, nll: float) -> str | None:
        signals = made()
        for _ in range(600):
            seen = ShadowFacts(10, kl * 2 * random.random(), random.gauss(nll, 0.1))
            if alarm := signals.note_shadow(seen):
                return alarm.name
        return None

    assert found(0.1, 0.02) is None
    assert found(0.2, 0.0) == "kl"
    assert found(0.0, 0.07) == "nll_increase"


def test_a_shadow_without_tokens_says_nothing():
    signals = made()
    for _ in range(100):
        assert not signals.note_shadow(ShadowFacts(0, math.nan, math.nan))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_distance_that_is_no_number_is_as_bad_as_can_be(bad: float):
    signals = made()
    alarms = [signals.note_shadow(ShadowFacts(10, bad, bad)) for _ in range(10)]
    alarm = next(a for a in alarms if a)
    assert (alarm.name, alarm.canary) == ("kl", pytest.approx(1.6))


def test_failed_steps_of_the_canary_are_found():
    signals = made()
    for i in range(30):
        signals.note_step(StepStats("decode", 1, 1, 8, 1, 0.1), i, is_canary=False)
        if alarm := signals.note_failed_step(i, is_canary=True):
            assert alarm.name == "failed_steps"
            assert i <= 15
            return
    pytest.fail("every step fails and nobody says so")


Noise = Callable[[Random, int], list[float]]


def white(random: Random, num: int) -> list[float]:
    return [random.gauss(0.0, 0.1) for _ in range(num)]


def wandering(memory: float) -> Noise:
    """AR(1), with a deviation of 0.2, and a little of its own in each step."""

    def noise(random: Random, num: int) -> list[float]:
        found, lasting = [], random.gauss(0.0, 0.2)
        for _ in range(num):
            lasting = memory * lasting + random.gauss(0.0, 0.2 * math.sqrt(1 - memory**2))
            found.append(lasting + random.gauss(0.0, 0.02))
        return found

    return noise


def bursts(random: Random, num: int) -> list[float]:
    found, is_burst = [], False
    for _ in range(num):
        is_burst = random.random() < (0.9 if is_burst else 0.02)
        found.append(0.8 * is_burst + random.gauss(0.0, 0.05))
    return found


def spikes(random: Random, num: int) -> list[float]:
    return [2.0 * (i % 7 == 0) + random.gauss(0.0, 0.05) for i in range(num)]


NOISES: dict[str, Noise] = {
    "white": white,
    "wandering": wandering(0.9),
    "wandering slowly": wandering(0.99),
    "bursts": bursts,
    "spikes": spikes,
}


def found_after(slowdown: float, noise: Noise, random: Random, *, num: int, share: float) -> int:
    """Steps of the canary until the alarm; more than `num`: there was none."""
    guard = Guard(false_alarm_rate=0.1, max_slowdown=0.05)
    signals = Signals(guard, has_shadow=False)
    signals._steps.all[-1].threshold = 10.0  # as if it were the only one
    num_canary, due = 0, 0.0
    for i, log in enumerate(noise(random, round(num / share))):
        due += share
        is_canary = due >= 1.0
        due -= is_canary
        num_canary += is_canary
        seconds = math.exp(log) * (slowdown if is_canary else 1.0)
        stats = StepStats("decode", 8, 8, 8, 8, seconds)
        if signals.note_step(stats, i * 0.05, is_canary=is_canary):
            return num_canary
    return num + 1


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_canary_as_slow_as_is_tolerated_gives_no_more_alarms_than_stated(noise: Noise):
    random, num_runs = Random(11), 60
    runs = [found_after(1.05, noise, random, num=100, share=0.5) for _ in range(num_runs)]
    assert sum(after <= 100 for after in runs) <= 0.1 * num_runs + 3 * math.sqrt(0.09 * num_runs)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_alarms_of_many_canaries_as_slow_as_is_tolerated(noise: Noise, share: float):
    random, num_runs = Random(11), 200
    runs = [found_after(1.05, noise, random, num=300, share=share) for _ in range(num_runs)]
    assert sum(after <= 300 for after in runs) <= 0.1 * num_runs + 3 * math.sqrt(0.09 * num_runs)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_canary_ten_percent_slower_is_found(noise: Noise):
    assert found_after(1.1, noise, Random(13), num=1000, share=0.5) <= 1000
