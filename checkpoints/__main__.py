"""`python -m checkpoints inspect|quantize|compare|orbax|safetensors`: flags -> what to do.

Exit codes are serve.py's: 1 for what is wrong with a checkpoint or happens on the way, 2 for a
command line or a file of texts that can't be used. inspect: 0 if the checkpoint would load, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import GROUP_SIZES, HEAD_FORMAT, WeightFormat
from checkpoints.resolve import resolve
from checkpoints.save_orbax import save_orbax
from checkpoints.save_safetensors import save_safetensors
from jaxinfer.config import EngineConfig, KVCacheDtype, ModelSource, Quantize
from jaxinfer.errors import ConfigError, JaxInferError
from jaxinfer.inspection.command import InspectOrder, inspect_checkpoint
from jaxinfer.quantization.certification import REPORT_FILE, Order, certify
from jaxinfer.quantization.compare_command import CompareOrder, compare_checkpoints
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.recipe import Method, Recipe
from jaxinfer.quantization.report import worst
from jaxinfer.runtime.weight_choice import ON_THE_FLY
from jaxinfer.server.flags import count, whole

EXIT_FAILURE, EXIT_BAD_FLAGS = 1, 2
DTYPES = ("auto", "float32", "bfloat16")
MEASURING = Measuring()
BITS = {"int8": 8, "int4": 4}
GROUPS: dict[str, int | None] = {str(size): size for size in GROUP_SIZES} | {"none": None}
DEFAULT_GROUP = {"int8": "none", "int4": "128"}
ACTIVATIONS = {"float": "float", "int8": "int8", "int8-static": "int8_static"}
FORMS = {"orbax": save_orbax, "safetensors": save_safetensors}
HEADS = {"int8": HEAD_FORMAT, "float": None}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A bad command line ends the process with exit code 2, as argparse does."""
    top = argparse.ArgumentParser(
        prog="python -m checkpoints",
        description="See what a model is, quantize it, and measure what that costs.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    _add_inspect(commands.add_parser("inspect", help="tell what a checkpoint is, and if it loads"))
    _add_quantize(commands.add_parser("quantize", help="make a quantized checkpoint, certified"))
    _add_compare(commands.add_parser("compare", help="measure one checkpoint against another"))
    for form in FORMS:
        _add_copy(commands.add_parser(form, help=f"write a checkpoint again, in {form}'s form"))
    return top.parse_args(argv)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="path, hub id or catalog name")
    add("--json", action="store_true", help="for programs, with every tensor")
    add("--dtype", choices=DTYPES, default="auto", help="as serve.py's (default: auto)")
    add("--quantization", choices=get_args(Quantize), default="auto", help="as serve.py's")
    add("--memory", type=count, metavar="BYTES", help="of the machine that is to load it (this)")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show bars")


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="path, hub id or catalog name")
    add("--out", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    add("--weights", choices=BITS, default="int8", help="(default: int8)")
    add("--group-size", choices=GROUPS, help="inputs that share a scale (int8: none, int4: 128)")
    add("--asymmetric", action="store_true", help="a zero point for each scale")
    add("--activations", choices=ACTIVATIONS, default="float", help="(default: float)")
    add("--head", choices=HEADS, default="int8", help="embedding and head (default: int8)")
    add("--method", choices=get_args(Method), default="auto", help="(default: auto)")
    add(
        "--channel-scaling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="move what is hard to round between activations and weights, where that is exact",
    )
    add("--kv-keys", action="store_true", help="scale keys for an int8 KV cache, by channel")
    add(
        "--keep-8bit",
        type=float,
        metavar="X",
        help="8 bits for products whose relative error with 4 is above X, such as 0.1",
    )
    add("--calibration", type=Path, metavar="FILE.jsonl", help="texts or chats (a built-in set)")
    add("--max-length", type=count, metavar="N", help="tokens that a calibration text is cut to")
    _add_measuring(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs=2, metavar="MODEL", help="the original and the other, as in quantize")
    add("--out", type=Path, required=True, metavar="FILE", help="the report, .html or .md")
    add("--prompts", type=Path, metavar="FILE", help="one a line, text or JSON (the standard ones)")
    add("--quantization", choices=ON_THE_FLY, help="round the other's weights while loading")
    add(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="of the other's keys and values (default: auto)",
    )
    add("--certificate", type=Path, metavar="FILE.json", help="write one of what --quantization is")
    _add_measuring(parser)


def _add_copy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="path, hub id or catalog name, quantized or not")
    add("--out", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show bars")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--held-out", type=Path, metavar="FILE.jsonl", help="texts to measure on (built-in ones)")
    least = MEASURING.least_tokens
    add("--least-tokens", type=count, default=least, metavar="N", help=f"(default: {least:,})")
    window = MEASURING.window
    add("--window", type=count, default=window, metavar="N", help=f"tokens (default: {window})")
    add("--seed", type=whole, default=MEASURING.seed, help=f"(default: {MEASURING.seed})")
    add(
        "--answer-tokens",
        type=count,
        default=MEASURING.num_answer_tokens,
        metavar="N",
        help=f"of a prompt's answer, at most (default: {MEASURING.num_answer_tokens})",
    )
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show bars")


