"""Flags, environment and file: one table, one order, no silent mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.server.flags import FLAGS, names, size_in_bytes, switch
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.settings import ServeSettings, parse
from jaxinfer.server.state import Limits


def settings(*argv: str, **environ: str) -> ServeSettings:
    return parse(argv, environ)[0]


def test_without_flags_everything_is_at_its_default():
    found = settings()
    assert found.engine == EngineConfig()
    assert found.limits == Limits()
    assert (found.host, found.port) == ("127.0.0.1", 8000)
    assert found.api_keys == ()
    assert found.classes == PriorityClasses()
    assert found.batch_wait_ms == 0


def test_every_flag_reaches_its_field(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("k3\n\n k4 \n")
    classes = tmp_path / "classes.yaml"
    classes.write_text("bulk: {priority: 5, api_keys: [k5]}")
    found = settings(
        *("--model", "m.gguf", "--revision", "r", "--download-dir", "d", "--dtype", "float32"),
        *("--cache-dir", "c"),
        *("--chat-template", "t.jinja", "--served-model-name", "a, b", "--host", "::1"),
        *("--port", "0", "--root-path", "/llm", "--api-key", "k1,k2"),
        *("--api-key-file", str(keys), "--max-model-len", "99", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "64", "--kv-cache-memory", "1.5GiB"),
        *("--gpu-memory-utilization", "0.5", "--page-size", "16", "--no-enable-prefix-caching"),
        *("--seed", "7", "--kernel-backend", "reference", "--max-queued-requests", "9"),
        *("--request-timeout", "2.5", "--shutdown-timeout", "3", "--log-level", "debug"),
        *("--log-format", "json", "--no-batch-invariant", "--queue-timeout", "1.5"),
        *("--max-queued-tokens", "999", "--batch-wait-ms", "7", "--default-class", "bulk"),
        *("--priority-classes", str(classes), "--kv-cache-dtype", "int8"),
    )
    source, scheduler, cache = found.engine.source, found.engine.scheduler, found.engine.cache
    assert (source.model, source.revision, source.download_dir) == ("m.gguf", "r", "d")
    assert (source.dtype, source.chat_template) == ("float32", "t.jinja")
    assert found.served_model_names == ("a", "b")
    assert (found.host, found.port, found.root_path) == ("::1", 0, "/llm")
    assert found.api_keys == ("k1", "k2", "k3", "k4", "k5")
    assert (scheduler.max_model_len, scheduler.max_num_seqs) == (99, 4)
    assert scheduler.max_num_batched_tokens == 64
    assert (cache.kv_cache_bytes, cache.page_size) == (3 * 2**29, 16)
    assert (cache.enable_prefix_caching, cache.kv_cache_dtype) == (False, "int8")
    assert (found.engine.seed, found.engine.kernel_backend) == (7, "reference")
    assert found.engine.batch_invariant is False
    assert (found.engine.memory_utilization, found.engine.cache_dir) == (0.5, "c")
    assert (found.limits.max_queued_requests, found.limits.request_timeout_s) == (9, 2.5)
    assert (found.limits.max_queued_tokens, found.limits.queue_timeout_s) == (999, 1.5)
    assert (found.batch_wait_ms, found.classes.default.name) == (7.0, "bulk")
    assert (found.shutdown_timeout_s, found.log_level, found.log_format) == (3.0, "debug", "json")


def test_the_model_may_come_as_an_argument():
    assert settings("m.gguf").engine.source.model == "m.gguf"
    assert settings("--port", "1", "m.gguf").engine.source.model == "m.gguf"
    with pytest.raises(ConfigError, match="given twice"):
        settings("a", "--model", "b")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nmax_model_len: 30\n")
    found = settings(
        "--config", str(file), "--port", "3", JAXINFER_PORT="2", JAXINFER_MAX_NUM_SEQS="5"
    )
    assert found.port == 3
    assert found.engine.scheduler.max_num_seqs == 5
    assert found.engine.scheduler.max_model_len == 30
    assert found.engine.scheduler.max_num_batched_tokens == 512


def test_the_file_may_be_named_by_the_environment(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("served_model_name: [a, b]\nenable_prefix_caching: false\nseed: null\n")
    found = settings(JAXINFER_CONFIG=str(file))
    assert found.served_model_names == ("a", "b")
    assert found.engine.cache.enable_prefix_caching is False
    assert found.engine.seed is None


# One value for every flag that takes a text of its own.
EXAMPLES = {
    "model": "m",
    "revision": "r",
    "download-dir": "d",
    "cache-dir": "c",
    "dtype": "bfloat16",
    "quantization": "int4",
    "max-kl": "inf",
    "chat-template": "t",
    "tool-call-parser": "mistral",
    "served-model-name": "a,b",
    "host": "::",
    "port": "9",
    "root-path": "/x",
    "api-key": "k",
    "admin-key": "a",
    "open-metrics": "true",
    "cors-origin": "https://a.example",
    "allowed-host": "a.example",
    "max-connections": "6",
    "max-body-bytes": "4MiB",
    "max-model-len": "50",
    "max-num-seqs": "3",
    "max-num-batched-tokens": "32",
    "kv-cache-memory": "1GiB",
    "kv-cache-dtype": "int8",
    "gpu-memory-utilization": "0.5",
    "page-size": "8",
    "enable-prefix-caching": "false",
    "seed": "4",
    "kernel-backend": "reference",
    "batch-invariant": "false",
    "max-queued-requests": "5",
    "max-queued-tokens": "9000",
    "default-class": "batch",
    "batch-wait-ms": "2.5",
    "queue-timeout": "3",
    "request-timeout": "6",
    "stall-timeout": "9",
    "max-output-tokens": "256",
    "truncate": "token",
    "max-retries": "0",
    "step-timeout": "30",
    "breaker-threshold": "3",
    "breaker-open-s": "2.5",
    "shutdown-timeout": "7",
    "rollout-log": "rollouts.jsonl",
    "standby-s": "60",
    "memory-watch-window": "900",
    "memory-watch-rise": "8MiB",
    "compile-only": "true",
    "log-level": "error",
    "log-format": "json",
    "log-requests": "false",
}


def test_flag_environment_and_file_mean_the_same_for_every_flag(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("k9")
    admin = tmp_path / "admin"
    admin.write_text("a9")
    classes = tmp_path / "classes"
    classes.write_text("batch: false")
    files = {"api-key-file": keys, "admin-key-file": admin, "priority-classes": classes}
    examples = EXAMPLES | {name: str(path) for name, path in files.items()}
    assert set(examples) == {flag.name for flag in FLAGS}
    for flag in FLAGS:
        text = examples[flag.name]
        argv = [f"--{flag.name}", text]
        if flag.read is switch:
            argv = [f"--{flag.name}" if switch(text) else f"--no-{flag.name}"]
        file = tmp_path / "c.yaml"
        file.write_text(f"{flag.name}: {text!r}\n")
        by_flag = settings(*argv)
        assert by_flag != settings(), flag.name
        assert settings(**{flag.env: text}) == by_flag
        assert settings("--config", str(file)) == by_flag


def test_variables_of_others_are_left_alone():
    assert settings(PATH="/bin", JAX_PLATFORMS="cpu").port == 8000


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAXINFER_POORT": "1"}, "JAXINFER_POORT belongs to no flag"),
        ({"JAXINFER_PORT": "many"}, "JAXINFER_PORT"),
        ({"JAXINFER_PORT": "70000"}, "port from 0 to 65535"),
        ({"JAXINFER_MAX_RETRIES": "-1"}, "at least 0"),
        ({"JAXINFER_DTYPE": "float8"}, "expected one of auto, float32, bfloat16"),
        ({"JAXINFER_ENABLE_PREFIX_CACHING": "perhaps"}, "true or false"),
        ({"JAXINFER_CONFIG": "no/such/file.yaml"}, "no/such/file.yaml"),
    ],
)
def test_a_bad_environment_is_an_error_that_names_it(environ: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        parse([], environ)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1\n", "'prot' is no flag"),
        ("port: many\n", "port"),
        ("- a\n- b\n", "expected a mapping"),
        ("a: [\n", "c.yaml"),
        ("dtype: int8\n", "expected one of"),
        ("5: 1\n", "5 is no flag"),
        ("model: [a, b]\n", "expected one value; got a list"),
        ("port: {a: 1}\n", "expected one value; got a dict"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, content: str, words: str):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        settings("--config", str(file))
    assert "c.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert settings("--config", str(file)) == settings()


@pytest.mark.parametrize(
    "argv",
    [
        ["--nonsense"],
        ["--port"],
        ["--port", "x"],
        ["--dtype", "int8"],
        ["--max-num-seqs", "0"],
        ["--request-timeout", "-1"],
        ["--request-timeout", "inf"],
        ["--kv-cache-memory", "lots"],
        ["--queue-timeout", "0"],
        ["--batch-wait-ms", "-1"],
        ["--batch-wait-ms", "nan"],
        ["--served-model-name", ","],
        ["--max-num", "5"],
        ["a", "b"],
    ],
)
def test_a_bad_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        settings(*argv)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_values_that_only_the_config_can_judge_are_config_errors():
    with pytest.raises(ConfigError, match="page_size"):
        settings("--page-size", "7")
    with pytest.raises(ConfigError, match="memory_utilization"):
        settings("--gpu-memory-utilization", "3")


def test_keys_are_masked_where_settings_are_shown():
    _, shown = parse(["--api-key", "secret", "--port", "1"], {})
    assert shown["api_key"] == "***"
    assert shown["port"] == 1
    assert "secret" not in str(shown)
    assert parse([], {})[1]["api_key"] == ()


def test_a_bad_secret_is_not_echoed():
    with pytest.raises(ConfigError) as caught:
        settings(JAXINFER_API_KEY=",,")
    assert ",," not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_key_file_without_a_key_is_an_error(tmp_path: Path, content: str | None):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api-key-file"):
        settings("--api-key-file", str(file))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("2G", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("2GiB", 2**31),
        ("1.5k", 1500),
        ("512 MiB", 2**29),
        ("1T", 10**12),
        ("1", 1),
    ],
)
def test_sizes_read_with_their_unit(text: str, size: int):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1iB", "1X", "0", "1e9", "0.1"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match="expected"):
        size_in_bytes(text)


def test_switches_and_name_lists():
    assert [switch(t) for t in ("true", "ON", "1", "no", "off")] == [True] * 3 + [False] * 2
    assert names(" a ,b,, c") == ("a", "b", "c")


def test_help_names_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        settings("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in FLAGS:
        assert f"--{flag.name}" in text
        if flag.default not in (None, (), ""):
            assert f"default: {flag.default}" in text
