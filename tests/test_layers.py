"""The one-way order of DESIGN: a room imports only rooms to its right, and the host half no JAX."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER: tuple[dict[str, str], ...] = (  # left to right; room -> its modules, below jaxinfer/
    {
        "serve": "serve",
        "front": "__init__",
        "tool": "tool",
        "command": "__main__ version_command version_flags version_fields version_report "
        "admin_client",
    },
    {"server": "server", "offline": "offline"},
    {
        "async_engine": "async_engine engine_inbox batch_window request_stream observer",
        "rollout": "rollout rollout_log canary",
        "build": "build assembly found_model second_engine loaded_versions fitting_version "
        "own_engine_version version_reading version_loading inspection",
        "quantization": "quantization",
    },
    {
        "engine": "engine choice outputs request_rules text_cap ending_errors versions new_version "
        "flights untold",
        "runtime": "runtime",
        "guidance": "guidance grammar_trial forced",
    },
    {
        "models": "models",
        "scheduling": "scheduling",
        "tokenizer": "tokenizer token_bytes control_tokens chat_messages chat_template detokenizer "
        "sentence_end",
    },
    {
        **{room: room for room in ("errors", "heap", "stats", "version")},
        "config": "config guided constraint version_order",
        **{room: room for room in ("pallas_kernels", "checkpoints")},
    },
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
ROOM = {
    module: room for rooms in ORDER for room, names in rooms.items() for module in names.split()
}
BETWEEN_SIBLINGS = {("config", "errors")}  # a bad value is refused with our own errors
LONERS = ("pallas_kernels", "checkpoints")  # import nothing of ours, whatever the order allows
DEVICE = (
    "build",
    "offline",
    "quantization",
    "runtime",
    "models",
    "tool",
)  # the rooms that may import JAX
FILES = [
    ROOT / "serve.py",
    *(f for p in ("jaxinfer", *LONERS) for f in sorted((ROOT / p).rglob("*.py"))),
]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def room_of(module: str) -> str:
    """jaxinfer.server.sse -> server; checkpoints.load -> checkpoints; jaxinfer -> front."""
    if module == "checkpoints.__main__":  # an entry point, as serve.py
        return "tool"
    top, *rest = module.split(".")
    name = (rest[0] if rest else "__init__") if top == "jaxinfer" else top
    assert name in ROOM, f"{module}: give it a room in ORDER"
    return ROOM[name]


def imports_of(path: Path) -> Iterator[str]:
    """Of the whole file: at the top, in functions, and for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            if node.module == "jaxinfer":  # from jaxinfer import engine
                yield from (f"jaxinfer.{alias.name}" for alias in node.names)
            else:
                yield node.module


def is_allowed(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in BETWEEN_SIBLINGS:
        return True
    return importer not in LONERS and LEVEL[importer] < LEVEL[imported]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_imports_only_to_its_right(path: Path):
    for imported in imports_of(path):
        if imported.split(".")[0] in ("jaxinfer", "serve", *LONERS):
            pair = room_of(module_of(path)), room_of(imported)
            assert is_allowed(*pair), f"{pair[0]} imports {pair[1]} ({imported})"


@pytest.mark.parametrize(
    "pair", [("engine", "server"), ("engine", "runtime"), ("checkpoints", "errors")]
)
def test_the_order_forbids_upward_sideways_and_loners_imports(pair: tuple[str, str]):
    assert not is_allowed(*pair)


def test_the_host_half_is_importable_without_jax_and_flax():
    host = [m for m in map(module_of, FILES) if room_of(m) not in (*DEVICE, *LONERS)]
    assert {"serve", "jaxinfer.engine", "jaxinfer.server.app"} <= set(host)
    code = (
        "import importlib, sys; sys.modules.update(jax=None, jaxlib=None, flax=None)\n"
        f"for name in {host!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def spelled(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_every_imported_library_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {spelled(re.split(r"[^\w-]", line)[0]) for line in project["dependencies"]}
    distributions = metadata.packages_distributions()
    for path in FILES:
        for imported in imports_of(path):
            top = imported.split(".")[0]
            if top not in ("jaxinfer", *LONERS) and top not in sys.stdlib_module_names:
                found = map(spelled, distributions.get(top, ()))
                assert declared & set(found), f"{module_of(path)} imports {top}"
