"""One shared server for tests that leave it as it was; others open their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.house import House, open_house


@pytest.fixture(scope="package")
def shared_house() -> Iterator[House]:
    with open_house() as house:
        yield house


@pytest.fixture
def house(shared_house: House) -> Iterator[House]:
    """The shared server, checked after each test: idle, pages back, alive."""
    yield shared_house
    shared_house.wait_until_idle()
    assert shared_house.engine.is_alive
