"""Laboratories for each GPU, and what they found: every program is compiled once per session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from bench.aot.cases import Case
from bench.aot.compiler import prepare_environment
from bench.aot.laboratory import Laboratory
from bench.aot.targets import TARGETS
from bench.aot.toolchain import Toolchain
from tests.aot.findings import Findings

PLUGIN = "jax_plugins.xla_cuda12"


@pytest.fixture(scope="session", params=TARGETS)
def findings(request: pytest.FixtureRequest) -> Iterator[Findings]:
    """On one GPU. Where the plugin is there but does not work, this is an error, not a skip."""
    if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(PLUGIN):
        pytest.skip(f"needs {PLUGIN}: `make test-aot` installs it")
    prepare_environment()  # before anything asks JAX for its devices
    laboratory = Laboratory(TARGETS[request.param], Toolchain.find())
    found = Findings(laboratory, _expected(request.session))
    yield found
    found.close()


def _expected(session: pytest.Session) -> list[Case]:
    """The cases of the tests that were chosen, each once."""
    found: dict[str, Case] = {}
    for item in session.items:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("case") if callspec is not None else None
        if isinstance(case, Case):
            found.setdefault(case.name, case)
    return list(found.values())
