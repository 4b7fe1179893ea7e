"""The command, with a laboratory that compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench import aot_report
from bench.aot.cases import Case, cases
from bench.aot.facts import Facts
from bench.aot.programs import FORMATS
from bench.aot.targets import A100, TARGETS
from bench.aot.toolchain import Toolchain, ToolError
from bench.aot_report import Report, main, parse
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.program_memory import ProgramMemory
from tests.bench.aot.test_facts import MATMUL, FakeTools, examined

GIB = 1 << 30


def never(*args: Any) -> Any:
    raise AssertionError("nothing is lowered here")


class FakeLaboratory:
    """Everything is the recorded kernel, and needs a GiB."""

    target = A100

    def __init__(self):
        self.examined: list[str] = []
        self.compiler = SimpleNamespace(target=A100, lower=never, case=self._case)

    def _case(self, case: Case) -> Program:
        return Program(case.name, never)

    def examine_all(self, programs: Sequence[Program]) -> Iterator[Facts]:
        for program in programs:
            self.examined.append(program.name)
            facts = examined(FakeTools(), MATMUL)
            memory = ProgramMemory(GIB, 0, 0, 0)
            yield dataclasses.replace(facts, name=program.name, memory=memory)


def lines(*argv: str) -> tuple[list[str], FakeLaboratory]:
    laboratory: Any = FakeLaboratory()
    report = Report(laboratory, parse(["--layers", "2", *argv]))
    return list(report.lines()), laboratory


def test_without_flags_it_is_all_of_a_model_of_32_layers_on_every_target():
    settings = parse([])
    assert (settings.target, settings.format, settings.layers) == ("all", "table", 32)
    assert settings.only.search("anything")


@pytest.mark.parametrize("argv", [["--target", "h100"], ["--layers", "0"], ["--format", "csv"]])
def test_a_bad_command_line_ends_the_process(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2


def test_a_bad_expression_ends_the_process():
    with pytest.raises(SystemExit):
        parse(["--only", "("])


def test_every_case_every_step_and_each_sampler_is_looked_at_once():
    _, laboratory = lines()
    names = laboratory.examined
    assert len(names) == len(set(names))
    assert {case.name for case in cases()} < set(names)
    steps = {f"{w} {kind}" for w in FORMATS for kind in ("prefill", "decode")}
    assert {" ".join(name.split()[:2]) for name in names if name.endswith(" step")} == steps
    assert sum(name.startswith("sample ") for name in names) == 4


def test_the_table_ends_with_what_is_left_on_each_card():
    found, _ = lines()
    assert found[0].startswith("NVIDIA A100 (sm_80)")
    rows = [line.split() for line in found if re.match(r"\d+ GB", line)]
    assert [(row[0], row[2]) for row in rows] == [
        (c, w) for w in FORMATS for c in ("24", "40", "80")
    ]
    programs = {float(row[4]) for row in rows}
    assert all(2.0 <= size < 2.1 for size in programs)  # two steps in flight, a GiB each
    bf16, int8, int4 = (float(rows[i][3]) for i in (0, 3, 6))
    assert bf16 > int8 > int4


def test_json_is_an_object_a_line():
    found = [json.loads(line) for line in lines("--format", "json")[0]]
    programs = [each for each in found if "program" in each]
    assert {each["target"] for each in programs} == {"a100"}
    rooms = [each for each in found if "kv_bytes" in each]
    assert len(programs) + len(rooms) == len(found)
    assert len(rooms) == 15


def test_only_some_programs_are_looked_at_and_then_nothing_is_added_up():
    found, laboratory = lines("--only", "^bf16 decode")
    assert laboratory.examined == ["bf16 decode rows=64 step"]
    assert not any("GB" in line for line in found)


def test_absent_tools_are_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def find() -> Toolchain:
        raise ToolError("nvidia-cuda-nvcc must be installed")

    monkeypatch.setattr(Toolchain, "find", find)
    monkeypatch.setattr(aot_report, "prepare_environment", lambda: None)
    assert main(["--target", next(iter(TARGETS))]) == 1
    assert capsys.readouterr().err == "error: nvidia-cuda-nvcc must be installed\n"
