"""What metrics and log are told of a growth, in a real server with scripted memory."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxinfer.server import memory_census, memory_metrics
from jaxinfer.server.growth_alarm import GrowthAlarm, began_line, ended_line
from jaxinfer.server.memory_census import census, commonest_types
from jaxinfer.server.memory_watch import Growth, MemoryWatch
from tests.server.house import House, open_house

MIB = 1 << 20
SIZES = {
    "weights": 500 * MIB,
    "programs": 20 * MIB,
    "kv_pool": 1024 * MIB,
    "process": 300 * MIB,
    "host_rss": 1844 * MIB,
}
GROWTH = Growth(
    rise_bytes=30 * MIB,
    seconds=1800.0,
    load="while idle",
    low_bytes=1814 * MIB,
    grown={"open streams": (3, 1203), "Python memory blocks": (500000, 900000)},
)


def test_the_line_names_the_owner_and_what_grew_with_it():
    assert began_line(GROWTH, SIZES, [("dict", 120000), ("list", 7)]) == (
        "memory keeps rising: +30 MiB in 30 min while idle; resident 1,844 MiB. Not weights 500 MiB"
        " + programs 20 MiB + kv_pool 1,024 MiB, which do not change: the rest of the process, now "
        "300 MiB. With it grew: open streams 3 -> 1,203, Python memory blocks 500,000 -> 900,000. "
        "Most numerous Python objects: dict 120,000, list 7"
    )


def test_where_nothing_counted_grew_it_is_native_memory():
    growth = Growth(30 * MIB, 1800.0, "while idle", 1814 * MIB, {})
    assert began_line(growth, SIZES, []).endswith(
        "With it grew: nothing that is counted, so native memory"
    )


def test_the_last_line_says_what_is_left():
    assert ended_line(GROWTH, SIZES) == (
        "memory no longer rises: resident 1,844 MiB, 30 MiB above where the growth began"
    )
    assert "14 MiB below" in ended_line(GROWTH, {"host_rss": 1800 * MIB})


def sample_at(house: House, alarm: GrowthAlarm) -> None:
    async def sample() -> None:
        alarm.sample()

    asyncio.run_coroutine_threadsafe(sample(), house.loop).result(5)


def test_a_leak_sets_the_gauge_and_logs_once_at_its_begin_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now_s = 0.0

    def leaking() -> int:
        return int(1000 * MIB + min(now_s, 200.0) * MIB)  # of 1 MiB a second, until 200 s

    monkeypatch.setattr(memory_metrics, "resident_bytes", leaking)
    watch = MemoryWatch(window_s=60.0, min_rise_bytes=16 * MIB)
    with open_house() as house, caplog.at_level(logging.WARNING, "jaxinfer"):
        alarm = GrowthAlarm(watch, house.state, clock=lambda: now_s)
        seen: list[float] = []
        for second in range(400):
            now_s = float(second)
            sample_at(house, alarm)
            if second % 10 == 0:
                seen.append(house.metric("memory_growth_alarm"))
        assert seen[0] == 0
        assert seen[15] == 1
        assert seen[-1] == 0
        texts = [r.message for r in caplog.records if r.name.endswith("growth_alarm")]
        assert len(texts) == 2
        assert texts[0].startswith("memory keeps rising: +")
        assert texts[1].startswith("memory no longer rises: ")
        assert all(r.levelno == logging.WARNING for r in caplog.records)


def test_before_there_is_a_model_nothing_is_sampled():
    watch = MemoryWatch(window_s=60.0, min_rise_bytes=16 * MIB)
    with open_house(is_ready=False) as house:
        sample_at(house, GrowthAlarm(watch, house.state))
    assert watch.alarm is None


def test_the_census_counts_what_is_open():
    with open_house() as house:

        async def counted() -> dict[str, int]:
            return census(house.state)

        house.complete("a", max_tokens=20)
        counts = asyncio.run_coroutine_threadsafe(counted(), house.loop).result(5)
        assert counts["open requests"] == counts["open streams"] == counts["sequences"] == 0
        assert counts["pages with content"] >= 2  # 21 tokens in pages of 8
        assert counts["threads"] >= 2
        assert counts["asyncio tasks"] >= 1
        assert counts["Python memory blocks"] > 1000


def test_the_commonest_types_are_those_of_a_leak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_census, "MAX_BLOCKS", 10**9)  # whatever tests before it have left

    class Leaked:
        def __init__(self) -> None:
            self.other = [self]

    held = [Leaked() for _ in range(300_000)]
    names = [name for name, _ in commonest_types(20)]
    assert any("Leaked" in name for name in names)
    assert len(held) == 300_000
