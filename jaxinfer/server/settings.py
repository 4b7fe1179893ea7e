"""Command line, environment and --config file -> one set of settings.

Order: flag > environment (JAXINFER_<FLAG>) > file > default. The environment is an argument here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.config import EngineConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.server.class_file import read_classes
from jaxinfer.server.edge import Edge, check_key
from jaxinfer.server.flags import ENV_PREFIX, FLAG_OF, FLAGS, Flag, names, switch
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.state import Limits

MASK = "***"
# Of these, several make one field.
_COMPOSED = ("api-key-file", "admin-key-file", "priority-classes", "default-class")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """All that serve.py needs."""

    engine: EngineConfig
    limits: Limits
    edge: Edge
    host: str
    port: int
    root_path: str
    tool_call_parser: str  # one of PARSERS
    served_model_names: tuple[str, ...]  # empty: the model's own name
    api_keys: tuple[str, ...]  # those of classes too
    classes: PriorityClasses
    batch_wait_ms: float
    shutdown_timeout_s: float
    rollout_log: Path | None  # None: in the cache folder
    standby_s: float
    memory_watch_window_s: float
    memory_watch_rise_bytes: int
    compile_only: bool
    log_level: str
    log_format: str


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, dict[str, Any]]:
    """Command line and environment -> settings, and every resolved value with secrets masked.

    Raises: ConfigError for an unknown key or a bad value in the environment or the file. A bad
        command line ends the process with exit code 2, as argparse does.
    """
    given = vars(_parser().parse_args(list(argv)))
    config_file = given.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    model = given.pop("positional_model", None)
    if model is not None:
        if "model" in given:
            raise ConfigError("the model is given twice: as an argument and with --model")
        given["model"] = _read(FLAG_OF["model"], model, "MODEL")
    values = {flag.key: flag.default for flag in FLAGS}
    if config_file:
        values.update(_from_file(Path(config_file)))
    values.update(_from_environ(environ))
    values.update(given)
    return _settings(values), {
        key: MASK if FLAG_OF[key].is_secret and value else value for key, value in values.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve.py",
        description="OpenAI-compatible server. Any flag can be JAXINFER_<FLAG> or in --config.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with flags as keys")
    for flag in FLAGS:
        if flag.read is switch:
            parser.add_argument(
                f"--{flag.name}", action=argparse.BooleanOptionalAction, help=_help(flag)
            )
        else:
            parser.add_argument(
                f"--{flag.name}",
                type=_argument(flag),
                choices=flag.choices,
                metavar=None if flag.choices else flag.key.split("_")[-1].upper(),
                help=_help(flag),
            )
    return parser


def _help(flag: Flag) -> str:
    if flag.default in (None, (), ""):
        return flag.help.replace("%", "%%")
    return f"{flag.help} (default: {flag.default})".replace("%", "%%")


def _argument(flag: Flag) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return flag.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; got {text!r}") from None

    return read


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    by_env = {flag.env: flag for flag in FLAGS}
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name == ENV_PREFIX + "CONFIG":
            continue
        if name not in by_env:
            raise ConfigError(f"environment variable {name} belongs to no flag; see --help")
        found[by_env[name].key] = _read(by_env[name], text, name)
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of flags to values")
    found: dict[str, Any] = {}
    for name, value in content.items():
        flag = FLAG_OF.get(str(name).replace("-", "_"))
        if flag is None:
            raise ConfigError(f"--config {path}: {name!r} is no flag; see --help")
        found[flag.key] = _from_yaml(flag, value, f"--config {path}: {name}")
    return found


def _from_yaml(flag: Flag, value: Any, where: str) -> Any:
    if value is None:
        return flag.default
    if isinstance(value, list) and flag.read is names:
        value = ",".join(map(str, value))
    if isinstance(value, list | dict):
        raise ConfigError(f"{where}: expected one value; got a {type(value).__name__}")
    return _read(flag, str(value), where)


def _read(flag: Flag, text: str, where: str) -> Any:
    shown = MASK if flag.is_secret else repr(text)
    try:
        value = flag.read(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; got {shown}") from None
    if flag.choices is not None and value not in flag.choices:
        raise ConfigError(f"{where}: expected one of {', '.join(flag.choices)}; got {shown}")
    return value


def _settings(values: Mapping[str, Any]) -> ServeSettings:
    parts: dict[str, dict[str, Any]] = {"engine": {}, "limits": {}, "edge": {}, "": {}}
    for flag in FLAGS:
        part, _, field_name = flag.sets.rpartition(".")
        if flag.name not in _COMPOSED:
            parts[part][field_name] = values[flag.key]
    own, edge = parts[""], parts["edge"]
    own["classes"] = read_classes(values["priority_classes"], values["default_class"])
    keys = (*_keys(values, "api-key", own["api_keys"]), *own["classes"].api_keys)
    own["api_keys"] = tuple(dict.fromkeys(keys))
    edge["admin_keys"] = _keys(values, "admin-key", edge["admin_keys"])
    if set(own["api_keys"]) & set(edge["admin_keys"]):
        raise ConfigError("a key is both an API key and an admin key; each needs its own")
    return ServeSettings(
        engine=replace(EngineConfig(), **parts["engine"]),
        limits=Limits(**parts["limits"]),
        edge=Edge(**edge),
        **own,
    )


def _keys(values: Mapping[str, Any], flag: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of a flag and of its file, each once, in their order."""
    found = dict.fromkeys(given, f"--{flag}")
    path: Path | None = values[f"{flag}-file".replace("-", "_")]
    if path is not None:
        found |= _keys_of_file(path, f"--{flag}-file {path}")
    for key, where in found.items():
        check_key(key, where)
    return tuple(found)


def _keys_of_file(path: Path, where: str) -> dict[str, str]:
    """Each key, and where it stands."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    found = {
        line.strip(): f"{where}, line {number}"
        for number, line in enumerate(lines, 1)
        if line.strip()
    }
    if not found:
        raise ConfigError(f"{where}: the file holds no key")
    return found
