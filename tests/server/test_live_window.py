"""Sums of the last seconds, added up by hand."""

from __future__ import annotations

import pytest

from jaxinfer.server.live_window import LiveWindow
from jaxinfer.stats import StepStats


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def window() -> tuple[LiveWindow, Clock]:
    clock = Clock()
    return LiveWindow(clock=clock), clock


def step(num_tokens: int, num_padded: int, num_sampled: int) -> StepStats:
    return StepStats("decode", num_sampled, num_tokens, num_padded, num_sampled, 0.01)


def test_padding_is_that_of_the_last_minute():
    live, clock = window()
    live.add(step(10, 100, 0))  # 90 % waste
    clock.now_s += 30
    live.add(step(60, 100, 0))
    assert live.padding_waste == pytest.approx(1 - 70 / 200)
    clock.now_s += 31
    assert live.padding_waste == pytest.approx(0.4)  # the first step is out of the window
    clock.now_s += 30
    assert live.padding_waste == 0.0


def test_speeds_are_those_of_the_last_whole_seconds():
    live, clock = window()
    for _ in range(8):
        live.add(step(20, 32, 4))  # every half second: 8 sampled and 32 prompt tokens a second
        clock.now_s += 0.5
    assert live.generation_speed == pytest.approx(32 / 5)  # four of five seconds
    clock.now_s += 1
    assert live.generation_speed == pytest.approx(32 / 5)
    assert live.prompt_speed == pytest.approx(128 / 5)
    clock.now_s += 10
    assert (live.generation_speed, live.prompt_speed) == (0.0, 0.0)


def test_the_second_under_way_does_not_count_for_speeds():
    live, _ = window()
    live.add(step(50, 50, 50))
    assert live.generation_speed == 0.0


def test_a_second_that_comes_round_again_begins_at_nought():
    live, clock = window()
    live.add(step(5, 10, 5))
    clock.now_s += 61  # the same slot of the ring
    live.add(step(9, 10, 9))
    assert live.padding_waste == pytest.approx(0.1)


def test_only_sampled_tokens_make_no_prompt_speed():
    live, clock = window()
    live.add(step(8, 8, 9))  # a prompt's last chunk counts as both
    clock.now_s += 1
    assert live.prompt_speed == 0.0
