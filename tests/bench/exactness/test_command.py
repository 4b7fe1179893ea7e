"""The command line, the report, and one run on a tiny model from end to end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.exactness.command import Report, Settings, main, parse, run
from bench.exactness.tally import Tally
from bench.table import WIDTH
from tests.tiny import write_checkpoint
from tests.tiny_llm import shared_cache


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"engine": {"model": "m"}, "num_probes": 6, "seed": 0, "num_reps": 3}
    values |= {"out": None, "as_json": False}
    return Settings(**values | changes)


def test_without_flags_it_is_the_default_model_as_it_is_served():
    assert parse([]) == settings(
        engine={
            "model": "smollm2-135m-instruct",
            "max_num_batched_tokens": 512,
            "max_num_seqs": 32,
            "kv_cache_dtype": "auto",
            "quantization": "auto",
            "kernel_backend": "auto",
            "batch_invariant": True,
        }
    )
    assert parse([]).config.scheduler.max_num_seqs == 32


def test_every_flag_arrives():
    words = "--model folder --cases 9 --seed 4 --reps 5 --out a.jsonl --json --max-num-seqs 8"
    limits = "--max-num-batched-tokens 256 --kv-cache-memory 512MiB --cache-dir there"
    kernels = "--kernel-backend interpret --no-batch-invariant"
    parsed = parse([*words.split(), *limits.split(), *kernels.split()])
    assert parsed == Settings(
        engine={
            "model": "folder",
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "kv_cache_bytes": 512 << 20,
            "kv_cache_dtype": "auto",
            "quantization": "auto",
            "kernel_backend": "interpret",
            "batch_invariant": False,
            "cache_dir": "there",
        },
        num_probes=9,
        seed=4,
        num_reps=5,
        out=Path("a.jsonl"),
        as_json=True,
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [("--cases 0", "--cases"), ("--seed x", "--seed"), ("--quick", "unrecognized")],
)
def test_a_bad_flag_ends_with_code_2(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def said(*found: Tally, **changes: Any) -> tuple[int, list[str]]:
    out, chosen = io.StringIO(), settings(**changes)
    code = run(chosen, iter(found), Report(chosen, out))
    return code, out.getvalue().splitlines()


def test_a_report_is_a_table_with_its_sum():
    code, lines = said(Tally("cold", 4), Tally("warm", 3))
    assert code == 0
    assert lines[0].startswith("m; jaxinfer")
    assert lines[3].split() == ["circumstance", "cases", "differences", "not", "met", "wall", "s"]
    assert [line.split()[:4] for line in lines[4:]] == [
        ["cold", "4", "0", "0"],
        ["warm", "3", "0", "0"],
        ["all", "7", "0", "0"],
    ]


@pytest.mark.parametrize("counts", [(3, 1, 0), (3, 0, 1)])
def test_a_case_that_differs_or_was_not_met_makes_the_exit_code_1(counts: tuple[int, int, int]):
    code, _ = said(Tally("cold", 4), Tally("warm", *counts))
    assert code == 1


def test_json_has_nothing_but_lines_and_is_appended_to_the_file(tmp_path: Path):
    path = tmp_path / "figures.jsonl"
    path.write_text('{"measure": "earlier"}\n')
    _, lines = said(Tally("cold", 4), as_json=True, out=path)
    assert [json.loads(line)["circumstance"] for line in lines] == ["cold"]
    assert [json.loads(line)["measure"] for line in path.read_text().splitlines()] == [
        "earlier",
        "exactness",
    ]


def test_a_tiny_model_from_end_to_end(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
):
    model = write_checkpoint(tmp_path / "model")
    out = tmp_path / "out.jsonl"
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--kv-cache-memory", "2MiB"]
    places = ["--cache-dir", str(shared_cache(tmp_path_factory)), "--out", str(out)]
    code = main(["--model", str(model), "--cases", "2", "--reps", "1", *limits, *places])
    text = capsys.readouterr().out
    assert code == 0, text
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["measure"] for line in found} == {"exactness", "cost"}
    counts = {line["circumstance"]: line["num_cases"] for line in found if "num_cases" in line}
    assert counts["every row of 8"] == 16
    assert counts["after a restart"] == 2
    assert "decode step of exactly 1 row, ms" in text
    assert "rows: a step of 8 rows" in text
    assert max(map(len, text.splitlines()[3:])) <= WIDTH


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", str(tmp_path / "none")]) == 1
    assert "error:" in capsys.readouterr().err
