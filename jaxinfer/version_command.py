"""`python -m jaxinfer versions ...`: an operator's words -> the admin API of a running server.

No JAX: it starts at once. Exit codes: 0 done, 1 refused, failed or nobody there, 2 a command line
that cannot be used.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from jaxinfer.admin_client import AdminClient
from jaxinfer.errors import ConfigError, JaxInferError
from jaxinfer.server.edge import check_key
from jaxinfer.version_flags import KEY_VARIABLE
from jaxinfer.version_report import News, goes_back, is_under_way, report_lines

EXIT_OK, EXIT_FAILURE, EXIT_BAD_FLAGS = 0, 1, 2
LOOK_EVERY_S = 1.0

Sleep = Callable[[float], None]


def run(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    *,
    out: TextIO,
    err: TextIO,
    sleep: Sleep = time.sleep,
) -> int:
    """Returns: the exit code."""
    try:
        client = AdminClient(args.url, _key(args, environment))
        return _VersionCommand(client, args, out, sleep).run()
    except ConfigError as error:
        print(f"error: {error}", file=err)
        return EXIT_BAD_FLAGS
    except JaxInferError as error:
        print(f"error: {error}", file=err)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_OK if args.command == "watch" else EXIT_FAILURE


def _key(args: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Raises: ConfigError."""
    key, where = args.admin_key, "--admin-key"
    if args.admin_key_file is not None:
        where = f"--admin-key-file {args.admin_key_file}"
        key = _text_of(args.admin_key_file, where).strip().partition("\n")[0].strip()
    elif key is None:
        key, where = environment.get(KEY_VARIABLE), KEY_VARIABLE
    if key is not None:
        check_key(key, where)
    return key


def _text_of(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None


class _VersionCommand:
    """One command."""

    def __init__(self, client: AdminClient, args: argparse.Namespace, out: TextIO, sleep: Sleep):
        self._client = client
        self._args = args
        self._out = out
        self._sleep = sleep
        self._news = News()

    def run(self) -> int:
        commands: Mapping[str, Callable[[], int]] = {
            "list": self._list,
            "load": self._load,
            "watch": self._watch,
            "promote": self._act,
            "rollback": self._act,
            "reload": self._reload,
            "drop": self._drop,
        }
        return commands[self._args.command]()

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _list(self) -> int:
        for line in report_lines(self._client.versions()):
            self._say(line)
        return EXIT_OK

    def _load(self) -> int:
        self._tell(self._client.load(body_of(self._args)))
        while self._args.wait:
            self._sleep(LOOK_EVERY_S)
            rollout = self._look()["rollout"]
            if rollout is None or rollout["phase"] != "loading":
                return _exit_code(rollout)
        return EXIT_OK

    def _watch(self) -> int:
        while True:
            rollout = self._look()["rollout"]
            if self._args.until_end and not is_under_way(rollout):
                return _exit_code(rollout)
            self._sleep(LOOK_EVERY_S)

    def _act(self) -> int:
        version = self._named(self._args.version)
        self._tell(self._client.act(version, self._args.command))
        return EXIT_OK

    def _reload(self) -> int:
        version = self._named(self._args.version, role="stable")
        report = self._client.reload(version, within_s=self._args.within)
        self._tell(report)
        self._say(f"{version}: reload: {report['reload']}")
        return EXIT_OK

    def _drop(self) -> int:
        self._tell(self._client.drop(self._named(self._args.version)))
        return EXIT_OK

    def _look(self) -> dict[str, Any]:
        """The server's report; says what is new in it."""
        report = self._client.versions()
        self._tell(report)
        return report

    def _tell(self, report: Mapping[str, Any]) -> None:
        for line in self._news.lines(report):
            self._say(line)

    def _named(self, given: str | None, *, role: str | None = None) -> str:
        """The version that begins with `given`; None: that of the rollout, or of `role`.

        Raises: ConfigError if there is none, or are several.
        """
        report = self._client.versions()
        list(self._news.lines(report))  # what is known before is no news
        there = {card["version"]: None for card in report["versions"]}
        if given is not None:
            found = [version for version in there if version.startswith(given)]
        elif role is not None:
            found = [card["version"] for card in report["versions"] if card["role"] == role]
        elif goes_back(report["rollout"]):
            found = [report["rollout"]["version"]]
        else:  # a load that failed is behind the promotion that can still be taken back
            found = _taken_back(report["versions"]) if self._args.command == "rollback" else []
        if len(found) == 1:
            return found[0]
        wanted = "no version is tried" if given is None else f"{given!r} begins none, or several"
        raise ConfigError(f"{wanted}; there is {', '.join(there) or 'none'}")


def _taken_back(cards: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stable version, while the one before it stands by."""
    by_role = {card["role"]: card["version"] for card in cards}
    return [by_role["stable"]] if "standby" in by_role else []


def _exit_code(rollout: Mapping[str, Any] | None) -> int:
    ended_badly = rollout is not None and rollout["phase"] in ("failed", "rolled_back")
    return EXIT_FAILURE if ended_badly else EXIT_OK


def body_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of POST /admin/versions that `load` names. Raises: ConfigError."""
    given = {
        "model": args.model,
        "revision": args.revision,
        "version": args.expect,
        "quantization": args.quantization,
        "max_kl": "inf" if args.max_kl == math.inf else args.max_kl,
        "share": args.share,
        "schedule": args.schedule,
        "promote": args.promote or None,
        "guard": args.guard,
        "shadow_share": args.shadow_share,
        "swap_mode": args.swap_mode,
        "recorded": _recorded(args.recorded),
    }
    return {name: value for name, value in given.items() if value is not None}


def _recorded(path: Path | None) -> list[Any] | None:
    """Raises: ConfigError."""
    if path is None:
        return None
    where = f"--recorded {path}"
    lines = _text_of(path, where).splitlines()
    try:
        return [msgspec.json.decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: expected one JSON object per line: {error}") from None
