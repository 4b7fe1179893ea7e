"""--priority-classes FILE.yaml -> classes.

interactive: {max_requests: 16, timeout: 30, api_keys: [KEY]}   # adjusts a class that exists
bulk: {priority: 3, max_output_tokens: 512}                     # adds one
batch: false                                                    # removes one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.errors import ConfigError
from jaxinfer.server.priority_class import DEFAULT_CLASSES, PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses

MAX_PRIORITY = 100


def read_classes(path: Path | None, default_name: str) -> PriorityClasses:
    """The default classes as the file changes them. Raises: ConfigError naming file and class."""
    if path is None:
        return PriorityClasses(DEFAULT_CLASSES, default_name)
    where = f"--priority-classes {path}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the text itself may hold keys
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"{where}: no YAML{line}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where}: expected a mapping of class names to their fields")
    try:
        return PriorityClasses(_changed(content, where), default_name)
    except ConfigError as error:
        message = error.message
        raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from None


def _changed(content: Mapping[Any, Any], where: str) -> tuple[PriorityClass, ...]:
    classes = {c.name: c for c in DEFAULT_CLASSES}
    for name, fields in content.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: a class's name must be text; got {name!r}")
        if fields is False:
            if classes.pop(name, None) is None:
                raise ConfigError(f"{where}: {name}: there is no such class to remove")
            continue
        classes[name] = _class(name, classes.get(name), fields, f"{where}: {name}")
    return tuple(classes.values())


def _class(name: str, known: PriorityClass | None, fields: Any, where: str) -> PriorityClass:
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{where}: expected a mapping of {', '.join(_READERS)}, or false to remove the class; "
            f"got a {type(fields).__name__}"
        )
    values: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in _READERS:
            raise ConfigError(f"{where}: {key!r} is no field; these are: {', '.join(_READERS)}")
        field, read = _READERS[key]
        try:
            values[field] = read(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    if known is None and "priority" not in values:
        raise ConfigError(f"{where}: a new class needs its priority, a whole number")
    return replace(known or PriorityClass(name, 0), **values)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected a whole number; got {value!r}")
    return value


def _priority(value: Any) -> int:
    if abs(_whole(value)) > MAX_PRIORITY:
        raise ValueError(f"expected a number from {-MAX_PRIORITY} to {MAX_PRIORITY}; got {value}")
    return value


def _count(value: Any) -> int | None:
    if value is not None and _whole(value) < 1:
        raise ValueError(f"expected a whole number of at least 1; got {value}")
    return value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"expected seconds; got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"expected seconds above 0; got {value}")
    return float(value)


def _keys(value: Any) -> tuple[str, ...]:
    """The message never shows what came: it is a secret."""
    keys: list[Any] = value if isinstance(value, list) else [value]
    for key in keys:
        if not isinstance(key, str) or not key or key != "".join(key.split()):
            raise ValueError("expected a list of keys: texts without spaces (quote digits)")
    return tuple(dict.fromkeys(keys))


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {  # key -> field, how it is read
    "priority": ("priority", _priority),
    "max_requests": ("max_requests", _count),
    "timeout": ("timeout_s", _seconds),
    "queue_timeout": ("queue_timeout_s", _seconds),
    "max_output_tokens": ("max_output_tokens", _count),
    "api_keys": ("api_keys", _keys),
}