def _measuring(given: argparse.Namespace) -> Measuring:
    return Measuring(
        given.held_out,
        given.least_tokens,
        given.window,
        given.seed,
        given.answer_tokens,
        given.progress,
    )


def order_of(given: argparse.Namespace) -> Order:
    """Raises: ConfigError for what can't be done."""
    try:
        weights = WeightFormat(
            bits=BITS[given.weights],  # type: ignore[arg-type]
            group_size=GROUPS[given.group_size or DEFAULT_GROUP[given.weights]],
            has_zero=given.asymmetric,
            activations=ACTIVATIONS[given.activations],  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    recipe = Recipe(
        weights=weights,
        head=HEADS[given.head],
        method=given.method,
        migrate=given.channel_scaling,
        migrate_keys=given.kv_keys,
        keep_at_8_bits=given.keep_8bit,
    )
    return Order(recipe, given.calibration, given.max_length, _measuring(given))


def compare_order_of(given: argparse.Namespace) -> CompareOrder:
    """Raises: ConfigError for what can't be done."""
    return CompareOrder(
        models=tuple(given.models),
        out=given.out,
        prompts=given.prompts,
        rounded_to=given.quantization,
        kv_cache=given.kv_cache_dtype,
        certificate=given.certificate,
        measuring=_measuring(given),
    )


def _opened(given: argparse.Namespace) -> closing[Checkpoint]:
    """The model, unless the folder that it is for is there: then nothing is fetched."""
    if given.out.exists():
        raise CheckpointError(
            f"{given.out}: expected a folder that is not there yet; take another name"
        )
    return closing(open_checkpoint(resolve(given.model, show_progress=given.progress)))


def _inspect(given: argparse.Namespace) -> int:
    source = ModelSource(given.model, dtype=given.dtype, quantization=given.quantization)
    config = EngineConfig(source, show_progress=given.progress)
    found = inspect_checkpoint(InspectOrder(config, given.memory))
    if given.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print("\n".join(found.lines()))
    return 0 if found.would_load else EXIT_FAILURE


def _quantize(given: argparse.Namespace) -> None:
    order, out = order_of(given), given.out
    with _opened(given) as checkpoint:
        certificate = certify(checkpoint, given.model, out, order)
    print("Products that suffer most (relative error; by round-to-nearest):")
    for error in worst(certificate.layer_errors):
        print(
            f"  {error.product:34}{error.error:8.4f} ({error.error_of_nearest:.4f})  {error.format}"
        )
    for site in certificate.outliers:
        print(f"Outliers at {site}")
    print(certificate.line())
    print(f"Wrote {out}; {out / REPORT_FILE} tells the rest.")


def _compare(given: argparse.Namespace) -> None:
    order = compare_order_of(given)
    print(compare_checkpoints(order).line())
    print(f"Wrote {order.out}")


def _copy(given: argparse.Namespace) -> None:
    with _opened(given) as checkpoint:
        FORMS[given.command](given.out, checkpoint)
    print(f"Wrote {given.out}")


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "inspect": _inspect,
    "quantize": _quantize,
    "compare": _compare,
    **dict.fromkeys(FORMS, _copy),
}


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    given, start = parse(argv), time.monotonic()
    try:
        code = COMMANDS[given.command](given)
    except (JaxInferError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_FLAGS if isinstance(error, ConfigError) else EXIT_FAILURE
    if code is not None:
        return code
    print(f"{time.monotonic() - start:,.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
