"""The routes for operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from jaxinfer.server.edge import Edge
from tests.server.house import House, open_house

KEY = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def admin() -> Iterator[House]:
    with open_house(edge=Edge(admin_keys=("boss",))) as house:
        yield house


def test_the_log_level_can_be_changed_while_it_serves(admin: House):
    names = ("jaxinfer", "checkpoints", "pallas_kernels")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for level in ("debug", "error"):
            reply = admin.post("/admin/log-level", {"level": level}, headers=KEY)
            assert reply.json() == {"level": level}
            assert logging.getLogger("jaxinfer").level == getattr(logging, level.upper())
        reply = admin.post("/admin/log-level", {"level": "loud"}, headers=KEY)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "level"
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def test_a_flushed_cache_gives_its_pages_back_and_is_filled_again(admin: House):
    def cached_tokens() -> int:
        reply = admin.complete("a" * 40, max_tokens=1).json()
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached_tokens(), cached_tokens()) == (0, 32)  # pages of 8; the last is computed
    admin.wait_until_idle()
    num_cached = admin.engine.pool_stats.pages_cached
    assert num_cached >= 4
    assert admin.post("/admin/cache/flush", headers=KEY).json() == {"num_pages": num_cached}
    admin.wait_until(lambda: admin.engine.pool_stats.pages_cached == 0)
    assert (cached_tokens(), cached_tokens()) == (0, 32)
    admin.wait_until_idle()


def test_a_flush_while_requests_run_changes_no_answer(admin: House):
    alone = admin.complete("b" * 40, max_tokens=40).json()["choices"]
    admin.runner.step_s = 0.002
    try:
        with admin.client.stream(
            "POST",
            f"{admin.url}/v1/completions",
            json={"prompt": "b" * 40, "max_tokens": 40, "stream": True},
        ) as reply:
            lines = reply.iter_lines()
            text = next(lines)
            for _ in range(5):
                assert admin.post("/admin/cache/flush", headers=KEY).status_code == 200
            text += "".join(lines)
    finally:
        admin.runner.step_s = 0.0
    assert alone[0]["text"] == "".join(part.split('"')[0] for part in text.split('"text":"')[1:])
    admin.wait_until_idle()


def test_a_flush_of_an_engine_that_has_died_is_a_503():
    with open_house(edge=Edge(admin_keys=("boss",))) as house:
        house.loop.call_soon_threadsafe(setattr, house.engine, "_stopping", True)
        house.loop.call_soon_threadsafe(house.engine._inbox.wake)
        house.wait_until(lambda: not house.engine.is_alive)
        assert house.post("/admin/cache/flush", headers=KEY).status_code == 503
