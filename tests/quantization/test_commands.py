"""The commands as a user types them, on a tiny model: quantize, compare, load what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.__main__ import compare_order_of, main, order_of, parse
from checkpoints.certificate import read_certificate
from checkpoints.checkpoint import open_checkpoint
from checkpoints.formats import HEAD_FORMAT, WeightFormat
from checkpoints.orbax import OrbaxSource
from checkpoints.safetensors import SafetensorsSource
from jaxinfer.errors import ConfigError
from jaxinfer.offline import LLM
from jaxinfer.quantization import certification
from jaxinfer.quantization.compare import check_vocabularies
from jaxinfer.quantization.compare_command import CompareOrder
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.recipe import Recipe
from jaxinfer.quantization.standard_prompts import STANDARD_PROMPTS
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache

QUICK = ["--least-tokens", "200", "--window", "32", "--answer-tokens", "2", "--no-progress"]

CHEAP = ["--method", "nearest", *QUICK]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


def test_without_flags_int8_with_a_scale_per_output_and_every_default():
    order = order_of(parse(["quantize", "m", "--out", "o"]))
    assert order.recipe == Recipe(WeightFormat(8), HEAD_FORMAT, "auto")
    assert order.measuring == Measuring()
    assert (order.calibration, order.max_length) == (None, None)
    assert order.measuring.least_tokens == 10_000


def test_every_flag_of_quantize_arrives():
    words = (
        "quantize m --out o --weights int4 --group-size 64 --asymmetric --head float "
        "--method gptq --no-channel-scaling --kv-keys --keep-8bit 0.1 --calibration c.jsonl "
        "--max-length 99 --held-out h.jsonl --least-tokens 7 --window 8 --seed 9 "
        "--answer-tokens 3 --no-progress"
    )
    order = order_of(parse(words.split()))
    weights = WeightFormat(4, 64, has_zero=True)
    assert order.recipe == Recipe(weights, None, "gptq", False, True, 0.1)
    assert (order.calibration, order.max_length) == (Path("c.jsonl"), 99)
    assert order.measuring == Measuring(Path("h.jsonl"), 7, 8, 9, 3, show_progress=False)


def test_int4_has_groups_unless_told_otherwise():
    def weights(*more: str) -> WeightFormat:
        return order_of(parse(["quantize", "m", "--out", "o", *more])).recipe.weights

    assert weights("--weights", "int4") == WeightFormat(4, 128)
    assert weights("--weights", "int4", "--group-size", "none") == WeightFormat(4)
    assert weights("--activations", "int8-static") == WeightFormat(8, activations="int8_static")


def test_every_flag_of_compare_arrives():
    words = (
        "compare a b --out r.html --prompts p --quantization int4 --kv-cache-dtype int8 --seed 5"
    )
    order = compare_order_of(parse(words.split()))
    measuring = Measuring(seed=5)
    assert order == CompareOrder(
        ("a", "b"), Path("r.html"), Path("p"), "int4", "int8", None, measuring
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("quantize m", "--out"),
        ("quantize m --out o --weights int3", "int3"),
        ("quantize m --out o --group-size 48", "48"),
        ("quantize m --out o --window 0", "--window"),
        ("compare a --out r.md", "MODEL"),
        ("compress a", "compress"),
    ],
)
def test_a_bad_command_line_is_told_with_exit_code_2(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--weights int4 --activations int8", "int8 activations need 8-bit weights"),
        ("--keep-8bit 0.1", "4-bit weights"),
        ("--weights int4 --keep-8bit 2", "between 0 and 1"),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_model_is_looked_for(
    words: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["quantize", "no-such-model", "--out", str(tmp_path / "o"), *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_a_folder_that_is_there_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["quantize", "no-such-model", "--out", str(tmp_path)]) == 1
    assert "not there yet" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["compare", "no-such-model", "m", "--out", str(tmp_path / "r.md")]) == 1
    assert "no-such-model: expected an existing file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "complaint"),
    [("r.pdf", "must end in .html or .md"), ("no-folder/r.md", "a folder that is there")],
)
def test_a_report_that_could_not_be_written_is_refused_first(
    out: str, complaint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["compare", "no-such-model", "m", "--out", out]) == 2
    assert complaint in capsys.readouterr().err


def test_a_certificate_is_of_what_serving_rounds():
    with pytest.raises(ConfigError, match="--quantization"):
        compare_order_of(parse(["compare", "a", "b", "--out", "r.md", "--certificate", "c.json"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("quantize") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def texts(model: Path) -> dict[str, Path]:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "on", "the", "log", "12"]
    lines = [" ".join(words[i:] + words[: i % 5]) for i in range(12)]
    return {
        "calibration": write_texts(model.parent / "calibration.jsonl", lines),
        "held_out": write_texts(
            model.parent / "held_out.jsonl", [f"{line}, {line}!" for line in lines]
        ),
    }


def quantize_words(model: Path, out: Path, texts: dict[str, Path], *more: str) -> list[str]:
    files = ["--calibration", str(texts["calibration"]), "--held-out", str(texts["held_out"])]
    return ["quantize", str(model), "--out", str(out), *files, *more]


@pytest.fixture(scope="module")
def quantized(model: Path, texts: dict[str, Path]) -> Path:
    out = model.parent / "out"
    assert main(quantize_words(model, out, texts, "--seed", "3", *CHEAP)) == 0
    return out


def test_the_certificate_lies_beside_the_weights_and_says_what_they_cost(quantized: Path):
    found = read_certificate(quantized)
    assert found is not None
    assert found.num_held_out_tokens >= 200
    assert 0 < found.kl < 0.1
    assert found.agreement > 0.9
    assert found.seed == 3
    assert (found.calibration, found.held_out) == ("calibration.jsonl", "held_out.jsonl")
    assert 0.2 < found.num_bytes / found.original_bytes < 0.4
    assert len(found.layer_errors) == 7
    assert [answer.prompt for answer in found.answers] == [p.shown for p in STANDARD_PROMPTS]


def test_the_report_has_its_pictures(quantized: Path):
    text = (quantized / "report.md").read_text("utf-8")
    for name in ("kl", "position", "worst", "layers", "drift"):
        assert f"(report_{name}.svg)" in text
        assert (quantized / f"report_{name}.svg").read_text("utf-8").startswith("<svg ")
    assert "layers.0.mlp.down_proj" in text
    assert "What is the capital of Portugal?" in text


def test_the_certificate_is_of_the_folder_as_it_is_opened(quantized: Path):
    found = read_certificate(quantized)
    assert found is not None
    assert open_checkpoint(quantized).version == found.quantized


@pytest.mark.slow
def test_what_came_out_is_served_by_its_certificate(
    quantized: Path, tmp_path_factory: pytest.TempPathFactory
):
    config = tiny_engine_config(quantized, shared_cache(tmp_path_factory), **SMALL)
    llm = LLM(config=config)
    found = read_certificate(quantized)
    assert found is not None
    assert llm.version == found.quantized
    assert (
        len(llm.generate("the cat", max_tokens=3, temperature=0, ignore_eos=True)[0].token_ids) == 3
    )


@pytest.mark.slow
def test_a_comparison_measures_what_the_certificate_says_and_asks_the_user_s_prompts(
    model: Path, quantized: Path, texts: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    prompts, out = model.parent / "prompts.txt", model.parent / "report.html"
    prompts.write_text('the <b>cat</b>\n{"prompt": "the dog"}\n', encoding="utf-8")
    words = ["compare", str(model), str(quantized), "--out", str(out), "--prompts", str(prompts)]
    assert main([*words, "--held-out", str(texts["held_out"]), *QUICK]) == 0
    found = read_certificate(quantized)
    assert found is not None
    assert f"KL {found.kl:.4f}" in capsys.readouterr().out
    html = out.read_text("utf-8")
    assert html.count("<svg ") == 5
    assert "the &lt;b&gt;cat" in html
    assert "capital of Portugal" not in html


@pytest.mark.slow
def test_a_report_that_cannot_be_made_leaves_nothing(
    model: Path,
    texts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def failing(*parts: Any) -> Any:
        raise OSError("no space for a picture")

    monkeypatch.setattr(certification, "certificate_blocks", failing)
    out = model.parent / "lost"
    assert main(quantize_words(model, out, texts, *CHEAP)) == 1
    assert "no space for a picture" in capsys.readouterr().err
    assert not out.exists()
    assert not list(model.parent.glob(".lost*"))


def served(folder: Path, factory: pytest.TempPathFactory, **fields: Any) -> Any:
    """A few greedy tokens, and the version that they are of."""
    llm = LLM(config=tiny_engine_config(folder, shared_cache(factory), **(SMALL | fields)))
    found = llm.generate("the cat sat", max_tokens=4, temperature=0, ignore_eos=True)[0]
    return found.token_ids, llm.version


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_four_bits_with_zero_points_and_a_short_group_are_made_and_served(
    model: Path,
    texts: dict[str, Path],
    backend: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
):
    out = tmp_path / "int4"
    asked = ["--weights", "int4", "--group-size", "64", "--asymmetric", *QUICK]
    assert main(quantize_words(model, out, texts, *asked)) == 0
    certificate, checkpoint = read_certificate(out), open_checkpoint(out)
    assert certificate is not None
    assert certificate.format == "int4-g64-asym, head int8"
    product = "model.layers.0.mlp.down_proj"  # of 80 inputs: a group of 64 and one of 16
    parts = {part: checkpoint.source.info(f"{product}.{part}") for part in ("q", "scale", "zero")}
    assert [info.shape for info in parts.values()] == [(48, 64), (2, 48), (2, 48)]
    token_ids, version = served(out, tmp_path_factory, kernel_backend=backend, max_kl=1.0)
    assert version == certificate.quantized
    assert len(token_ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_static_activations_are_made_with_the_built_in_set_and_served(
    model: Path,
    texts: dict[str, Path],
    backend: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
):
    out = tmp_path / "static"
    words = ["quantize", str(model), "--out", str(out), "--held-out", str(texts["held_out"])]
    assert main([*words, "--activations", "int8-static", *CHEAP]) == 0
    certificate, checkpoint = read_certificate(out), open_checkpoint(out)
    assert certificate is not None
    assert certificate.format == "int8-a8s, head int8"
    scales = [name for name in checkpoint.source.names() if name.endswith(".x_scale")]
    assert len(scales) == 7
    assert all(checkpoint.source.read(name) > 0 for name in scales)
    token_ids, version = served(out, tmp_path_factory, kernel_backend=backend, max_kl=1.0)
    assert version == certificate.quantized
    assert len(token_ids) == 4


@pytest.mark.slow
def test_static_activations_are_refused_with_a_small_set_and_its_numbers(
    model: Path, texts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "static"
    asked = ["--activations", "int8-static", *CHEAP]
    assert main(quantize_words(model, out, texts, *asked)) == 2
    assert "12 samples of at least 64" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("form", "kind"), [("orbax", OrbaxSource), ("safetensors", SafetensorsSource)]
)
def test_a_checkpoint_is_written_again_in_another_form(
    model: Path, tmp_path: Path, form: str, kind: type
):
    out = tmp_path / form
    assert main([form, str(model), "--out", str(out), "--no-progress"]) == 0
    found, original = open_checkpoint(out), open_checkpoint(model)
    assert isinstance(found.source, kind)
    assert sorted(found.source.names()) == sorted(original.source.names())
    assert main([form, str(model), "--out", str(out)]) == 1


def test_text_that_was_calibrated_on_is_no_held_out_text(
    model: Path, texts: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    out, same = model.parent / "other", str(texts["calibration"])
    files = ["--calibration", same, "--held-out", same]
    assert main(["quantize", str(model), "--out", str(out), *files, *QUICK]) == 2
    assert "12 samples that are also in calibration set" in capsys.readouterr().err
    assert not out.exists()
    assert not list(model.parent.glob(".other*"))


def test_too_little_held_out_text_is_refused_with_the_number(
    model: Path, texts: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    words = ["compare", str(model), str(model), "--out", str(model.parent / "r.md")]
    assert main([*words, "--held-out", str(texts["held_out"]), "--no-progress"]) == 2
    assert "at least 10,000 tokens are needed" in capsys.readouterr().err


class Vocabulary:
    """A checkpoint as `check_vocabularies` sees it."""

    def __init__(self, size: int, vocab: dict[str, int], ids: list[int]):
        self.path, self.config, self.tokenizer = "m", {"vocab_size": size}, self
        self._vocab, self.ids = vocab, ids

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        return self


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (Vocabulary(3, {"a": 0}, [0]), "2 and 3 tokens"),
        (Vocabulary(2, {"b": 0}, [0]), "two tokenizers that differ"),
        (Vocabulary(2, {"a": 0}, [0, 0]), "two tokenizers that differ"),
    ],
)
def test_two_vocabularies_are_not_compared(other: Any, complaint: str):
    one: Any = Vocabulary(2, {"a": 0}, [0])
    check_vocabularies(one, one)
    with pytest.raises(ConfigError, match=complaint):
        check_vocabularies(one, other)
