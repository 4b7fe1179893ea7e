"""Laboratories for each GPU, and what they found: every program is compiled once per session."""

from __future__ import annotations

import importlib.util

import pytest

from bench.aot.compiler import prepare_environment
from bench.aot.laboratory import Laboratory
from bench.aot.targets import TARGETS
from bench.aot.toolchain import Toolchain
from tests.aot.findings import Findings

PLUGIN = "jax_plugins.xla_cuda12"

prepare_environment()  # before anything asks JAX for its devices


@pytest.fixture(scope="session", params=TARGETS)
def findings(request: pytest.FixtureRequest) -> Findings:
    """On one GPU. Where the plugin is there but does not work, this is an error, not a skip."""
    if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(PLUGIN):
        pytest.skip(f"needs {PLUGIN}: `make test-aot` installs it")
    return Findings(Laboratory(TARGETS[request.param], Toolchain.find()))
