"""The command line and the table of formats, and one run on a tiny model."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.quantization.command import HEAD, Settings, cells, main, parse, report
from bench.quantization.rows import SPEEDS, Row, Table
from bench.quantization.variants import Variant, variants_of
from bench.workloads import WORKLOADS, Concurrent, Decode, Prefill
from checkpoints.certificate import Perplexity
from jaxinfer.quantization.measuring import Measuring
from tests.tiny import tiny_engine_config, write_checkpoint


def one(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "name": "int8 on the fly",
        "format": "int8",
        "bits_per_weight": 8.0625,
        "perplexity": Perplexity(20.0, 19.0, 21.0),
        "kl": 0.0027,
        "kl_p99": 0.02,
        "perplexity_change": Perplexity(0.001, -0.0005, 0.0025),
        "agreement": 0.9912,
        "num_tokens": 10_100,
        "weights_bytes": 135 << 20,
        "tokens_per_s": {"decode": 30.0, "conc8": 170.4, "conc32": 260.0, "prefill": 1200.0},
    }
    return Row(**fields | changes)


def settings(**changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "engine": {},
        "variants": variants_of("m", {}),
        "measuring": Measuring(),
        "workloads": {},
        "num_reps": 1,
        "out": None,
        "as_json": False,
    }
    return Settings(**fields | changes)


def test_without_flags_all_formats_of_the_default_model_are_measured():
    parsed = parse([])
    names = [variant.name for variant in parsed.variants]
    assert names == ["none", "int8 on the fly", "int4 on the fly", "none, KV int8"]
    assert {variant.model for variant in parsed.variants} == {"smollm2-135m-instruct"}
    assert parsed.workloads == {name: WORKLOADS[name] for name in SPEEDS}
    assert parsed.measuring == Measuring(show_progress=False)
    assert "quantization" not in parsed.engine


def test_every_flag_arrives():
    words = (
        "--model m --also best=folder --also b=c --held-out h --least-tokens 5 --no-speed --reps 2 "
        "--out o --json --max-num-seqs 8"
    )
    parsed = parse(words.split())
    assert parsed.variants[-2:] == (
        Variant("best", "folder", is_made=True),
        Variant("b", "c", is_made=True),
    )
    assert parsed.measuring == Measuring(Path("h"), 5, show_progress=False)
    assert (parsed.workloads, parsed.num_reps, parsed.out) == ({}, 2, Path("o"))
    assert parsed.as_json
    assert parsed.engine["max_num_seqs"] == 8


def test_some_formats_are_measured_and_always_the_original():
    parsed = parse(["--only", "int4 on the fly; none, KV int8"])
    names = [variant.name for variant in parsed.variants]
    assert names == ["none", "int4 on the fly", "none, KV int8"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "int2"], "got 'int2'"),
        (["--also", "folder"], "expected NAME=PATH"),
        (["--also", "=folder"], "expected NAME=PATH"),
    ],
)
def test_a_bad_command_line_is_told(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_each_format_is_served_whatever_it_costs():
    plain, int8, _, kv, other = variants_of("m", {"best": "folder"})
    common = {"max_num_seqs": 8}
    assert plain.engine_fields(common) == {
        "max_num_seqs": 8,
        "model": "m",
        "max_kl": math.inf,
        "quantization": "none",
    }
    assert int8.engine_fields({})["quantization"] == "int8"
    assert kv.engine_fields({})["kv_cache_dtype"] == "int8"
    assert kv.engine_fields({})["quantization"] == "none"
    assert other.engine_fields({}) == {"model": "folder", "max_kl": math.inf}


def test_a_line_of_the_table_has_a_cell_for_each_column():
    found = cells(one())
    assert len(found) == len(HEAD)
    assert found == [
        "int8 on the fly (int8)",
        "8.06",
        "0.0027",
        "20.00 (19.00 to 21.00)",
        "+0.10 % (-0.05 to +0.25)",
        "99.12 %",
        "30",
        "170",
        "260",
        "1,200",
        "135",
    ]
    assert cells(one(tokens_per_s={}, weights_bytes=0))[-5:] == ["-"] * 5


def test_the_table_is_markdown_and_json_lines_hold_every_figure(tmp_path: Path):
    out, file = io.StringIO(), tmp_path / "a.jsonl"
    assert report(settings(out=file), [one()], out) == 0
    lines = out.getvalue().splitlines()
    assert {line.count("|") for line in lines[2:]} == {len(HEAD) + 1}
    found = json.loads(file.read_text("utf-8"))
    assert found["perplexity"] == {"value": 20.0, "low": 19.0, "high": 21.0}
    assert found["tokens_per_s"]["conc8"] == 170.4
    assert (found["model"], found["measure"]) == ("m", "quantization")
    assert {"jax", "cpu", "cores"} <= found.keys()


def test_a_measure_that_failed_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]):
    assert report(settings(as_json=True), [one(failures={"prefill": "too long"})], io.StringIO())
    assert "prefill failed: too long" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_every_format_of_a_tiny_model_has_its_figures(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model")
    config = tiny_engine_config(model, tmp_path / "cache")
    engine = {
        "cache_dir": config.cache_dir,
        "page_size": 16,
        "kv_cache_bytes": config.cache.kv_cache_bytes,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "show_progress": False,
    }
    workloads = {
        "decode": Decode(8, 60),
        "conc8": Concurrent(4, 20, 6),
        "conc32": Concurrent(12, 20, 6),
        "prefill": Prefill(200),
    }
    asked = Measuring(least_tokens=200, show_progress=False)
    table = Table(engine, asked, workloads, num_reps=1)
    rows = list(table.rows(variants_of(str(model), {"again": str(model)})))
    plain, int8, int4, kv, again = rows
    assert plain.kl == 0.0 == again.kl
    assert 0 < int8.kl < int4.kl
    assert 0 < kv.kl < int4.kl
    assert plain.bits_per_weight == 32 > 10 > int8.bits_per_weight > int4.bits_per_weight
    assert int8.weights_bytes < plain.weights_bytes / 3
    for row in rows:
        assert row.failures == {}
        assert set(row.tokens_per_s) == set(SPEEDS)
        assert min(row.tokens_per_s.values()) > 0
