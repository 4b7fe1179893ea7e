"""The command line of `python -m jaxinfer versions`.

No JAX. What a value means, version_fields.py knows; what is done, version_command.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from jaxinfer.config import Quantize
from jaxinfer.version_fields import GUARDS, guard, schedule, seconds, share
from jaxinfer.version_order import SwapMode

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "JAXINFER_ADMIN_KEY"

Result = TypeVar("Result")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A bad command line ends the process with exit code 2, as argparse does."""
    top = argparse.ArgumentParser(prog="python -m jaxinfer", description="Ask a running server.")
    rooms = top.add_subparsers(dest="room", required=True)
    parser = rooms.add_parser("versions", help="versions of the weights, under traffic")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_load(_command(commands, "load", "load another version, and let it have a share"))
    _command(commands, "list", "versions, the rollout and its evidence")
    _add_watch(_command(commands, "watch", "decisions as they come, until Ctrl-C"))
    for name, about in (
        ("promote", "make the canary, or a named version, the stable one"),
        ("rollback", "back to the version before, at once"),
    ):
        _add_version(_command(commands, name, about), is_needed=False)
    _add_version(_command(commands, "drop", "free what a version holds"), is_needed=True)
    _add_reload(_command(commands, "reload", "read the same version again, in a quiet moment"))
    return top.parse_args(argv)


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--admin-key", metavar="KEY", help=f"or the environment's {KEY_VARIABLE}")
    keys.add_argument("--admin-key-file", type=Path, metavar="FILE", help="its first line")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="path, hub id, .gguf file or catalog name")
    add("--revision", help="of a hub id")
    add("--expect", metavar="HASH", help="version that it must be")
    add(
        "--quantization",
        choices=get_args(Quantize),
        help="of float weights (as the stable version)",
    )
    add(
        "--max-kl",
        type=float,
        metavar="X",
        help="nats that quantized weights may cost (as the server)",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--share", type=_read(share), metavar="X", help="10%% or 0.1; it stays until you promote"
    )
    way.add_argument(
        "--schedule",
        type=_read(schedule),
        metavar="1%:60s:50,...",
        help="stages SHARE:HOLD:REQUESTS; promotes by itself behind the last",
    )
    way.add_argument("--promote", action="store_true", help="all calls at once, no canary")
    add(
        "--guard",
        type=_read(guard),
        metavar="NAME=X,...",
        help=f"what rolls back: {', '.join(GUARDS)}; off for none",
    )
    add("--shadow-share", type=_read(share), metavar="X", help="of calls that both compute")
    add("--swap-mode", choices=get_args(SwapMode), help="stream: without room for both")
    add("--recorded", type=Path, metavar="FILE", help="JSON lines of prompt or messages, and text")
    add("--wait", action="store_true", help="until it is loaded")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--until-end", action="store_true", help="end with the rollout: 0 if it was promoted"
    )


def _add_version(parser: argparse.ArgumentParser, *, is_needed: bool) -> None:
    about = "its hash, or the beginning of it"
    if not is_needed:
        about += " (the one that is tried)"
    parser.add_argument("version", nargs=None if is_needed else "?", help=about)


def _add_reload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", nargs="?", help="its hash, or its beginning (the stable one)")
    parser.add_argument(
        "--within", type=_read(seconds), metavar="TIME", help="how long a quiet moment is sought"
    )


def _read(read: Callable[[str], Result]) -> Callable[[str], Result]:
    """So that argparse shows what is wrong."""

    def checked(text: str) -> Result:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
