"""Frozen configuration, in parts of about ten fields; a class takes the smallest part it reads.

No JAX here. Limits of the OpenAI surface are checked where a SamplingParams is made, so the HTTP
path and the Python path refuse the same things with the same words.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.guided import Guided

KernelBackend = Literal["auto", "pallas", "interpret", "reference"]
Quantize = Literal["auto", "none", "int8", "int4"]
KVCacheDtype = Literal["auto", "int8"]
Truncate = Literal["sentence", "token"]
MAX_STOP_STRINGS = 32
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
"""Entries of a logit_bias. The bound is our own: an array on the device has one width, and each row
of a penalized step carries it (2.4 kB)."""
GREEDY_TEMPERATURE = 1e-5  # below this the arg-max is taken
MIN_MEMORY_UTILIZATION = 0.05
MIN_ROWS = 8
"""Rows of the smallest program. XLA CPU computes a product of one row, and sums over a few rows, in
another order: the bits of a row would depend on its company (ARCHITECTURE, exactness)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end. Names and ranges follow the OpenAI API and vLLM.

    Raises: InvalidRequest naming the field, its range and the value that came.
    """

    max_tokens: int | None = 16  # None: up to the end of the context
    output_cap: int | None = None  # the host's own bound: ends the output too, but refuses nothing
    truncate: Truncate = "token"  # where a text ends that output_cap cuts: sentence holds a few
    # tokens back (text_cap.py)
    min_tokens: int = 0  # end tokens and stop strings are ignored before this many
    temperature: float = 1.0  # [0, 2]; below 1e-5 greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the likeliest token
    presence_penalty: float = 0.0  # [-2, 2], off the logit of a token that is in the output
    frequency_penalty: float = 0.0  # [-2, 2], the same for each time that it is there
    repetition_penalty: float = 1.0  # > 0; divides positive logits of tokens of prompt and output,
    # multiplies negative ones; computed as if it were from 1e-6 to 1e6
    logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...] = ()
    # token id -> [-100, 100], added to its logit; at most 300; kept as pairs, in order of the ids
    seed: int | None = None  # None: a fresh one per request
    n: int = 1  # choices; choice i has its own stream of draws
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: tuple[int, ...] = ()  # special tokens that have text all the same
    logprobs: int | None = None  # None: none; k: chosen token's and the k likeliest (0..20)
    guided: Guided | Mapping[str, Any] | None = None  # what the whole text follows: one of
    # {"json_schema": {...}}, {"json_object": True}, {"regex": "[0-9]+"}, {"choice": ["a", "b"]},
    # {"grammar": Lark or GBNF}. The answer ends where the grammar does, whatever ignore_eos and
    # min_tokens say, and nowhere before but by stop strings and max_tokens

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "kept_special_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.guided is not None:
            object.__setattr__(self, "guided", Guided.of(self.guided))
        self._check_ranges()
        self._check_stops()

    def _check_ranges(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        if self.output_cap is not None:
            _integer("output_cap", self.output_cap, 1, None)
        if self.truncate not in get_args(Truncate):
            raise InvalidRequest(
                f"truncate must be sentence or token; got {self.truncate!r}", param="truncate"
            )
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        _integer("n", self.n, 1, 16)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(
                    f"stop must hold non-empty strings; got {text!r}", param="stop"
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        for token in self.kept_special_ids:
            _integer("kept_special_ids", token, 0, None)

    @property
    def binding_cap(self) -> int | None:
        """output_cap, if it ends the output before max_tokens does."""
        if self.max_tokens is not None and self.max_tokens <= (self.output_cap or 0):
            return None
        return self.output_cap

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it other than through the model."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: (token id, bias), in order of the ids."""
        assert isinstance(self.logit_bias, tuple), "made into pairs when this was made"
        return self.logit_bias

    @property
    def grammar(self) -> Guided | None:
        """`guided` as it is kept."""
        assert self.guided is None or isinstance(self.guided, Guided), "made when this was made"
        return self.guided


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be an integer {bound}; got {value!r}", param=name)


def _number(
    name: str, value: Any, low: float, high: float | None, *, open_low: bool = False
) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    good = good and (isinstance(value, int) or math.isfinite(value))
    is_high = good and high is not None and value > high
    if not good or is_high or value < low or (open_low and value == low):
        span = f"{'(' if open_low else '['}{low:g}, {'inf)' if high is None else f'{high:g}]'}"
        raise InvalidRequest(f"{name} must be a number in {span}; got {value!r}", param=name)


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """A mapping whose keys may be strings of digits, as JSON has them, or pairs."""
    items: Iterable[Any] = bias.items() if isinstance(bias, Mapping) else bias
    try:
        pairs = sorted(((_bias_token(token), value) for token, value in items), key=itemgetter(0))
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers; got {bias!r}", param="logit_bias"
        ) from None
    if len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(pairs)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
        )
    for _, value in pairs:
        _number("logit_bias", value, -100.0, 100.0)
    for (token, _), (following, _) in pairwise(pairs):
        if token == following:
            raise InvalidRequest(f"logit_bias names token {token} twice", param="logit_bias")
    return tuple(pairs)


