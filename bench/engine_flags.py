"""Flags of the measures that load a model: they read as serve.py's do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args

from jaxinfer import EngineConfig
from jaxinfer.config import KernelBackend, KVCacheDtype, Quantize
from jaxinfer.server.flags import count, size_in_bytes

DEFAULTS = EngineConfig()
LIMITS = ("max_num_batched_tokens", "max_num_seqs")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model, its limits, its KV pool, and the kernels."""
    parser.add_argument(
        "--model", default=DEFAULTS.source.model, help="path, hub id or catalog name"
    )
    for name in LIMITS:
        default = getattr(DEFAULTS.scheduler, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=count,
            default=default,
            metavar="N",
            help=f"as of serve.py (default: {default})",
        )
    parser.add_argument(
        "--kv-cache-memory",
        dest="kv_cache_bytes",
        type=size_in_bytes,
        metavar="BYTES",
        help="of the KV pool, such as 512MiB (planned)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default=DEFAULTS.cache.kv_cache_dtype,
        help=f"as of serve.py (default: {DEFAULTS.cache.kv_cache_dtype})",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantize),
        default=DEFAULTS.source.quantization,
        help=f"as of serve.py (default: {DEFAULTS.source.quantization})",
    )
    parser.add_argument(
        "--kernel-backend",
        choices=get_args(KernelBackend),
        default=DEFAULTS.kernel_backend,
        help=f"as of serve.py (default: {DEFAULTS.kernel_backend})",
    )
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.batch_invariant,
        help="as of serve.py",
    )


def engine_fields(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Fields of EngineConfig: what these flags, and those of `more`, were given."""
    names = (
        "model",
        *LIMITS,
        "kv_cache_bytes",
        "kv_cache_dtype",
        "quantization",
        "kernel_backend",
        "batch_invariant",
        *more,
    )
    return {name: given[name] for name in names if given[name] is not None}
