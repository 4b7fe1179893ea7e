"""Simulated processes: real leaks are found in the stated time, nothing else is taken for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from jaxinfer.server.memory_watch import Growth, MemorySample, MemoryWatch, is_rising

MIB = 1 << 20
WINDOW_S = 1800.0
EVERY_S = 15
HOURS = 4
Resident = Callable[[float, int], float]  # seconds, load -> bytes
Load = Callable[[float], int]


def idle(now_s: float) -> int:
    return 0


def alarms(
    resident: Resident,
    *,
    load: Load = idle,
    fill: Callable[[float], float] = lambda _: 1.0,
    census: Callable[[float], dict[str, int]] = lambda _: {},
    hours: float = HOURS,
) -> list[tuple[float, Growth | None]]:
    """Seconds and new state of each change of the alarm."""
    watch = MemoryWatch(window_s=WINDOW_S, min_rise_bytes=16 * MIB)
    changes: list[tuple[float, Growth | None]] = []
    for now_s in range(0, int(hours * 3600), EVERY_S):
        running = load(now_s)
        size = int(1000 * MIB + resident(now_s, running))
        if watch.take(MemorySample(now_s, size, running, fill(now_s), census(now_s))):
            changes.append((now_s, watch.alarm))
    return changes


def leak(mib_per_minute: float, *, since_s: float = 0.0, every_s: float = 1.0) -> Resident:
    def resident(now_s: float, load: int) -> float:
        return max(now_s - since_s, 0.0) // every_s * every_s / 60 * mib_per_minute * MIB

    return resident


def together(first: Resident, second: Resident) -> Resident:
    return lambda now_s, load: first(now_s, load) + second(now_s, load)


def noise(random: Random) -> tuple[Resident, Load]:
    deviation = random.uniform(0.1, 20) * MIB
    return lambda now_s, load: random.gauss(0, deviation), idle


def wander(random: Random) -> tuple[Resident, Load]:
    """Noise that remembers itself for minutes."""
    memory, deviation = random.uniform(0.5, 0.9), random.uniform(1, 8) * MIB
    last = 0.0

    def resident(now_s: float, load: int) -> float:
        nonlocal last
        last = memory * last + random.gauss(0, deviation)
        return last

    return resident, idle


def sawtooth(random: Random) -> tuple[Resident, Load]:
    period_s, height = random.uniform(120, 0.8 * WINDOW_S), random.uniform(10, 200) * MIB
    return lambda now_s, load: height * (now_s % period_s) / period_s + random.gauss(0, MIB), idle


def steps(random: Random) -> tuple[Resident, Load]:
    """At most three in any window, and none falls back."""
    times: list[float] = []
    while not times or times[-1] < HOURS * 3600:
        times.append((times[-1] if times else 0.0) + random.uniform(0.4, 1.5) * WINDOW_S)
    heights = [random.uniform(1, 64) * MIB for _ in times]
    deviation = random.uniform(0, 3) * MIB

    def resident(now_s: float, load: int) -> float:
        taken = sum(h for t, h in zip(times, heights, strict=True) if t <= now_s)
        return taken + random.gauss(0, deviation)

    return resident, idle


def warm_up(random: Random) -> tuple[Resident, Load]:
    height, time_s = random.uniform(50, 400) * MIB, random.uniform(60, 600)
    return (
        lambda now_s, load: height * (1 - math.exp(-now_s / time_s)) + random.gauss(0, 0.5 * MIB),
        idle,
    )


def swings(random: Random) -> tuple[Resident, Load]:
    """Load comes and goes in waves; of what it needs, a part is kept for a while."""
    period_s, top = random.uniform(600, 7200), random.randint(1, 40)
    each, kept = random.uniform(0.1, 3) * MIB, random.uniform(0, 0.9)
    highest = 0.0

    def load(now_s: float) -> int:
        wave = max(0.0, math.sin(2 * math.pi * now_s / period_s))
        return int(top * wave * random.uniform(0.5, 1))

    def resident(now_s: float, load: int) -> float:
        nonlocal highest
        highest = max(highest * 0.999, load)
        return each * (load + kept * highest) + random.gauss(0, MIB)

    return resident, load


def ramp(random: Random) -> tuple[Resident, Load]:
    """More and more load with pauses; all that its highest ever needed is kept."""
    top, each = random.randint(20, 60), random.uniform(0.1, 4) * MIB
    highest = 0

    def load(now_s: float) -> int:
        return int(top * now_s / (HOURS * 3600)) if random.random() < 0.5 else 0

    def resident(now_s: float, load: int) -> float:
        nonlocal highest
        highest = max(highest, load)
        return each * highest + random.gauss(0, 0.2 * MIB)

    return resident, load


@pytest.mark.parametrize("process", [noise, wander, sawtooth, steps, warm_up, swings, ramp])
def test_what_is_no_leak_raises_no_alarm(process: Callable[[Random], tuple[Resident, Load]]):
    for seed in range(150):  # of seven kinds: 1,050 processes of four hours
        resident, load = process(Random(seed))
        assert alarms(resident, load=load) == [], f"seed {seed}"


@pytest.mark.parametrize("every_s", [1.0, 300.0])
@pytest.mark.parametrize("mib_per_minute", [1, 4])
def test_a_leak_is_found_within_one_and_a_half_windows(mib_per_minute: float, every_s: float):
    for seed in range(10):
        random = Random(seed)
        since_s = random.uniform(0, 2 * 3600)
        rise = leak(mib_per_minute, since_s=since_s, every_s=every_s)
        found = alarms(together(rise, lambda _, __, random=random: random.gauss(0, MIB)))
        assert found, f"seed {seed}"
        assert since_s < found[0][0] <= max(since_s, WINDOW_S) + 1.5 * WINDOW_S, f"seed {seed}"
        assert len(found) == 1, "it goes on, so it does not end"


def test_a_leak_below_a_swinging_load_is_found():
    for seed in range(10):
        resident, load = swings(Random(seed))
        found = alarms(together(resident, leak(2)), load=load)
        assert found, f"seed {seed}"


def test_a_leak_that_only_load_makes_is_found_at_that_load():
    found = alarms(leak(1), load=lambda _: 5)
    assert found[0][1] is not None
    assert found[0][1].load == "with 4 to 7 sequences"


def test_the_first_window_is_warm_up():
    assert alarms(leak(20), hours=0.99 * WINDOW_S / 3600) == []
    assert alarms(lambda now_s, load: 400 * MIB * min(now_s / WINDOW_S, 1.0)) == []


def test_a_rise_to_a_load_never_seen_is_no_leak_and_a_leak_afterwards_is():
    def load(now_s: float) -> int:
        return int(now_s // 360)

    def resident(now_s: float, load: int) -> float:
        return load * 3 * MIB

    assert alarms(resident, load=load) == []
    known = alarms(leak(1), load=lambda now_s: 40 if now_s < 60 else 20)
    assert known[0][0] <= 2.5 * WINDOW_S


def test_the_first_filling_of_the_pool_is_no_leak():
    def fill(now_s: float) -> float:
        return min(now_s / (3 * 3600), 1.0)

    assert alarms(lambda now_s, load: fill(now_s) * 150 * MIB, fill=fill) == []


def test_growth_tells_how_much_in_what_time_and_what_grew_with_it():
    def census(now_s: float) -> dict[str, int]:
        return {"streams": 10 + int(now_s // 60), "files": 7, "threads": 3 + int(now_s) % 120 // 60}

    (_, growth), *_ = alarms(leak(1), census=census)
    assert growth is not None
    assert growth.load == "while idle"
    assert growth.low_bytes == 1030 * MIB  # the first window is not looked at
    assert growth.seconds == pytest.approx(WINDOW_S, rel=0.1)
    assert growth.rise_bytes == growth.seconds / 60 * MIB
    assert growth.grown == {"streams": (40, 40 + int(growth.seconds // 60))}


def test_an_alarm_ends_when_the_memory_falls_back():
    def resident(now_s: float, load: int) -> float:
        return leak(1)(now_s, load) if now_s < 3 * WINDOW_S else 0.0

    (began_s, growth), (ended_s, after) = alarms(resident)
    assert growth is not None
    assert after is None
    assert began_s < 3 * WINDOW_S < ended_s <= 3.3 * WINDOW_S


def test_an_alarm_ends_when_nothing_has_risen_for_a_window():
    def resident(now_s: float, load: int) -> float:
        return leak(1)(min(now_s, 3 * WINDOW_S), load)

    (_, growth), (ended_s, after) = alarms(resident)
    assert growth is not None
    assert after is None
    assert 4 * WINDOW_S <= ended_s <= 4.5 * WINDOW_S


def test_rising_is_nearly_every_pair_in_order():
    assert is_rising(range(11))
    assert is_rising([0, 1, 3, 2, 4, 5, 7, 6, 8, 9, 10])
    assert not is_rising([0] * 5 + [1] * 6)
    assert not is_rising([5, 1, 2, 3, 4, 0, 6, 7, 8, 9, 10])
