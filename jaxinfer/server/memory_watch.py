"""Whether memory keeps rising at equal load: a leak, told apart from noise, steps and warm-up.

Pure: samples and their times are arguments. How it decides:

    samples -> by load: idle, 1, 2-3, 4-7 ...        only like is compared with like
            -> the lowest of each tenth of a window   what falls back (sawtooth, garbage) is gone;
                                                      tenths differ, lest a sawtooth keep step
            -> eleven such lows, nearly all in order  noise and steps are not (Kendall's tau)
               and the last above the first by min_rise_bytes a window, of which two thirds
               are left without the three largest steps

What comes before the end of the first window is warm-up and ignored. A load, or a filling of the
KV pool, that was never seen before may use memory for the first time: all begins again after it. A
sawtooth that takes more than a window for a tooth looks like a leak until it falls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

SLOTS = 10  # of a window
MIDDLES = 1 - 2 / SLOTS  # of a window, between the middles of its first and its last three lows
GOLDEN = (5**0.5 - 1) / 2  # whose multiples keep no step with anything
MAX_FALLS = 3  # pairs of 55 that may be in falling order
MAX_NOT_RISING = 6  # that may be falling or equal
MAX_STEPS = 3  # of an allocator, in a window: what comes in so few steps is no leak
PARTS = 8  # a load by a part higher than any before is new; so is another part of the pool


@dataclass(frozen=True, slots=True)
class MemorySample:
    now_s: float
    resident_bytes: int
    load: int  # sequences that run or wait; 0: idle
    fill: float  # share of the KV pool that has content
    census: Mapping[str, int]  # what could grow -> how many there are


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that rose and did not fall back."""

    rise_bytes: int
    seconds: float  # in which it rose
    load: str  # at which, for people
    low_bytes: int  # from which
    grown: Mapping[str, tuple[int, int]]  # what of the census rose with it: from, to


class MemoryWatch:
    """Takes samples in the order of time; `alarm` is set while memory keeps rising.

    A leak of twice `min_rise_bytes` a window is found within 1.5 windows of its begin, or of the
    end of the warm-up. The alarm ends when half of the rise has fallen back, or when nothing has
    risen for a window.

    Args:
        window_s: over which memory must rise.
        min_rise_bytes: by which it must rise in a window.
    """

    def __init__(self, *, window_s: float, min_rise_bytes: int):
        self._window_s = window_s
        self._min_rise_bytes = min_rise_bytes
        self._start_s: float | None = None
        self._slot = 0
        self._highest_load = 0
        self._highest_fill = 0  # in parts
        self._lows: dict[int, MemorySample] = {}  # band -> of the current slot
        self._history: dict[int, deque[MemorySample]] = {}  # band -> of the slots before
        self._last_rise_s = 0.0
        self.alarm: Growth | None = None

    def take(self, sample: MemorySample) -> bool:
        """Returns: whether the alarm began or ended."""
        if self._start_s is None:
            self._start_s = sample.now_s
        elapsed = sample.now_s - self._start_s
        self._note_highest(sample)
        if elapsed < self._window_s:
            return False
        slot = slot_at(elapsed / self._window_s * SLOTS)
        was = self.alarm
        if slot != self._slot:
            self._close_slot(sample.now_s)
            self._slot = slot
        band = sample.load.bit_length()
        low = self._lows.get(band)
        if low is None or sample.resident_bytes < low.resident_bytes:
            self._lows[band] = sample
        return (was is None) != (self.alarm is None)

    def _note_highest(self, sample: MemorySample) -> None:
        load, fill = sample.load, int(sample.fill * PARTS)
        is_new = load > self._highest_load * (1 + 1 / PARTS) or fill > self._highest_fill
        if is_new:
            self._highest_load = max(load, self._highest_load)
            self._highest_fill = max(fill, self._highest_fill)
            self._lows.clear()
            self._history.clear()

    def _close_slot(self, now_s: float) -> None:
        for band, low in self._lows.items():
            lows = self._history.setdefault(band, deque(maxlen=SLOTS + 1))
            lows.append(low)
            growth = self._growth(lows)
            if growth is not None:
                self._last_rise_s = now_s
                self.alarm = self.alarm or growth
            elif self.alarm is not None and self._has_fallen(low, self.alarm, band):
                self.alarm = None
        self._lows.clear()
        if self.alarm is not None and now_s - self._last_rise_s >= self._window_s:
            self.alarm = None

    def _growth(self, lows: Sequence[MemorySample]) -> Growth | None:
        sizes = [low.resident_bytes for low in lows]
        if len(lows) <= SLOTS or not is_rising(sizes):
            return None
        first, last = lows[0], lows[-1]
        seconds = last.now_s - first.now_s
        rise = median(sizes[-3:]) - median(sizes[:3])
        needed = self._min_rise_bytes * max(seconds / self._window_s, 1.0)
        if rise < needed * MIDDLES or _without_steps(sizes) < needed * 2 / 3:
            return None
        return Growth(
            rise_bytes=last.resident_bytes - first.resident_bytes,
            seconds=seconds,
            load=_words(first.load.bit_length()),
            low_bytes=first.resident_bytes,
            grown=_grown(lows),
        )

    def _has_fallen(self, low: MemorySample, alarm: Growth, band: int) -> bool:
        is_like = _words(band) == alarm.load
        return is_like and low.resident_bytes < alarm.low_bytes + alarm.rise_bytes / 2


def slot_at(time: float) -> int:
    """The slot that holds a time in mean slots; they last 0.5 to 1.5 of them, in no regular
    order.
    """
    whole = int(time)
    return whole if time - whole >= whole * GOLDEN % 1.0 / 2 else whole - 1


def is_rising(values: Sequence[float]) -> bool:
    """Whether nearly every later value is above nearly every earlier one."""
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    falls = sum(b < a for a, b in pairs)
    return falls <= MAX_FALLS and falls + sum(a == b for a, b in pairs) <= MAX_NOT_RISING


def _without_steps(sizes: Sequence[int]) -> int:
    """The rise less its largest steps."""
    steps = sorted(b - a for a, b in pairwise(sizes))
    return sum(steps[:-MAX_STEPS])


def _grown(lows: Sequence[MemorySample]) -> dict[str, tuple[int, int]]:
    """What of the census is higher than at first, and fell hardly ever; most growth first."""
    found: dict[str, tuple[int, int]] = {}
    for name in lows[0].census.keys() & lows[-1].census.keys():
        counts = [low.census.get(name, 0) for low in lows]
        falls = sum(b < a for a, b in pairwise(counts))
        if counts[-1] > counts[0] and falls <= 1:
            found[name] = counts[0], counts[-1]
    return dict(sorted(found.items(), key=lambda item: -item[1][1] / max(item[1][0], 1)))


def _words(band: int) -> str:
    """A band of loads, for people."""
    if band < 2:
        return ("while idle", "with 1 sequence")[band]
    return f"with {1 << (band - 1)} to {(1 << band) - 1} sequences"
