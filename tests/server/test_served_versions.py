"""Which model a call gets, and until when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.server.served_versions import ServedVersions

NUM_KEYS = 10_000


def model(version: str, engine: Any = None) -> Any:
    return SimpleNamespace(version=version, engine=engine or SimpleNamespace(is_alive=True))


def versions(*others: str) -> ServedVersions:
    """v1 is the stable one."""
    found = ServedVersions()
    found.serve(model("v1"))
    for name in others:
        found.add(model(name))
    return found


def keys_of(found: ServedVersions, version: str) -> set[int]:
    return {i for i in range(NUM_KEYS) if found.choose(f"user {i}").version == version}


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
def test_a_canary_gets_its_share_of_the_keys(share: float):
    found = versions("v2")
    found.try_out("v2", share)
    deviation = (NUM_KEYS * share * (1 - share)) ** 0.5
    assert abs(len(keys_of(found, "v2")) - NUM_KEYS * share) < 4 * deviation


def test_shares_of_0_and_1_are_nobody_and_all():
    found = versions("v2")
    found.try_out("v2", 0.0)
    assert not keys_of(found, "v2")
    found.try_out("v2", 1.0)
    assert not keys_of(found, "v1")


def test_who_had_the_canary_keeps_it_while_its_share_grows():
    found = versions("v2")
    had: set[int] = set()
    for share in (0.01, 0.05, 0.25, 1.0):
        found.try_out("v2", share)
        has = keys_of(found, "v2")
        assert had < has
        had = has


def test_another_canary_tries_other_keys_first():
    found = versions("v2", "v3")
    found.try_out("v2", 0.1)
    second = keys_of(found, "v2")
    found.try_out("v3", 0.1)
    both = second & keys_of(found, "v3")
    assert len(both) < 0.02 * NUM_KEYS  # a tenth of a tenth


def test_a_pin_goes_before_any_share_and_an_unknown_one_is_told_what_there_is():
    found = versions("v2", "v3")
    found.try_out("v2", 1.0)
    assert found.choose("k", "v1").version == "v1"
    assert found.choose("k", "v3").version == "v3"
    with pytest.raises(InvalidRequest, match="'v9' is not served; there is v1, v2, v3") as caught:
        found.choose("k", "v9", param="model")
    assert caught.value.param == "model"


def test_a_canary_whose_engine_has_died_gets_no_new_calls_but_those_that_name_it():
    found = versions("v2")
    found.try_out("v2", 1.0)
    assert found.canary is not None
    found.canary.engine.is_alive = False  # type: ignore[misc]
    assert found.choose("k").version == "v1"
    assert found.choose("k", "v2").version == "v2"


def test_roles_and_shares():
    found = versions("v2", "v3")
    found.try_out("v2", 0.25)
    assert [found.role_of(v) for v in ("v1", "v2", "v3")] == ["stable", "canary", "standby"]
    assert [found.share_of(v) for v in ("v1", "v2", "v3")] == [0.75, 0.25, 0.0]
    found.serve(model("v2"))
    assert [found.role_of(v) for v in ("v1", "v2", "v3")] == ["standby", "stable", "standby"]
    assert [found.share_of(v) for v in ("v1", "v2", "v3")] == [0.0, 1.0, 0.0]
    found.remove("v1")
    assert found.role_of("v1") == "leaving"


def test_a_model_that_is_taken_away_is_here_until_its_last_call_has_ended():
    async def go() -> None:
        found = versions("v2")
        leaving = found.choose("k", "v2")
        ended: list[str] = []

        async def wait() -> None:
            await found.wait_until_unused("v2")
            ended.append("v2")

        with found.call(leaving), found.call(found.choose("k")):
            with found.call(leaving):
                found.remove("v2")
                waiting = asyncio.create_task(wait())
                await asyncio.sleep(0)
                assert found.num_calls("v2") == 2
                with pytest.raises(InvalidRequest):
                    found.choose("k", "v2")
            await asyncio.sleep(0.01)
            assert (ended, [m.version for m in found.here]) == ([], ["v1", "v2"])
        await asyncio.wait_for(waiting, 5)
        assert (ended, [m.version for m in found.here]) == (["v2"], ["v1"])

    asyncio.run(go())


def test_engines_are_counted_once_and_as_long_as_their_models_are_here():
    one, two = SimpleNamespace(is_alive=True), SimpleNamespace(is_alive=True)
    found = ServedVersions()
    found.serve(model("v1", one))
    found.add(model("v2", one))
    found.add(model("v3", two))
    assert found.engines == (one, two)
    found.remove("v3")
    assert found.engines == (one, two)
    asyncio.run(found.wait_until_unused("v3"))
    assert found.engines == (one,)
