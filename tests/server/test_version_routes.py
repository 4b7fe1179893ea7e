"""The routes of versions: what they read, what they refuse, and what they pass on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from jaxinfer.canary.guard import Guard
from jaxinfer.canary.schedule import DEFAULT_STAGES, Stage
from jaxinfer.errors import Conflict, InvalidRequest
from jaxinfer.server.edge import Edge
from jaxinfer.server.smoke import Recorded
from tests.server.house import House, open_house
from tests.server.scripted_rollouts import ScriptedRollouts, rollout, version

KEY = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def locked() -> Iterator[House]:
    with open_house(api_keys=("user",), edge=Edge(admin_keys=("boss",))) as house:
        yield house


@pytest.fixture
def rollouts(locked: House) -> ScriptedRollouts:
    scripted = ScriptedRollouts()
    locked.state.rollouts = cast(Any, scripted)
    return scripted


def load(house: House, **fields: Any) -> Any:
    return house.post("/admin/versions", {"model": "m", **fields}, headers=KEY)


def refused(reply: Any, status: int, param: str | None) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    return error["message"]


def test_only_the_model_is_needed(locked: House, rollouts: ScriptedRollouts):
    reply = load(locked)
    assert reply.status_code == 202
    assert reply.json()["stable"] == "v1"
    ((_, order, plan, recorded, at_once),) = rollouts.told
    assert order.source == replace(rollouts.stable_source, model="m")  # the rest is the server's
    assert (order.expected_version, order.swap_mode) == (None, "beside")
    assert (plan.stages, plan.promotes, plan.guard) == (DEFAULT_STAGES, True, Guard())
    assert (recorded, at_once) == ((), False)


def test_a_share_alone_stays_until_somebody_promotes(locked: House, rollouts: ScriptedRollouts):
    assert load(locked, share=0.1).status_code == 202
    plan = rollouts.told[0][2]
    assert (plan.stages, plan.promotes) == ((Stage(0.1),), False)


def test_every_field_arrives(locked: House, rollouts: ScriptedRollouts):
    reply = load(
        locked,
        revision="r1",
        quantization="none",
        max_kl="inf",
        version="abc",
        schedule=[{"share": 0.01, "hold_s": 60, "min_requests": 50}, {"share": 0.5}],
        guard={"false_alarm_rate": 0.001, "max_slowdown": None, "max_kl": 0.1},
        shadow_share=0.2,
        swap_mode="stream",
        recorded=[
            {"prompt": "a", "text": "bc"},
            {"messages": [{"role": "user", "content": "x"}], "text": "y", "max_tokens": 3},
        ],
    )
    assert reply.status_code == 202
    ((_, order, plan, recorded, at_once),) = rollouts.told
    source = order.source
    assert (source.revision, source.quantization, source.max_kl) == ("r1", "none", float("inf"))
    assert (order.expected_version, order.swap_mode) == ("abc", "stream")
    assert plan.stages == (Stage(0.01, 60.0, 50), Stage(0.5))
    assert plan.guard == Guard(false_alarm_rate=0.001, max_slowdown=None, max_kl=0.1)
    assert (plan.shadow_share, plan.promotes, at_once) == (0.2, True, False)
    chat = ({"role": "user", "content": "x"},)
    assert recorded == (Recorded("a", "bc", 32), Recorded(chat, "y", 3))


def test_promote_takes_it_in_without_a_canary(locked: House, rollouts: ScriptedRollouts):
    assert load(locked, promote=True).status_code == 202
    assert (rollouts.told[0][2].stages, rollouts.told[0][4]) == ((), True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"share": -0.1}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": "10%"}, "share"),
        ({"share": True}, "share"),
        ({"shadow_share": 2}, "shadow_share"),
        ({"schedule": []}, "schedule"),
        ({"schedule": [{"share": 5}]}, "share"),
        ({"schedule": [{"share": 0.1, "hold_s": -1}]}, "hold_s"),
        ({"schedule": [{"share": 0.1, "hold": 60}]}, "schedule"),
        ({"schedule": [{"share": 0.5}, {"share": 0.1}]}, "stages"),
        ({"share": 0.1, "schedule": [{"share": 0.1}]}, "schedule"),
        ({"share": 0.1, "promote": True}, "promote"),
        ({"promote": True, "guard": {}}, "promote"),
        ({"guard": {"max_slowdwon": None}}, "guard"),
        ({"guard": {"false_alarm_rate": None}}, "guard"),
        ({"guard": {"false_alarm_rate": 2}}, "false_alarm_rate"),
        ({"quantization": "int5"}, "quantization"),
        ({"max_kl": -1}, "max_kl"),
        ({"max_kl": "lots"}, "max_kl"),
        ({"swap_mode": "elsewhere"}, "swap_mode"),
        ({"recorded": [{"text": "x"}]}, "recorded"),
        ({"recorded": [{"prompt": "a", "text": "x", "max_tokens": 0}]}, "recorded"),
        ({"shaer": 0.1}, None),
    ],
)
def test_what_is_not_meant_is_refused_before_anything_happens(
    locked: House, rollouts: ScriptedRollouts, fields: dict[str, Any], param: str | None
):
    refused(load(locked, **fields), 400, param)
    assert rollouts.told == []


def test_a_model_that_cannot_be_found_is_a_400_and_a_second_load_a_409(
    locked: House, rollouts: ScriptedRollouts
):
    rollouts.refusal = InvalidRequest("no such folder: m", param="model")
    assert "no such folder" in refused(load(locked), 400, "model")
    rollouts.refusal = Conflict("another version is loading")
    assert "another version" in refused(load(locked), 409, None)


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/promote", ("promote", "v2")),
        ("POST", "/rollback", ("roll_back", "v2")),
        ("DELETE", "", ("drop", "v2")),
    ],
)
def test_an_action_is_passed_on_and_answered_with_the_report(
    locked: House, rollouts: ScriptedRollouts, method: str, path: str, told: tuple[str, str]
):
    rollouts.versions.append(version("v2", "canary", 0.1))
    url = f"{locked.url}/admin/versions/"
    reply = locked.client.request(method, f"{url}v2{path}", headers=KEY)
    assert reply.status_code == 200
    assert rollouts.told == [told]
    assert [d["kind"] for d in reply.json()["decisions"]] == [told[0]]
    unknown = locked.client.request(method, f"{url}v9{path}", headers=KEY)
    assert "v1, v2" in refused(unknown, 404, None)
    rollouts.refusal = Conflict("not now")
    assert refused(locked.client.request(method, f"{url}v2{path}", headers=KEY), 409, None)


def test_what_is_still_looked_for_can_be_taken_back_by_its_path(
    locked: House, rollouts: ScriptedRollouts
):
    rollouts.versions.append(version("/models/new", "loading", 0.0))
    assert locked.post("/admin/versions//models/new/rollback", headers=KEY).status_code == 200
    assert rollouts.told == [("roll_back", "/models/new")]


def test_a_reload_is_accepted_with_and_without_a_time(locked: House, rollouts: ScriptedRollouts):
    path = "/admin/versions/v1/reload"
    assert locked.post(path, {"within_s": 5}, headers=KEY).status_code == 202
    assert locked.client.post(locked.url + path, headers=KEY).status_code == 202
    assert rollouts.told == [("reload", "v1", 5.0), ("reload", "v1", 600.0)]
    refused(locked.post(path, {"within_s": -1}, headers=KEY), 400, "within_s")
    refused(locked.post(path, {"within": 5}, headers=KEY), 400, None)
    refused(locked.post("/admin/versions/v7/reload", {}, headers=KEY), 404, None)


def test_one_version_can_be_looked_at(locked: House, rollouts: ScriptedRollouts):
    rollouts.versions.append(version("v2", "canary", 0.25, lines=["int8"]))
    card = locked.get("/admin/versions/v2", headers=KEY).json()
    assert (card["role"], card["share"], card["lines"]) == ("canary", 0.25, ["int8"])
    refused(locked.get("/admin/versions/v3", headers=KEY), 404, "version")


@pytest.mark.parametrize(("phase", "status"), [("canary", 200), ("failed", 400)])
def test_who_waits_is_answered_when_loading_has_ended(
    locked: House, rollouts: ScriptedRollouts, phase: str, status: int
):
    rollouts.rollout = rollout("v2", "loading")

    def end() -> None:
        rollouts.rollout = rollout("v2", phase, reason="tensor 'x' is cut off")

    async def begin(*args: Any, **kwargs: Any) -> None:
        asyncio.get_running_loop().call_later(0.15, end)

    rollouts.begin = begin  # type: ignore[method-assign]
    reply = load(locked, wait=True)
    assert reply.status_code == status
    assert ("cut off" in reply.json().get("error", {}).get("message", "")) == (phase == "failed")


def test_only_an_admin_key_opens_them(locked: House, rollouts: ScriptedRollouts):
    user, wrong = {"authorization": "Bearer user"}, {"authorization": "Bearer x"}
    for method, path in (
        *(("GET", ""), ("POST", ""), ("GET", "/v1"), ("DELETE", "/v1")),
        *(("POST", "/v1/promote"), ("POST", "/v1/rollback"), ("POST", "/v1/reload")),
    ):
        url = f"{locked.url}/admin/versions{path}"
        for headers, status in (({}, 401), (wrong, 401), (user, 403)):
            assert locked.client.request(method, url, headers=headers).status_code == status
    assert rollouts.told == []


def test_before_it_is_ready_there_is_nothing_to_change_and_the_report_says_so():
    with open_house(is_ready=False, edge=Edge(admin_keys=("boss",))) as house:
        assert house.get("/admin/versions", headers=KEY).json()["versions"] == []
        assert load(house).json()["error"]["code"] == "loading"
        house.state.begin_drain(5.0)
        assert load(house).json()["error"]["code"] == "draining"
