"""Every flag of serve.py, declared once: command line, environment and --config file all come from
this table. It only declares; settings.py reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jaxinfer.config import (
    CacheConfig,
    EngineConfig,
    KernelBackend,
    KVCacheDtype,
    ModelSource,
    Quantize,
    SchedulerConfig,
    Truncate,
)
from jaxinfer.server.edge import Edge
from jaxinfer.server.priority_class import DEFAULT_CLASS
from jaxinfer.server.state import Limits
from jaxinfer.server.tool_calls.formats import PARSERS

ENV_PREFIX = "JAXINFER_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    `sets` says where its value goes: "engine.<field>" of EngineConfig or one of its parts,
    "limits.<field>" of Limits, "edge.<field>" of Edge, or a field of ServeSettings.
    """

    name: str  # with dashes
    read: Callable[[str], Any]  # from text; raises ValueError
    default: Any
    help: str
    sets: str
    choices: tuple[str, ...] | None = None
    is_secret: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.key.upper()


def size_in_bytes(text: str) -> int:
    """ "2G" (10^9), "512MiB" (2^20) or a plain number of bytes.

    >>> size_in_bytes("1.5KiB")
    1536
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError("expected bytes, such as 2G, 512MiB or 1000000")
    base = 1024 if match[3] else 1000
    size = float(match[1]) * base ** ("", "K", "M", "G", "T").index(match[2].upper())
    if size < 1:
        raise ValueError("expected at least one byte")
    return int(size)


def switch(text: str) -> bool:
    """on/off, true/false, yes/no, 1/0."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def names(text: str) -> tuple[str, ...]:
    """Separated by commas."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise ValueError("expected at least one name")
    return found


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("expected a number above 0")
    return value


def milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1000:
        raise ValueError("expected milliseconds from 0 to 1000")
    return value


def divergence(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError("expected nats per token of at least 0, or inf")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number of at least 0")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError("expected a port from 0 to 65535")
    return value


_SOURCE, _CACHE, _SCHEDULER, _ENGINE = (
    ModelSource(),
    CacheConfig(),
    SchedulerConfig(),
    EngineConfig(),
)
_LIMITS = Limits()
_EDGE = Edge()

FLAGS: tuple[Flag, ...] = (
    Flag("model", str, _SOURCE.model, "path, hub id, .gguf file or catalog name", "engine.model"),
    Flag("revision", str, None, "revision of a hub id", "engine.revision"),
    Flag(
        "download-dir",
        str,
        None,
        "where downloads are kept (the user's cache)",
        "engine.download_dir",
    ),
    Flag("cache-dir", str, None, "models and compiled programs", "engine.cache_dir"),
    Flag(
        "dtype",
        str,
        _SOURCE.dtype,
        "of the weights",
        "engine.dtype",
        ("auto", "float32", "bfloat16"),
    ),
    Flag(
        "quantization",
        str,
        _SOURCE.quantization,
        "of float weights, while loading (auto: on a CPU, if a certificate of ours allows it)",
        "engine.quantization",
        get_args(Quantize),
    ),
    Flag(
        "max-kl",
        divergence,
        _SOURCE.max_kl,
        "nats per token that quantized weights may cost; inf: whatever they cost, known or not",
        "engine.max_kl",
    ),
    Flag(
        "chat-template", str, None, "Jinja file instead of the model's own", "engine.chat_template"
    ),
    Flag(
        "tool-call-parser",
        str,
        "auto",
        "format of tool calls (its chat template tells)",
        "tool_call_parser",
        PARSERS,
    ),
    Flag(
        "served-model-name",
        names,
        (),
        "names that requests may use, by commas",
        "served_model_names",
    ),
    Flag("host", str, "127.0.0.1", "address to listen on", "host"),
    Flag("port", port, 8000, "port to listen on; 0 takes a free one", "port"),
    Flag("root-path", str, "", "path prefix that a proxy strips", "root_path"),
    Flag("api-key", names, (), "keys that open the server, by commas", "api_keys", is_secret=True),
    Flag("api-key-file", Path, None, "file with one key per line", "api_keys"),
    Flag(
        "admin-key",
        names,
        (),
        "keys that open /admin/ and everything else, by commas",
        "edge.admin_keys",
        is_secret=True,
    ),
    Flag("admin-key-file", Path, None, "file with one admin key per line", "edge.admin_keys"),
    Flag("open-metrics", switch, _EDGE.open_metrics, "/metrics without a key", "edge.open_metrics"),
    Flag(
        "cors-origin",
        names,
        (),
        "origins whose pages may call, by commas, or *",
        "edge.cors_origins",
    ),
    Flag(
        "allowed-host",
        names,
        (),
        "names that the Host header may give, by commas (any)",
        "edge.allowed_hosts",
    ),
    Flag(
        "max-connections",
        count,
        _LIMITS.max_connections,
        "open connections; the requests of more get 503",
        "limits.max_connections",
    ),
    Flag(
        "max-body-bytes",
        size_in_bytes,
        _LIMITS.max_body_bytes,
        "of a request, e.g. 4MiB; longer ones get 413",
        "limits.max_body_bytes",
    ),
    Flag(
        "max-model-len",
        count,
        None,
        "tokens of prompt and output (the model's limit)",
        "engine.max_model_len",
    ),
    Flag(
        "max-num-seqs",
        count,
        _SCHEDULER.max_num_seqs,
        "sequences that run together",
        "engine.max_num_seqs",
    ),
    Flag(
        "max-num-batched-tokens",
        count,
        _SCHEDULER.max_num_batched_tokens,
        "tokens of one prefill step",
        "engine.max_num_batched_tokens",
    ),
    Flag(
        "kv-cache-memory",
        size_in_bytes,
        None,
        "bytes of the KV pool, e.g. 2G (planned)",
        "engine.kv_cache_bytes",
    ),
    Flag(
        "kv-cache-dtype",
        str,
        _CACHE.kv_cache_dtype,
        "of the KV pool; int8 holds about twice the tokens of bfloat16",
        "engine.kv_cache_dtype",
        get_args(KVCacheDtype),
    ),
    Flag(
        "gpu-memory-utilization",
        float,
        _ENGINE.memory_utilization,
        "share of a GPU's memory that may be planned",
        "engine.memory_utilization",
    ),
    Flag("page-size", count, _CACHE.page_size, "tokens per KV page", "engine.page_size"),
    Flag(
        "enable-prefix-caching",
        switch,
        _CACHE.enable_prefix_caching,
        "reuse the KV pages of equal prompt beginnings",
        "engine.enable_prefix_caching",
    ),
    Flag("seed", int, None, "of requests that name none", "engine.seed"),
    Flag(
        "kernel-backend",
        str,
        _ENGINE.kernel_backend,
        "implementation of the kernels",
        "engine.kernel_backend",
        get_args(KernelBackend),
    ),
    Flag(
        "batch-invariant",
        switch,
        _ENGINE.batch_invariant,
        "GPU kernels whose rows do not depend on their batch",
        "engine.batch_invariant",
    ),
    Flag(
        "max-queued-requests",
        count,
        _LIMITS.max_queued_requests,
        "requests that are queued or running; more get 429",
        "limits.max_queued_requests",
    ),
    Flag(
        "max-queued-tokens",
        count,
        None,
        "tokens of their prompts, and still to produce; more get 429",
        "limits.max_queued_tokens",
    ),
    Flag(
        "priority-classes",
        Path,
        None,
        "YAML file that changes the classes interactive, normal and batch",
        "classes",
    ),
    Flag("default-class", str, DEFAULT_CLASS, "class of requests that name none", "classes"),
    Flag(
        "batch-wait-ms",
        milliseconds,
        0.0,
        "milliseconds that an idle engine waits for more requests to begin with",
        "batch_wait_ms",
    ),
    Flag(
        "queue-timeout",
        positive,
        None,
        "seconds from arrival to the first step; then 429",
        "limits.queue_timeout_s",
    ),
    Flag(
        "request-timeout",
        positive,
        None,
        "seconds from arrival to the last token; then 504",
        "limits.request_timeout_s",
    ),
    Flag(
        "stall-timeout",
        positive,
        _LIMITS.stall_s,
        "seconds that a client may take nothing of its stream; then it is cut off",
        "limits.stall_s",
    ),
    Flag(
        "max-output-tokens",
        count,
        None,
        "output tokens of a choice, whatever the request asks for",
        "limits.max_output_tokens",
    ),
    Flag(
        "truncate",
        str,
        None,
        "where that cap ends a text (chat: sentence, completions: token)",
        "limits.truncate",
        get_args(Truncate),
    ),
    Flag(
        "max-retries",
        whole,
        _SCHEDULER.max_retries,
        "of a sequence whose steps fail, in a row; 0: none",
        "engine.max_retries",
    ),
    Flag(
        "step-timeout",
        positive,
        _LIMITS.step_timeout_s,
        "seconds of a step; one that takes longer hangs: new requests and /health get 503",
        "limits.step_timeout_s",
    ),
    Flag(
        "breaker-threshold",
        count,
        _LIMITS.breaker_threshold,
        "failed steps in a row, after which new requests get 503",
        "limits.breaker_threshold",
    ),
    Flag(
        "breaker-open-s",
        positive,
        _LIMITS.breaker_open_s,
        "seconds of that, before one request at a time may try again",
        "limits.breaker_open_s",
    ),
    Flag(
        "shutdown-timeout",
        positive,
        30.0,
        "seconds that open requests have after SIGTERM",
        "shutdown_timeout_s",
    ),
    Flag(
        "rollout-log",
        Path,
        None,
        "file of what is decided about versions; none: one in the cache folder",
        "rollout_log",
    ),
    Flag(
        "standby-s",
        positive,
        600.0,
        "seconds that the version before a promoted one stays in memory, to go back to",
        "standby_s",
    ),
    Flag(
        "memory-watch-window",
        count,
        1800,
        "seconds in which memory must keep rising at equal load for the growth alarm",
        "memory_watch_window_s",
    ),
    Flag(
        "memory-watch-rise",
        size_in_bytes,
        16 * 2**20,
        "bytes by which it must rise in that time",
        "memory_watch_rise_bytes",
    ),
    Flag(
        "compile-only",
        switch,
        False,
        "compile all programs into the cache folder and exit",
        "compile_only",
    ),
    Flag(
        "log-level",
        str,
        "info",
        "what is logged",
        "log_level",
        ("debug", "info", "warning", "error"),
    ),
    Flag("log-format", str, "console", "how it is logged", "log_format", ("console", "json")),
    Flag("log-requests", switch, _EDGE.log_requests, "a line per request", "edge.log_requests"),
)
FLAG_OF = {flag.key: flag for flag in FLAGS}