def _bias_token(token: Any) -> int:
    if isinstance(token, str) and re.fullmatch(r"[0-9]{1,18}", token, re.ASCII):
        return int(token)
    if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
        return token
    raise InvalidRequest(
        f'logit_bias must have token ids as its keys, such as "42"; got {token!r}',
        param="logit_bias",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool."""

    page_size: int = 64  # tokens per page
    kv_cache_bytes: int | None = None  # None: planned from the device (build.py says how)
    kv_cache_dtype: KVCacheDtype = "auto"  # of keys and values; auto: the model's dtype
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ConfigError(f"kv_cache_dtype must be auto or int8; got {self.kv_cache_dtype!r}")
        if self.page_size < 8 or 128 % self.page_size:
            raise ConfigError(
                f"page_size must divide the attention tile of 128 tokens and be at least 8 "
                f"(8, 16, 32, 64 or 128); got {self.page_size}"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What may run together."""

    max_num_seqs: int = 32  # running sequences
    max_num_batched_tokens: int = 512  # tokens of one prefill step, riding decode rows included
    max_model_len: int | None = None  # tokens of prompt and output; None: the model's own limit
    max_retries: int = 2  # of a sequence whose steps fail, in a row, without getting further

    def __post_init__(self) -> None:
        lowest = ("max_num_seqs", 1), ("max_num_batched_tokens", 8), ("max_retries", 0)
        for name, low in lowest:
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"{name} must be at least {low}; got {value}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2; got {self.max_model_len}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which checkpoint, and how its weights are held."""

    model: str = "smollm2-135m-instruct"  # a path, a hub id, or a catalog name
    revision: str | None = None  # of a hub id
    download_dir: str | None = None  # None: the user's cache folder
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on GPU, else float32
    quantization: Quantize = "auto"  # of float weights, while loading; auto: on a CPU the fastest
    # that a certificate of ours allows, else none
    max_kl: float = 0.05  # nats per token from the original that quantized weights may cost, by
    # their certificate; infinity: whatever they cost, known or not
    chat_template: str | None = None  # a Jinja file that replaces the checkpoint's

    def __post_init__(self) -> None:
        if not self.max_kl >= 0:
            raise ConfigError(f"max_kl must be nats of at least 0, or inf; got {self.max_kl}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it, composed."""

    source: ModelSource = field(default_factory=ModelSource)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kernel_backend: KernelBackend = "auto"  # auto: pallas on a GPU, else reference
    batch_invariant: bool = True  # False: a GPU's kernels may let a row's bits follow its batch
    step_programs: Literal["auto", "layered", "fused"] = "auto"  # auto: fused on a GPU
    memory_utilization: float = 0.9  # share of a GPU's memory that may be planned
    seed: int | None = None  # of requests that name none; None: from the system
    cache_dir: str | None = None  # models and compiled programs; None: ~/.cache/jaxinfer
    show_progress: bool = True

    def __post_init__(self) -> None:
        if not MIN_MEMORY_UTILIZATION <= self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must be in [{MIN_MEMORY_UTILIZATION:g}, 1]; "
                f"got {self.memory_utilization}"
            )


def cache_folder(config: EngineConfig) -> Path:
    """Where models, compiled programs and logs of rollouts are kept."""
    return Path(config.cache_dir or Path.home() / ".cache" / "jaxinfer").expanduser()


def replace(config: EngineConfig, **changes: Any) -> EngineConfig:
    """A copy of `config` with fields changed, wherever in the tree they live.

    >>> replace(EngineConfig(), page_size=16, model="x").cache.page_size
    16

    Raises: ConfigError for a name that no part has.
    """
    for name, value in changes.items():
        config = _replace_one(config, name, value)
    return config


def _replace_one(config: EngineConfig, name: str, value: Any) -> EngineConfig:
    own = {f.name for f in dataclasses.fields(config)}
    if name in own:
        return dataclasses.replace(config, **{name: value})
    for part_name in ("source", "cache", "scheduler"):
        part = getattr(config, part_name)
        if name in {f.name for f in dataclasses.fields(part)}:
            return dataclasses.replace(
                config, **{part_name: dataclasses.replace(part, **{name: value})}
            )
    raise ConfigError(f"no configuration field is called {name!r}")
