"""What is said at start and at the end, for people: the configuration, the plan, the routes."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.rank import aging_bound_s
from jaxinfer.server.admission import Admission
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses

log = logging.getLogger(__name__)

EXIT_OK, EXIT_LOAD_ERROR, EXIT_BAD_FLAGS = 0, 1, 2
ROUTES = (
    "/v1/chat/completions /v1/completions /v1/models /health /ready /metrics "
    "/abort_request /tokenize /detokenize /version /dashboard /openapi.json"
)


class Voice:
    """Says lines on `out`, or as log records where every line must be one."""

    def __init__(self, out: TextIO, *, as_log: bool):
        self._out = out
        self._as_log = as_log

    def say(self, line: str) -> None:
        if self._as_log:
            log.info(line)
        else:
            print(line, file=self._out, flush=True)

    def complain(self, line: str) -> None:
        """For what ends the process."""
        if self._as_log:
            log.error(line)
        else:
            print(f"error: {line}", file=self._out, flush=True)


def config_line(resolved: Mapping[str, Any]) -> str:
    """Every flag with its value; secrets come masked."""
    return "config: " + " ".join(f"{key}={_value(value)}" for key, value in resolved.items())


def ready_lines(summary: Mapping[str, Any], seconds: float) -> Iterator[str]:
    """The plan and the seconds per phase.

    Args:
        summary: `seconds` maps phases to seconds; `num_kv_tokens`, `max_concurrency` and
            `max_model_len` size the KV pool; every other entry is shown as it is.
        seconds: from start to ready.
    """
    known = {"seconds", "num_kv_tokens", "max_concurrency", "max_model_len"}
    for key, value in summary.items():
        if key not in known:
            yield f"{key.replace('_', ' ')}: {_value(value)}"
    if "num_kv_tokens" in summary:
        yield (
            f"KV cache: {summary['num_kv_tokens']:,} tokens; max concurrency for "
            f"{summary['max_model_len']:,} tokens: {summary['max_concurrency']:.2f}"
        )
    phases = [f"{phase} {s:.1f} s" for phase, s in summary.get("seconds", {}).items()]
    yield "start-up: " + ", ".join([*phases, f"total {seconds:.1f} s"])


def exposure(address: str, *, has_keys: bool) -> str | None:
    """A warning, if whoever reaches this address of ours may use the server."""
    if has_keys or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return f"warning: whoever reaches {address} may use this server; set --api-key"


def class_lines(classes: PriorityClasses, max_requests: int) -> Iterator[str]:
    """What each class may take, and how long it may have to wait behind better ones."""
    admission = Admission(max_requests, classes=classes)
    shown = [_class(c, admission.most(c), c.name == classes.default_name) for c in classes.classes]
    yield f"classes: {'; '.join(shown)}"
    best = classes.classes[0]
    bounds = {c.name: aging_bound_s(c.priority, best.priority) for c in classes.classes[1:]}
    waits = [f"{name} {bound:g} s" for name, bound in bounds.items()]
    if waits:
        yield (
            f"ageing: a request waits only for {best.name} ones that arrived before it or soon "
            f"after: {', '.join(waits)}"
        )


def _class(found: PriorityClass, most: int, is_default: bool) -> str:
    bounds = [f"priority {found.priority}", f"at most {most} requests"]
    for value, text in (
        (found.timeout_s, "{:g} s"),
        (found.queue_timeout_s, "{:g} s in the queue"),
        (found.max_output_tokens, "{:,} output tokens"),
        (len(found.api_keys) or None, "{} API keys"),
    ):
        if value is not None:
            bounds.append(text.format(value))
    return f"{found.name}{' (default)' if is_default else ''}: {', '.join(bounds)}"


def exit_code_of(error: Exception) -> int:
    """Of a start that failed."""
    return EXIT_BAD_FLAGS if isinstance(error, ConfigError) else EXIT_LOAD_ERROR


def one_line(error: Exception) -> str:
    """An error that ends a start; one of a library comes with its type."""
    text = " ".join(str(error).split()) or type(error).__name__
    known = type(error).__module__.partition(".")[0] in ("jaxinfer", "checkpoints")
    return text if known else f"{type(error).__name__}: {text}"


def route_line() -> str:
    return f"routes: {ROUTES}"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
