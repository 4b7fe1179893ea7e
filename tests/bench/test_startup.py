"""Real starts of a tiny model, cold and warm, and a start that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import results
from bench.startup import Starts, main, parse
from bench.table import METRICS
from tests.tiny import write_checkpoint
from tests.tiny_llm import SMALL

FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}".replace("_", "-"), value)]
WORDS = [*map(str, FLAGS), "--kv-cache-memory", "1MiB"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "QUIET", 99.0)  # no start is repeated because of others
    return write_checkpoint(tmp_path / "model")


def test_flags_that_are_not_known_go_to_the_server(model: Path):
    settings, starts = parse(["--model", str(model), "--reps", "3", *WORDS, "--json"])
    assert starts == Starts(str(model), tuple(WORDS), 1, 3)
    assert settings.engine == {"model": str(model), "flags": " ".join(WORDS)}
    assert (settings.num_reps, settings.as_json) == (3, True)


def test_a_cold_start_compiles_and_a_warm_one_loads(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["--model", str(model), "--reps", "1", "--json", *WORDS]) == 0
    cold, warm = map(json.loads, capsys.readouterr().out.splitlines())
    assert [cold["measure"], warm["measure"]] == ["cold", "warm"]
    counts = [(x["num_loaded"]["median"], x["num_compiled"]["median"]) for x in (cold, warm)]
    assert counts == [(0, 11), (11, 0)]
    assert cold["cache_bytes"] == warm["cache_bytes"]
    assert cold["cache_bytes"]["median"] > 100_000
    for taken in (cold, warm):
        figures = {name: taken[name]["median"] for name in METRICS if name in taken}
        assert {"import_s", "find_model_s", "load_weights_s", "compile_s"} <= figures.keys()
        assert figures["import_s"] > 0
        assert figures["import_jax_s"] > 0
        assert figures["ready_s"] > figures["compile_s"] > 0
        if sys.platform == "linux":
            assert figures["ready_cpu_s"] > 0
            assert figures["peak_bytes"] > 50 << 20
    assert warm["compile_s"]["median"] < cold["compile_s"]["median"]


def test_a_start_that_fails_says_what_the_server_said(
    model: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--model", str(model), "--reps", "1", "--page-size", "7"]) == 1
    assert capsys.readouterr().out.count("failed: error: page_size must divide") == 2


def test_a_model_that_is_not_there_is_an_error_and_no_measure(capsys: pytest.CaptureFixture[str]):
    assert main(["--model", "nowhere.gguf"]) == 1
    assert "nowhere.gguf" in capsys.readouterr().err
