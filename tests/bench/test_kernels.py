"""Costs by hand; timing by a clock that ticks; checks that can fail; the command line on a CPU."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernels import command, costs, suite, timing
from bench.kernels.attention_world import exact, gathered, make_world
from bench.kernels.case import Check, Form, Operands
from bench.kernels.checking import check
from bench.kernels.command import main
from bench.kernels.costs import A100, H200, Card, Cost
from bench.kernels.sizes import SEVEN_B, SMALL
from bench.kernels.table import floor_lines, timed_header, timed_line
from pallas_kernels.backend import Backend

INTERPRET = Backend("interpret")


def test_bytes_and_operations_of_products():
    assert costs.matmul_cost(1, 4, 8) == Cost(2 * 32 + 2 * 12, 2 * 32)
    assert costs.matmul_cost(3, 4, 8, weight_bits=8, group=4) == Cost(32 + 4 * 8 + 2 * 36, 192)
    assert costs.matmul_cost(1, 4, 8, weight_bits=4, group=2) == Cost(16 + 4 * 16 + 2 * 12, 64)
    of_experts = costs.expert_cost(5, 3, 4, 8, weight_bits=4, group=2)
    assert of_experts == Cost(3 * (16 + 4 * 16) + 2 * 5 * 12, 5 * 64)
    assert costs.w8a8_cost(2, 4, 8) == Cost(8 + 32 + 4 * 10 + 2 * 16, 128, "int8")


def test_bytes_and_operations_of_attention():
    """Two rows of 3 and 5 tokens in pages of 4, of 4 heads of 2 over 1 KV head."""
    heads = (4, 1, 2)
    bf16 = costs.decode_cost([3, 5], *heads, page_size=4, is_int8=False)
    ends = 2 * 2 * 2 * 8 + 4 * (3 + 2)
    assert bf16 == Cost(8 * 8 + ends, 4 * 4 * 2 * 8)
    int8 = costs.decode_cost([3, 5], *heads, page_size=4, is_int8=True)
    assert int8.num_bytes == 8 * 2 * (2 + 4) + ends
    chunk = costs.prefill_cost([(2, 3)], *heads, page_size=4, is_int8=False)
    assert chunk.num_ops == 4 * 4 * 2 * (3 + 4 + 5)
    assert chunk.num_bytes == 5 * 8 + 2 * 2 * 3 * 8 + 4 * (2 + 1)


def test_a_chunk_of_one_token_costs_what_a_decode_row_does():
    chunk = costs.prefill_cost([(99, 1)], 8, 2, 64, page_size=16, is_int8=True)
    assert chunk == costs.decode_cost([100], 8, 2, 64, page_size=16, is_int8=True)


def test_bytes_of_rows_and_of_kv_writes():
    assert costs.rms_norm_cost(3, 8) == Cost(2 * 8 * 7)
    assert costs.row_sum_cost(3, 8) == Cost(4 * 27)
    assert costs.kv_write_cost(3, 2, 4, is_int8=False) == Cost(3 * (32 + 32 + 8))
    assert costs.kv_write_cost(3, 2, 4, is_int8=True) == Cost(3 * (32 + 2 * 2 * 8 + 8))


def test_the_floor_is_the_slower_of_bytes_and_operations():
    card = Card("card", bytes_per_s=10.0, bf16_ops_per_s=100.0, int8_ops_per_s=200.0)
    assert card.floor_s(Cost(30, 100)) == 3.0
    assert card.floor_s(Cost(30, 800)) == 8.0
    assert card.floor_s(Cost(30, 800, "int8")) == 4.0


def case_named(pattern: str) -> Any:
    (case,) = suite.cases(SMALL, re.compile(pattern))
    return case


@pytest.mark.parametrize("pattern", ["^rms_norm, 8 x", "^kv_write int8, 8 rows"])
def test_seconds_are_of_one_launch(pattern: str, monkeypatch: pytest.MonkeyPatch):
    """Of 5 copies, by a clock on which every repetition takes a second."""
    case = case_named(pattern)
    size = sum(x.nbytes for part in case.operands(0) for x in part)
    monkeypatch.setattr(timing, "SPREAD_BYTES", 5 * size)
    ticks = itertools.count()
    form = case.forms(INTERPRET)["exact"]
    assert timing.time_form(case, form, 3, lambda: float(next(ticks))) == 1 / 5


def test_copies_are_larger_than_a_cache_but_not_too_many():
    spread = timing.SPREAD_BYTES
    for size, wanted in ((8, timing.MOST_COPIES), (spread // 5, 6), (2 * spread, 2)):
        read: Any = (np.broadcast_to(np.int8(0), size),)
        assert timing.num_copies(Operands((), read)) == wanted


def test_a_card_is_measured_by_a_copy_and_a_product():
    ticks = itertools.count()
    card = timing.measure_card("card", 3, size=64, clock=lambda: float(next(ticks)))
    launch = 1 / timing.LEAST_COPIES  # a second per program
    assert card.bytes_per_s == 2 * 4 * 64**2 / launch
    assert (card.bf16_ops_per_s, card.int8_ops_per_s) == (2 * 64**3 / launch, 4 * 64**3 / launch)


def test_plain_attention_is_attention():
    """What the kernels are compared with is right itself."""
    world = make_world(SMALL, 3, 40, 0, is_int8=True)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 4, 64)), jnp.bfloat16)
    positions = np.array([0, 20, 39], np.int32)
    pages = (world.k_pages, world.v_pages, world.page_table)
    places = jnp.asarray(positions[:, None])
    got = jax.jit(gathered)(q, *pages, places, *world.scales)[:, 0]
    want = exact(q[:, 0], world, np.arange(3), positions)
    assert np.abs(np.asarray(got, np.float64) - want).max() < 5e-3 * np.abs(want).max()


def numbers(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.float32)


def test_a_check_finds_rows_that_depend_on_the_number_of_rows():
    def rows(number: int) -> np.ndarray:
        return numbers(number) + np.float32(1e-3 * (number == 2))

    found = check(Check("sum", rows, lambda: numbers(4), bound=1e-6), (1, 2, 3, 4))
    assert (found.relative_error, found.differing, found.is_good) == (0, (2,), False)
    assert check(Check("sum", numbers, lambda: numbers(4), bound=0.0), (1, 4)).is_good


@pytest.mark.parametrize("wrong", [1.0, np.nan])
def test_a_check_finds_wrong_numbers(wrong: float):
    found = check(Check("sum", numbers, lambda: numbers(4) + wrong, bound=1e-2), (1, 4))
    assert not found.is_good


def test_a_line_has_the_floor_its_share_and_every_form():
    case = case_named("^rms_norm, 8 x")
    card = Card("card", case.cost.num_bytes / 5e-6, 1e12, 2e12)
    line = timed_line(case, card, {"exact": 10e-6, "XLA": 20e-6, "JAX": None})
    assert line.split()[-7:] == ["5.0", "10.0", "50%", "-", "20.0", "failed", "-"]
    header = list(timed_header(card, 2e-6))[-1]
    assert header.split() == ["us", "floor", "exact", "%", "fast", "XLA", "JAX", "torch"]


def test_no_line_is_wider_than_100_columns():
    cases = list(suite.cases(SEVEN_B, re.compile("")))
    times = {"exact": 12345.6e-6, "fast": 12345.6e-6, "XLA": 99999.9e-6, "JAX": None, "torch": 1e-6}
    lines = [*floor_lines(cases, (H200, A100)), *timed_header(H200, 2e-6)]
    lines += [timed_line(case, H200, times) for case in cases]
    assert max(map(len, lines)) <= 100
    assert len({case.name for case in cases}) == len(cases)


def test_without_a_gpu_floors_are_printed_and_nothing_is_timed(capsys: pytest.CaptureFixture[str]):
    assert main(["--cases", "rms_norm, 2048"]) == 0
    text = capsys.readouterr().out
    assert "Nothing was timed" in text
    assert text.splitlines()[-1].split()[-2:] == ["7.0", "16.5"]  # 33.6 MB
    assert main(["--cases", "rms_norm, 2048", "--format", "json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["time_us"] is None
    assert line["floor_us"]["H200"] == pytest.approx(2 * 4096 * 4097 / 4.8e6)


def test_checks_run_on_a_cpu(capsys: pytest.CaptureFixture[str]):
    flags = ["--check", "--small", "--backend", "interpret", "--cases", "rms_norm"]
    assert main([*flags, "--format", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in lines] == ["rms_norm"]
    assert all(line["is_good"] and line["differing"] == [] for line in lines)
    assert all(0 < line["relative_error"] <= line["bound"] for line in lines)


@pytest.mark.slow
def test_all_checks_are_good_on_a_cpu():
    assert main(["--check", "--small", "--backend", "interpret"]) == 0


def test_a_form_that_fails_is_shown_as_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> Any:
        raise RuntimeError("does not fit")

    monkeypatch.setattr(command, "measure_card", lambda *_: H200)
    monkeypatch.setattr(command, "launch_s", lambda _: 2e-6)
    monkeypatch.setattr(command, "time_form", lambda case, form, _: form.run())
    case = case_named("^row_sum, 1 x")
    forms = {"exact": Form(lambda: 1e-6), "XLA": Form(fail)}
    object.__setattr__(case, "forms", lambda backend: forms)
    context = {"device": "card"}
    assert command._times([case], INTERPRET, 1, context, as_json=False) == 0
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "row_sum, 1 x 1000, XLA: does not fit" in shown.err
    forms["exact"] = Form(fail)
    assert command._times([case], INTERPRET, 1, context, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["time_us"] == {"exact": None, "XLA": None}


def test_pallas_without_a_gpu_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert main(["--backend", "pallas"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_pattern_that_is_none_ends_the_program(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--cases", "("])
    assert "expected a regular expression" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [["--check"], ["--repeat", "2"]])
def test_all_is_good_and_timed_on_a_gpu(flags: list[str]):
    assert main(["--small", *flags]) == 0
