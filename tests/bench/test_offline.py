"""The command line, the report, and one run on a tiny model from end to end."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from bench import offline
from bench.offline import Settings, main, outcomes, parse, report
from bench.results import Failure, Outcome, Result, Statistic
from bench.workloads import WORKLOADS, Concurrent, Decode, Mixed, Prefill, Prefix
from tests.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
TINY = {
    "decode": Decode(8, 60),
    "prefill": Prefill(200),
    "conc8": Concurrent(4, 20, 6),
    "conc32": Concurrent(12, 20, 6),  # more than run together
    "mixed": Mixed(6, (4, 60), (2, 12)),
    "prefix": Prefix(128, 4, 4),
    "too long": Prefill(5000),
}


def one(measure: str = "load", seconds: float = 2.0) -> Result:
    value = Statistic(seconds, seconds, seconds)
    return Result(measure, "a title", {"load_s": value}, value, value, None, 1, 1)


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"engine": {"model": "m"}, "workloads": {}, "num_reps": 3}
    values |= {"out": None, "as_json": False}
    return Settings(**values | changes)


def test_without_flags_everything_is_measured_on_the_default_model():
    parsed = parse([])
    assert parsed.engine == {
        "model": "smollm2-135m-instruct",
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "kv_cache_dtype": "auto",
        "quantization": "auto",
        "kernel_backend": "auto",
        "batch_invariant": True,
    }
    assert parsed.workloads == WORKLOADS
    assert list(parsed.workloads) == ["decode", "prefill", "conc8", "conc32", "mixed", "prefix"]
    assert (parsed.num_reps, parsed.out, parsed.as_json) == (3, None, False)


def test_every_flag_arrives():
    words = "--model folder --only prefix,decode --reps 5 --out a.jsonl --json --max-num-seqs 8"
    limits = ["--max-num-batched-tokens", "256", "--kv-cache-memory", "512MiB"]
    limits += ["--quantization", "int8", "--kv-cache-dtype", "int8"]
    kernels = ["--kernel-backend", "interpret", "--no-batch-invariant"]
    parsed = parse([*words.split(), *limits, *kernels])
    assert parsed == Settings(
        engine={
            "model": "folder",
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "kv_cache_bytes": 512 << 20,
            "kv_cache_dtype": "int8",
            "quantization": "int8",
            "kernel_backend": "interpret",
            "batch_invariant": False,
        },
        workloads={name: WORKLOADS[name] for name in ("prefix", "decode")},
        num_reps=5,
        out=Path("a.jsonl"),
        as_json=True,
    )
    assert list(parsed.workloads) == ["prefix", "decode"]  # in the order asked for


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--only decode,speed", "expected some of decode,prefill"),
        ("--only ,", "got ''"),
        ("--reps 0", "--reps"),
        ("--kv-cache-memory lots", "--kv-cache-memory"),
        ("--max-num-seqs many", "--max-num-seqs"),
        ("--quick", "unrecognized"),
    ],
)
def test_a_bad_flag_ends_with_code_2_and_names_what_is_wrong(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def said(*taken: Outcome, **changes: Any) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = report(settings(**changes), iter(taken), out)
    return code, out.getvalue().splitlines()


def test_a_report_is_a_table():
    code, lines = said(one())
    assert code == 0
    assert lines[0].startswith("m; jaxinfer")
    assert [line.split()[0] for line in lines[5:7]] == ["load", "from"]
    assert lines[-1].startswith("others:")


def test_a_report_in_json_has_nothing_but_lines():
    code, lines = said(one(), one("memory"), as_json=True)
    assert code == 0
    assert [json.loads(line)["measure"] for line in lines] == ["load", "memory"]


def test_lines_are_appended_to_the_file_beside_the_table(tmp_path: Path):
    path = tmp_path / "figures.jsonl"
    path.write_text('{"measure": "earlier"}\n')
    _, table = said(one(), out=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["measure"] for line in lines] == ["earlier", "load"]
    assert lines[1]["model"] == "m"
    assert {"python", "jax", "jaxinfer", "device", "cores"} <= lines[1].keys()
    assert any(line.startswith("load") for line in table)


def test_a_failed_measure_makes_the_exit_code_1():
    assert said(one(), Failure("prefill", "a title", "too long"))[0] == 1


def test_a_line_is_there_before_the_next_measure_begins(tmp_path: Path):
    path = tmp_path / "figures.jsonl"

    def taking():
        yield one()
        assert len(path.read_text().splitlines()) == 1
        yield one()

    assert report(settings(out=path), taking(), io.StringIO()) == 0


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--model", str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ")
    assert "config.json" in errors[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]], Settings]:
    """Exit code and lines of a run on a tiny model."""
    folder = tmp_path_factory.mktemp("bench")
    tiny = settings(
        engine={
            "model": str(write_checkpoint(folder / "model")),
            "cache_dir": str(folder / "cache"),
            "page_size": 16,
            "kv_cache_bytes": 80 * 16 * 2 * 2 * 2 * 16 * 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        },
        workloads=TINY,
        num_reps=1,
        as_json=True,
    )
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where the process that only loads finds its module
        code = report(tiny, outcomes(tiny), out)
    return code, [json.loads(line) for line in out.getvalue().splitlines()], tiny


def test_every_measure_of_a_tiny_model_is_taken_in_order(run):
    _, lines, tiny = run
    assert [line["measure"] for line in lines] == [*TINY, "memory", "load"]
    assert all(line["model"] == tiny.model for line in lines)


MAY_BE_ZERO = {"others", "serving_compiles", "over_plan_bytes"}


def test_every_metric_has_a_median_between_least_and_most(run):
    for line in run[1]:
        for name, value in line.items():
            if isinstance(value, dict) and name not in MAY_BE_ZERO:
                assert 0 < value["min"] <= value["median"] <= value["max"], (line["measure"], name)


def test_only_the_measure_that_does_not_fit_fails(run):
    code, lines, _ = run
    assert code == 1
    failed = [line for line in lines if "error" in line]
    assert [line["measure"] for line in failed] == ["too long"]
    assert "640" in failed[0]["error"]


def test_the_memory_line_sets_the_plan_beside_the_peak(run):
    memory = {line["measure"]: line for line in run[1]}["memory"]
    kinds = ("process", "weights", "programs", "kv_pool")
    process, weights, programs, pool = (memory[f"{kind}_bytes"]["median"] for kind in kinds)
    peak, over = memory["peak_bytes"]["median"], memory["over_plan_bytes"]["median"]
    assert pool == 80 * 16 * 2 * 2 * 2 * 16 * 4
    assert weights > 50_000
    assert over == peak - pool - programs - weights - process
    assert memory["peak_over_plan"]["median"] == (peak - process) / (pool + programs + weights)
    assert memory["serving_compiles"]["max"] == 0


def test_nothing_but_the_public_api_is_used():
    """And serve.py's readers of flags, and what finds a model's file or says what is wrong.

    Folders of bench, and the commands that stand for one, look inside on purpose.
    """
    allowed = {
        "jaxinfer.config",
        "jaxinfer.server.flags",
        "checkpoints.errors",
        "checkpoints.resolve",
    }
    for path in sorted(Path(offline.__file__).parent.glob("*.py")):
        if path.name in ("aot_report.py", "tiny_model.py"):  # which writes a quantized checkpoint
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("jaxinfer.") for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module == "jaxinfer":
                assert {alias.name for alias in node.names} <= set(jaxinfer.__all__)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                is_ours = node.module.split(".")[0] in ("jaxinfer", "checkpoints")
                assert not is_ours or node.module in allowed, f"{path.name}: {node.module}"
            if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
                assert not node.attr.startswith("_"), f"{path.name}: {node.attr}"
