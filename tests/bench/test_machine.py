"""Readings of the machine, from files of /proc written by hand and from the real one."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer
from bench.machine import (
    PROC,
    Reading,
    Span,
    busy_seconds,
    cpu_model,
    cpu_seconds,
    describe,
    device_peak_bytes,
    num_cores,
    peak_memory_bytes,
    read_clocks,
)

NEEDS_PROC = pytest.mark.skipif(not PROC.is_dir(), reason="needs Linux's /proc")


def test_busy_time_is_all_but_idle_and_waiting_for_disks(tmp_path: Path):
    #                      user nice system idle iowait irq softirq steal guest guest_nice
    (tmp_path / "stat").write_text(
        "cpu  100 20 30 5000 700 4 5 6 90 80\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    )
    assert busy_seconds(tmp_path) == pytest.approx(165 / os.sysconf("SC_CLK_TCK"))


def test_without_proc_nothing_is_made_up(tmp_path: Path):
    assert busy_seconds(tmp_path) is None
    assert peak_memory_bytes(tmp_path) is None
    assert cpu_seconds(tmp_path) is None


def test_cpu_time_is_own_and_childrens_whatever_the_name(tmp_path: Path):
    before = "7 (a) S (b 1 2) S " + " ".join(["9"] * 10)
    (tmp_path / "stat").write_text(f"{before} 100 20 3 4 20 0 1 0 99")
    assert cpu_seconds(tmp_path) == pytest.approx(127 / os.sysconf("SC_CLK_TCK"))


@NEEDS_PROC
def test_cpu_time_of_this_process_is_what_python_says():
    told = cpu_seconds()
    assert told is not None
    assert abs(told - time.process_time()) < 5 + time.process_time() / 2


def test_the_peak_is_that_of_this_process(tmp_path: Path):
    (tmp_path / "status").write_text("VmPeak:\t 9000 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 7 kB\n")
    assert peak_memory_bytes(tmp_path) == 2 << 20


def test_a_status_without_a_peak_is_none(tmp_path: Path):
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert peak_memory_bytes(tmp_path) is None


def test_others_are_what_was_busy_and_not_ours():
    span = Span.between(Reading(10.0, 5.0, 1000.0), Reading(14.0, 11.0, 1007.0))
    assert span == Span(wall_s=4.0, cpu_s=6.0, others=0.25)


def test_others_are_never_negative():
    """The machine's clock ticks a hundred times a second, ours a billion times."""
    assert Span.between(Reading(0.0, 0.0, 0.0), Reading(1.0, 1.007, 1.0)).others == 0.0


@pytest.mark.parametrize("end", [Reading(1.0, 1.0, None), Reading(0.0, 0.0, 0.0)])
def test_others_of_an_unread_machine_or_of_no_time_are_none(end: Reading):
    assert Span.between(Reading(0.0, 0.0, 0.0), end).others is None


def test_the_clocks_see_our_own_work():
    start = read_clocks()
    while read_clocks().own_s < start.own_s + 0.02:
        pass
    span = Span.between(start, read_clocks())
    assert span.wall_s > 0
    assert span.cpu_s >= 0.02


@NEEDS_PROC
def test_the_real_files_are_read():
    ballast = np.ones(8 << 20, np.uint8)
    peak, busy = peak_memory_bytes(), busy_seconds(PROC)
    resident = int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert peak is not None
    assert resident - (1 << 20) <= peak < 1 << 40  # the kernel counts in batches of pages
    assert peak > ballast.nbytes
    assert busy is not None
    assert busy > time.process_time()


def test_the_processor_is_named(tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2GHz\n"
    )
    assert cpu_model(tmp_path) == "Some CPU @ 2GHz"


def test_a_processor_without_a_name_is_its_architecture(tmp_path: Path):
    assert cpu_model(tmp_path / "nothing") == platform.machine()
    (tmp_path / "cpuinfo").write_text("CPU implementer\t: 0x41\n")
    assert cpu_model(tmp_path) == platform.machine()


def test_what_a_figure_depends_on_is_described():
    about = describe()
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    assert about["jax"] == jax.__version__
    assert about["jaxinfer"] == jaxinfer.__version__
    assert about["device"] == jax.devices()[0].device_kind
    assert about["cores"] == num_cores() >= 1


def test_a_cpu_has_no_memory_of_its_own():
    if jax.default_backend() != "cpu":
        pytest.skip("JAX has another device here")
    assert device_peak_bytes() is None
