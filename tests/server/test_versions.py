"""New versions of the weights over HTTP: the good walk, and everything that can be wrong with it.

After whatever goes wrong the old version answers as before, and the report says what it was.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import CheckpointError
from jaxinfer.errors import ConfigError
from jaxinfer.server.edge import Edge
from tests.server.house import House, open_house
from tests.server.scripted_versions import ScriptedSource, ScriptedVersion, rollouts_of

KEY = {"authorization": "Bearer boss"}
OLD, NEW = "bcdef", "cegik"  # after "a": the old version counts, the new one leaves a letter out
VERSION = "x-jaxinfer-version"


@contextlib.contextmanager
def served(log: Path) -> Generator[tuple[House, ScriptedSource]]:
    with open_house(edge=Edge(admin_keys=("boss",))) as house, rollouts_of(house, log) as source:
        source.models["good"] = ScriptedVersion("v2")
        yield house, source
        house.wait_until_idle()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, ScriptedSource]]:
    """For tests that leave the old version alone behind them."""
    with served(tmp_path_factory.mktemp("shared") / "rollouts.jsonl") as found:
        yield found


def load(house: House, model: str = "good", **fields: Any) -> Any:
    return house.post("/admin/versions", {"model": model, **fields}, headers=KEY)


def act(house: House, path: str) -> Any:
    return house.post(f"/admin/versions/{path}", headers=KEY)


def report(house: House) -> dict[str, Any]:
    return house.get("/admin/versions", headers=KEY).json()


def roles(house: House) -> dict[str, str]:
    return {card["version"]: card["role"] for card in report(house)["versions"]}


def said(house: House, *, user: str | None = None, version: str | None = None) -> tuple[str, str]:
    """The text after "a", and the version that the reply names."""
    headers = {} if version is None else {VERSION: version}
    fields = {} if user is None else {"user": user}
    body = {"model": "letters", "prompt": "a", "max_tokens": 5, "temperature": 0, **fields}
    reply = house.post("/v1/completions", body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["system_fingerprint"] == reply.headers[VERSION]
    return reply.json()["choices"][0]["text"], reply.headers[VERSION]


def assert_undisturbed(house: House) -> None:
    """All calls get the old version, and there is no other."""
    house.wait_until(lambda: roles(house) == {"v1": "stable"})
    assert {said(house, user=f"u{i}") for i in range(3)} == {(OLD, "v1")}
    assert house.get("/ready").status_code == 200


def error_of(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["message"]


def test_a_version_is_tried_promoted_rolled_back_and_dropped(log: Path):
    with served(log) as (house, _):
        assert said(house) == (OLD, "v1")
        assert load(house, share=0.1, wait=True).status_code == 200
        assert roles(house) == {"v1": "stable", "v2": "canary"}
        users = [said(house, user=f"u{i}") for i in range(40)]
        assert set(users) == {(OLD, "v1"), (NEW, "v2")}
        num_new = users.count((NEW, "v2"))
        assert 1 <= num_new <= 10  # about 10 % of 40 keys
        assert [said(house, user=f"u{i}") for i in range(10)] == users[:10]  # they stay
        assert said(house, version="v2") == (NEW, "v2")
        assert said(house, version="v1") == (OLD, "v1")
        card = house.get("/admin/versions/v2", headers=KEY).json()
        num_again = users[:10].count((NEW, "v2"))
        assert card["requests"] == num_new + num_again + 1
        assert (card["role"], card["share"], card["errors"]) == ("canary", 0.1, 0)
        assert act(house, "v2/promote").status_code == 200
        assert roles(house) == {"v1": "standby", "v2": "stable"}
        assert {said(house, user=f"u{i}") for i in range(10)} == {(NEW, "v2")}
        assert said(house, version="v1") == (OLD, "v1")
        assert act(house, "v2/rollback").status_code == 200
        assert {said(house, user=f"u{i}") for i in range(10)} == {(OLD, "v1")}
        assert_undisturbed(house)
        assert report(house)["rollout"]["phase"] == "rolled_back"
        kinds = [decision["kind"] for decision in report(house)["decisions"]]
        assert kinds[:3] == ["begin", "promote", "roll_back"]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["kind"] for r in records if r["kind"] in kinds] == kinds


def test_a_promoted_version_lets_the_one_before_be_dropped(log: Path):
    with served(log) as (house, _):
        assert load(house, promote=True, wait=True).status_code == 200
        assert said(house) == (NEW, "v2")
        reply = house.client.delete(f"{house.url}/admin/versions/v1", headers=KEY)
        assert reply.status_code == 200
        house.wait_until(lambda: roles(house) == {"v2": "stable"})
        assert house.runner.dropped == ["v1"]
        assert "no version to go back to" in error_of(act(house, "v2/rollback"), 409)
        assert said(house) == (NEW, "v2")


TRUNCATED = CheckpointError("model.safetensors: ends in tensor 'a' after 10 of 100 bytes")
MISMATCH = CheckpointError("model.safetensors: its SHA-256 is ab, but SHA256SUMS says cd")


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ConfigError("the architecture is GemmaForCausalLM"), "GemmaForCausalLM"),
        (TRUNCATED, "10 of 100 bytes"),
        (MISMATCH, "SHA256SUMS"),
        (RuntimeError("out of luck"), "RuntimeError: out of luck"),
    ],
    ids=["other architecture", "truncated", "checksum", "crash in open"],
)
def test_what_is_seen_before_weights_are_read_is_a_400(
    shared: tuple[House, ScriptedSource], error: Exception, word: str
):
    house, source = shared
    source.models["bad"] = ScriptedVersion("v3", open_error=error)
    reply = load(house, "bad")
    assert word in error_of(reply, 400)
    assert reply.json()["error"]["param"] == "model"
    assert report(house)["rollout"]["phase"] == "failed"
    assert word in report(house)["rollout"]["reason"]
    assert_undisturbed(house)


def test_an_unknown_path_is_a_400(shared: tuple[House, ScriptedSource]):
    house, _ = shared
    assert "nowhere: no such file" in error_of(load(house, "nowhere"), 400)
    assert_undisturbed(house)


@pytest.mark.parametrize(
    ("version", "fields", "word"),
    [
        (ScriptedVersion("v3", load_error=TRUNCATED), {}, "10 of 100 bytes"),
        (ScriptedVersion("v3", load_error=MISMATCH), {}, "SHA256SUMS"),
        (ScriptedVersion("v3", load_error=MemoryError("12 MiB")), {}, "12 MiB"),
        (ScriptedVersion("v3", load_error=RuntimeError("boom")), {}, "RuntimeError: boom"),
        (ScriptedVersion("v3", install_error=ValueError("boom")), {}, "ValueError: boom"),
        (ScriptedVersion("v4", not_numbers=True), {}, "not numbers"),
        (
            ScriptedVersion("v3"),
            {"recorded": [{"prompt": "a", "text": "bc", "max_tokens": 2}]},
            "expected 'bc', found 'ce'",
        ),
    ],
    ids=["truncated", "checksum", "memory", "load", "install", "not numbers", "smoke"],
)
def test_what_fails_behind_the_answer_is_told_to_who_waits_and_in_the_report(
    shared: tuple[House, ScriptedSource],
    version: ScriptedVersion,
    fields: dict[str, Any],
    word: str,
):
    house, source = shared
    source.models["bad"] = version
    assert word in error_of(load(house, "bad", wait=True, **fields), 400)
    rollout = report(house)["rollout"]
    assert (rollout["phase"], word in rollout["reason"]) == ("failed", True)
    assert_undisturbed(house)


def test_recorded_outputs_that_come_back_let_a_version_in(log: Path):
    with served(log) as (house, _):
        recorded = [{"prompt": "a", "text": "ce", "max_tokens": 2}]
        assert load(house, recorded=recorded, share=0, wait=True).status_code == 200
        assert roles(house) == {"v1": "stable", "v2": "canary"}
        assert {said(house, user=f"u{i}") for i in range(10)} == {(OLD, "v1")}


def test_a_second_load_waits_for_nobody(log: Path):
    with served(log) as (house, source):
        source.models["good"].gate.clear()
        source.models["other"] = ScriptedVersion("v3")
        assert load(house).status_code == 202
        house.wait_until(lambda: "reading weights" in str(report(house)))
        assert "v2 is loading" in error_of(load(house, "other"), 409)
        assert error_of(act(house, "v2/promote"), 409)
        source.models["good"].gate.set()
        house.wait_until(lambda: roles(house) == {"v1": "stable", "v2": "canary"})
        assert "v2 is canary" in error_of(load(house, "other"), 409)


def test_a_load_can_be_taken_back(shared: tuple[House, ScriptedSource]):
    house, source = shared
    source.models["good"].gate.clear()
    assert load(house).status_code == 202
    house.wait_until(lambda: roles(house).get("v2") == "loading")
    assert act(house, "v2/rollback").status_code == 200
    assert report(house)["rollout"]["phase"] == "failed"
    source.models["good"].gate.set()
    assert_undisturbed(house)
    house.wait_until(lambda: source.models["good"].num_discarded == 1)


def test_what_there_is_no_version_for_is_refused(shared: tuple[House, ScriptedSource]):
    house, _ = shared
    assert "only a canary" in error_of(act(house, "v1/promote"), 409)
    assert "no version to go back to" in error_of(act(house, "v1/rollback"), 409)
    reply = house.client.delete(f"{house.url}/admin/versions/v1", headers=KEY)
    assert "promote another" in error_of(reply, 409)
    for path in ("v9/promote", "v9/rollback", "v9/reload"):
        assert error_of(act(house, path), 404)
    pinned = house.post("/v1/completions", {"prompt": "a"}, headers={VERSION: "v9"})
    assert error_of(pinned, 400)
    assert_undisturbed(house)


@pytest.mark.parametrize("share", [-0.1, 1.1, "10%", True])
def test_a_share_outside_of_0_to_1_is_refused(shared: tuple[House, ScriptedSource], share: Any):
    house, source = shared
    num_orders = len(source.orders)
    assert error_of(load(house, share=share), 400)
    assert source.orders[num_orders:] == []


def test_a_wrong_key_changes_nothing(shared: tuple[House, ScriptedSource]):
    house, source = shared
    num_orders = len(source.orders)
    wrong = {"authorization": "Bearer guess"}
    reply = house.post("/admin/versions", {"model": "good"}, headers=wrong)
    assert error_of(reply, 401)
    assert source.orders[num_orders:] == []


def test_a_canary_whose_logits_are_not_numbers_goes_at_once(log: Path):
    with served(log) as (house, _):
        assert load(house, share=0.5, wait=True).status_code == 200
        house.runner.not_numbers.add("v2")
        body = {"model": "letters", "prompt": "a", "max_tokens": 5}
        reply = house.post("/v1/completions", body, headers={VERSION: "v2"})
        assert reply.status_code == 500
        house.wait_until(lambda: report(house)["rollout"]["phase"] == "rolled_back")
        assert "not_numbers" in report(house)["rollout"]["reason"]
        assert_undisturbed(house)


def test_the_stable_version_can_be_read_again(log: Path):
    with served(log) as (house, source):
        source.models["tests/letters"] = ScriptedVersion("v1", shift=0)
        assert act(house, "v1/reload").status_code == 202
        assert source.orders[-1].expected_version == "v1"


def test_after_a_crash_the_report_says_what_was_running(log: Path, tmp_path: Path):
    crashed_while_loading, crashed_while_trying = tmp_path / "one", tmp_path / "two"
    with served(log) as (house, source):
        source.models["good"].gate.clear()
        assert load(house, share=0.1).status_code == 202
        house.wait_until(lambda: '"load"' in log.read_text())
        crashed_while_loading.write_text(log.read_text())
        source.models["good"].gate.set()
        house.wait_until(lambda: '"begin"' in log.read_text())
        crashed_while_trying.write_text(log.read_text())
    with served(crashed_while_loading) as (house, _):
        assert "good was loading" in report(house)["before_this_start"]
        assert_undisturbed(house)
    with served(crashed_while_trying) as (house, _):
        assert "canary v2 at 10 %" in report(house)["before_this_start"]
        assert_undisturbed(house)
