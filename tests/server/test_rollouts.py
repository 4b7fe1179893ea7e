"""From an operator's order to a served version, and back: every way that it can go."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from jaxinfer import async_engine
from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.errors import (
    ConfigError,
    Conflict,
    EngineFailure,
    InvalidRequest,
    ModelNotFound,
    NoRoom,
    PoolLost,
    Unavailable,
)
from jaxinfer.rollout import RolloutPlan, Stage
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server import arrival, incoming
from jaxinfer.server.smoke import Recorded
from tests.server.rollout_world import HALF, Way, World, run, until

ALWAYS = RolloutPlan(stages=(Stage(1.0, hold_s=60.0),))


def test_an_order_becomes_a_canary_and_stage_by_stage_the_stable_version(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary(plan=RolloutPlan(stages=(Stage(0.0, hold_s=60.0), Stage(1.0, hold_s=60.0))))
        assert (w.role("v1"), w.role("v2"), w.phase) == ("stable", "canary", "canary")
        assert await w.say() == "bcd"
        assert await w.say(pinned="v2") == "ceg"
        w.clock.now += 60
        w.rollouts.tick()
        assert w.state.versions.share == 1.0
        assert await w.say() == "ceg"
        w.clock.now += 60
        w.rollouts.tick()
        assert (w.role("v1"), w.role("v2"), w.phase) == ("standby", "stable", "promoted")
        assert w.rollouts.status()["stable"] == "v2"
        await until(lambda: w.core.version == "v2")
        assert await w.say() == "ceg"
        assert await w.say(pinned="v1") == "bcd"
        w.clock.now += 600
        w.rollouts.tick()
        await until(lambda: w.role("v1") is None)
        assert w.runner.dropped == ["v1"]
        assert w.core.versions == ("v2",)

    run(scenario, tmp_path)


def test_a_canary_gets_steps_by_the_root_of_its_share_of_the_calls(tmp_path: Path):
    async def scenario(w: World) -> None:
        seen: list[dict[str, float]] = []
        w.core.set_shares = lambda shares: seen.append(dict(shares))  # type: ignore[method-assign]
        await w.canary(plan=RolloutPlan(stages=(Stage(0.36, hold_s=60.0),)))
        await w.rollouts.promote("v2")
        await until(lambda: len(seen) == 3)
        assert seen == [{"v2": 0.1}, {"v1": 0.8, "v2": 0.6}, {}]  # roots of what the calls have

    run(scenario, tmp_path)


def test_a_rollback_changes_routing_before_it_returns_and_calls_end_where_they_began(
    tmp_path: Path,
):
    async def scenario(w: World) -> None:
        await w.canary(plan=ALWAYS)
        w.runner.gate.clear()
        begun = asyncio.create_task(w.say(num=5))
        await until(lambda: w.state.versions.num_calls("v2") == 1)
        await w.rollouts.roll_back("v2")
        assert w.state.versions.choose("anybody").version == "v1"
        assert (w.role("v2"), w.phase) == ("leaving", "rolled_back")
        with pytest.raises(InvalidRequest, match="'v2' is not served; there is v1"):
            w.state.versions.choose("anybody", "v2")
        with pytest.raises(Conflict, match="v2 is leaving"):
            await w.rollouts.roll_back("v2")
        w.runner.gate.set()
        assert await begun == "cegik"
        await until(lambda: w.role("v2") is None)
        assert w.runner.dropped == ["v2"]
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_after_a_promotion_the_version_before_is_one_call_away(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        assert await w.say() == "ceg"
        await w.rollouts.roll_back("v2")
        assert (w.role("v1"), w.role("v2"), w.phase) == ("stable", "leaving", "rolled_back")
        assert await w.say() == "bcd"
        await until(lambda: w.role("v2") is None)
        assert w.core.versions == ("v1",)
        with pytest.raises(Conflict, match="no version to go back to from v1"):
            await w.rollouts.roll_back("v1")
        await w.canary()
        await w.rollouts.promote("v2")
        await w.rollouts.promote("v1")
        assert w.rollouts.status()["stable"] == "v1"

    run(scenario, tmp_path)


def test_an_order_for_all_calls_at_once_is_judged_by_nobody(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way()
        await w.order("v2", promotes_at_once=True)
        await until(lambda: w.role("v2") == "stable")
        assert [d["kind"] for d in w.rollouts.status()["decisions"]] == ["start", "load", "promote"]

    run(scenario, tmp_path)


def test_what_cannot_be_done_now_is_a_conflict_and_changes_nothing(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"], w.source.ways["v3"] = Way(), Way()
        w.source.ways["v2"].may_load.clear()
        await w.order("v2")
        assert w.role("v2") == "loading"
        with pytest.raises(Conflict, match=r"v2 is (finding|loading)"):
            await w.order("v3")
        with pytest.raises(Conflict, match=r"v2 is \w+; only a canary"):
            await w.rollouts.promote("v2")
        with pytest.raises(Conflict, match="v1 is stable; only a canary"):
            await w.rollouts.promote("v1")
        with pytest.raises(Conflict, match="v1 is stable; promote another"):
            await w.rollouts.drop("v1")
        for ask in (w.rollouts.promote, w.rollouts.roll_back, w.rollouts.drop):
            with pytest.raises(ModelNotFound, match="no version 'v9'; there is v1, v2"):
                await ask("v9")
        with pytest.raises(Conflict, match="v2"):
            await w.rollouts.reload("v2", within_s=0)
        w.source.ways["v2"].may_load.set()
        await until(lambda: w.role("v2") == "canary")
        with pytest.raises(Conflict, match="v2 is canary; promote it or roll it back first"):
            await w.order("v3")
        with pytest.raises(Conflict, match="v2 is canary; promote it or roll it back first"):
            await w.rollouts.reload("v1", within_s=0)
        await w.rollouts.drop("v2")
        await w.rollouts.drop("v2")
        await until(lambda: w.role("v2") is None)
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "v2: expected a folder, found nothing there"),
        (ConfigError("the model has 3 layers, the programs 2"), "3 layers"),
        (OSError("the disk is gone"), "OSError: the disk is gone"),
    ],
)
def test_a_version_that_is_not_found_or_does_not_fit_is_the_callers_fault(
    tmp_path: Path, error: Exception | None, told: str
):
    async def scenario(w: World) -> None:
        if error is not None:
            w.source.ways["v2"] = Way(open_error=error)
        with pytest.raises(InvalidRequest, match=told) as caught:
            await w.order("v2")
        assert caught.value.param == "model"
        await until(lambda: w.role("v2") is None)
        assert w.phase == "failed"
        assert told in w.reason
        await w.canary("v3")

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    "way",
    [
        Way(load_error=CheckpointError("w.safetensors: expected 9 bytes, found 8; truncated")),
        Way(load_error=MemoryError("9 bytes are missing")),
        Way(install_error=ValueError("9 bytes are missing; truncated")),
    ],
)
def test_a_version_that_fails_on_its_way_leaves_nothing_and_says_why(tmp_path: Path, way: Way):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = way
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        assert "missing" in w.reason or "truncated" in w.reason
        await until(lambda: w.role("v2") is None)
        assert w.source.discarded == w.source.loaded
        assert w.core.versions == ("v1",)
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_an_engine_that_does_not_answer_in_time_drops_the_version_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way()
        w.runner.gate.clear()
        begun = asyncio.create_task(w.say())
        await until(lambda: w.engine.seconds_in_turn > 0)
        monkeypatch.setattr(async_engine, "CHANGE_WITHIN_S", 0.01)
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        assert "did not answer in 0.01 s" in w.reason
        monkeypatch.setattr(async_engine, "CHANGE_WITHIN_S", 5.0)
        w.runner.gate.set()
        assert await begun == "bcd"
        await until(lambda: w.role("v2") is None)
        assert w.core.versions == ("v1",)
        assert w.runner.dropped == ["v2"]

    run(scenario, tmp_path)


def test_recorded_texts_must_come_again(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way()
        recorded = (Recorded("a", "ceg", 3), Recorded("b", "dxh", 3))
        await w.order("v2", recorded=recorded)
        await until(lambda: w.phase == "failed")
        assert w.reason == "recorded output 2 of 2: expected 'dxh', found 'dfh'"
        await until(lambda: w.role("v2") is None)
        assert w.runner.dropped == ["v2"]
        await w.order("v2", recorded=recorded[:1])
        await until(lambda: w.role("v2") == "canary")

    run(scenario, tmp_path)


def test_without_records_a_version_must_at_least_say_something(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(has_logits=False)
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        assert w.reason.startswith("prompt 1 of 3 ends with error: the logits were not numbers")
        assert w.state.breaker.state == 0

    run(scenario, tmp_path)


def test_an_order_that_is_taken_back_while_it_loads_gives_back_what_was_read(tmp_path: Path):
    async def scenario(w: World) -> None:
        way = w.source.ways["v2"] = Way()
        way.may_load.clear()
        await w.order("v2")
        await until(lambda: "reading v2" in str(w.rollouts.status()["versions"][1]["progress"]))
        await w.rollouts.roll_back("v2")
        assert (w.phase, w.reason) == ("failed", "an operator rolled it back")
        await until(lambda: w.role("v2") is None)
        with pytest.raises(Conflict, match="has not ended; try again"):
            await w.order("v2")
        way.may_load.set()
        await until(lambda: w.source.discarded == ["v2"] and not w.rollouts.is_busy)
        await w.canary()

    run(scenario, tmp_path)


def test_an_order_that_is_taken_back_while_it_is_sought_tells_its_caller(tmp_path: Path):
    async def scenario(w: World) -> None:
        way = w.source.ways["v2"] = Way()
        way.may_open.clear()
        asked = asyncio.create_task(w.order("v2"))
        await until(lambda: w.role("v2") == "loading")
        await w.rollouts.drop("v2")
        with pytest.raises(Conflict, match="taken back"):
            await asked
        way.may_open.set()
        await until(lambda: w.source.closed == ["v2"])
        assert w.source.loaded == []

    run(scenario, tmp_path)


def test_a_caller_does_not_wait_for_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(incoming, "OPEN_S", 0.01)

    async def scenario(w: World) -> None:
        way = w.source.ways["v2"] = Way(open_error=CheckpointError("v2: no such repository"))
        way.may_open.clear()
        await w.order("v2")
        way.may_open.set()
        await until(lambda: w.phase == "failed")
        assert w.reason == "v2: no such repository"

    run(scenario, tmp_path)


def test_a_rollback_during_the_first_answers_drops_the_version(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way()
        w.runner.gate.clear()
        await w.order("v2")
        await until(lambda: w.rollouts.status()["versions"][1]["progress"].startswith("proving"))
        await w.rollouts.roll_back("v2")
        w.runner.gate.set()
        await until(lambda: w.role("v2") is None)
        assert w.runner.dropped == ["v2"]
        assert w.engine.num_open == 0
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_the_version_that_stands_by_makes_room_for_the_next(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        await w.canary("v3")
        assert w.runner.dropped == ["v1"]
        assert [w.role(name) for name in ("v1", "v2", "v3")] == [None, "stable", "canary"]
        with pytest.raises(Conflict, match="no version to go back to"):
            await w.rollouts.roll_back("v2")

    run(scenario, tmp_path)


def test_a_version_without_room_is_sought_again_when_the_one_that_stands_by_is_gone(
    tmp_path: Path,
):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        w.source.ways["v3"] = Way(open_error=NoRoom("9 bytes are missing"), is_crowded=True)
        await w.order("v3")
        await until(lambda: w.role("v3") == "canary")
        assert w.runner.dropped == ["v1"]
        await w.rollouts.drop("v3")
        await until(lambda: w.role("v3") is None)
        w.source.ways["v4"] = Way(open_error=NoRoom("9 bytes are missing"))
        with pytest.raises(InvalidRequest, match="9 bytes are missing"):
            await w.order("v4")

    run(scenario, tmp_path)


def test_an_order_that_cannot_be_found_leaves_the_way_back_open(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        with pytest.raises(InvalidRequest):
            await w.order("v9")
        await w.rollouts.roll_back("v2")
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_going_back_while_the_next_version_is_sought_takes_that_order_back(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        way = w.source.ways["v3"] = Way()
        way.may_open.clear()
        asked = asyncio.create_task(w.order("v3"))
        await until(lambda: w.role("v3") == "loading")
        await w.rollouts.roll_back("v2")
        assert w.rollouts.status()["stable"] == "v1"
        with pytest.raises(Conflict, match="taken back"):
            await asked

    run(scenario, tmp_path)


@pytest.mark.parametrize("name", ["v1", "v2", "v3"])
def test_a_version_that_is_here_is_not_loaded_again(tmp_path: Path, name: str):
    async def scenario(w: World) -> None:
        await w.canary()
        await w.rollouts.promote("v2")
        w.source.ways |= {"v1": Way(), "v3": Way()}
        if name == "v3":  # it leaves as long as a call holds it
            await w.canary("v3", plan=ALWAYS)
            model = w.state.versions.choose("caller")
            with w.state.versions.call(model):
                await w.rollouts.roll_back("v3")
                with pytest.raises(Conflict, match="v3 still has calls"):
                    await w.order("v3")
            return
        with pytest.raises(Conflict, match=f"{name} (stands by|is stable)"):
            await w.order(name)
        await until(lambda: len(w.rollouts.status()["versions"]) == 2)
        assert await w.say() == "ceg"
        await w.rollouts.roll_back("v2")
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_a_canary_whose_steps_all_fail_is_rolled_back_and_the_stable_one_serves_on(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        w.runner.failing["v2"] = EngineFailure("an odd kernel")
        with pytest.raises(EngineFailure):
            await w.say(pinned="v2")
        if w.role("v2") == "canary":
            with pytest.raises(EngineFailure):
                await w.say(pinned="v2")
        await until(lambda: w.phase == "rolled_back")
        assert await w.say() == "bcd"
        assert w.state.refusal() is None
        assert w.rollouts.status()["decisions"][-1]["by"] in ("server", "signal")
        await until(lambda: w.role("v2") is None)

    run(scenario, tmp_path)


def test_a_canary_that_gives_no_numbers_is_rolled_back_by_the_first_request(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        facts = RequestFacts("v2", FinishReason.ERROR, 0, 0.0, None, is_not_numbers=True)
        w.state.note_request(facts)
        assert w.phase == "rolled_back"
        last = w.rollouts.status()["decisions"][-1]
        assert (last["kind"], last["by"], last["canary"]) == ("roll_back", "signal", "v2")

    run(scenario, tmp_path)


def test_a_lost_pool_takes_no_version_along(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        w.runner.fail_with = PoolLost("the arrays are gone")
        begun = [asyncio.create_task(w.say(pinned=name)) for name in ("v1", "v2")]
        await until(lambda: w.runner.num_steps > 0)
        w.runner.fail_with = None
        assert await asyncio.gather(*begun) == ["bcd", "ceg"]
        assert w.role("v2") in ("canary", "leaving", None)

    run(scenario, tmp_path)


def test_calls_steps_and_comparisons_are_told_while_there_is_a_canary_and_only_then(
    tmp_path: Path,
):
    made: list[tuple[str, str, float]] = []
    closed: list[bool] = []

    class Compared:
        def note(self, answered: object) -> None: ...
        async def close(self) -> None:
            closed.append(True)

    def compare(stable, canary, share, judge) -> Compared:
        made.append((stable.version, canary.version, share))
        judge.note_shadow(ShadowFacts(8, 0.01, 0.0))
        return Compared()

    async def scenario(w: World) -> None:
        state = w.state
        listeners = lambda: (state.on_request, state.on_verdict, state.on_answered)  # noqa: E731
        assert listeners() == (None, None, None)
        await w.canary(plan=replace(ALWAYS, shadow_share=0.25))
        assert None not in listeners()
        assert made == [("v1", "v2", 0.25)]
        assert await w.say() == "ceg"
        await w.rollouts.roll_back("v2")
        assert listeners() == (None, None, None)
        await until(lambda: closed == [True])
        await w.canary("v3")
        assert state.on_request is not None
        assert state.on_answered is None
        await w.rollouts.promote("v3")
        assert listeners() == (None, None, None)

    run(scenario, tmp_path, compare=compare)


@pytest.mark.parametrize("manner", ["beside", "engine", "stream"])
def test_under_calls_no_swap_costs_a_call_or_mixes_an_answer(tmp_path: Path, manner):
    async def scenario(w: World) -> None:
        answers: list[str] = []
        is_over = False

        async def call_on() -> None:
            while not is_over:
                answers.append(await w.say(num=8))
                await asyncio.sleep(0)

        callers = [asyncio.create_task(call_on()) for _ in range(4)]
        w.source.ways |= {"v1": Way(manner, shift=0), "v2": Way(manner)}
        for _ in range(3):
            for name in ("v2", "v1") if manner == "stream" else ("v2",):
                await w.order(name, HALF)
                await until(lambda name=name: w.role(name) in ("canary", "stable"))
            if manner != "stream":
                await w.rollouts.promote("v2")
                await until(lambda: answers[-1] == "cegikmoq")
                await w.rollouts.roll_back("v2")
                await until(lambda: w.role("v2") is None and not w.rollouts.is_busy)
        is_over = True
        await asyncio.gather(*callers)
        assert set(answers) == {"bcdefghi", "cegikmoq"}
        assert w.core.versions == ("v1",)

    run(scenario, tmp_path)


def test_a_version_with_a_long_call_leaves_those_alone_that_came_meanwhile(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        with w.state.versions.call(w.state.versions.choose("a slow reader", "v2")):
            await w.rollouts.roll_back("v2")
            await asyncio.sleep(0)
            await w.canary("v3")
            await w.rollouts.promote("v3")
            await w.rollouts.drop("v1")
            await until(lambda: w.role("v1") is None)
        await until(lambda: w.role("v2") is None)
        assert w.engine.is_alive
        assert await w.say() == "ceg"

    run(scenario, tmp_path)


# ---- a version with an engine of its own


def test_a_version_with_an_engine_of_its_own_is_tried_promoted_and_dropped(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary(manner="engine")
        engine = w.state.versions.choose("anybody", "v2").engine
        assert engine is not w.engine
        assert await w.say(pinned="v2") == "ceg"
        await w.rollouts.roll_back("v2")
        await until(lambda: w.role("v2") is None)
        assert not engine.is_alive
        assert w.source.discarded == ["v2"]
        assert await w.say() == "bcd"

    run(scenario, tmp_path)


def test_the_first_engine_is_given_back_when_another_engines_version_has_taken_over(
    tmp_path: Path,
):
    freed: list[str] = []

    async def scenario(w: World) -> None:
        await w.canary(manner="engine")
        await w.rollouts.promote("v2")
        await w.rollouts.drop("v1")
        await until(lambda: freed == ["first"])
        assert not w.engine.is_alive
        assert await w.say() == "ceg"
        w.source.ways["v3"] = Way()
        with pytest.raises(InvalidRequest, match="restart"):
            await w.order("v3")

    run(scenario, tmp_path, free_first=lambda: freed.append("first"))


def test_the_last_versions_of_an_engine_may_leave_it_at_once(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary()
        v1, v2 = (w.state.versions.choose("a slow reader", name) for name in ("v1", "v2"))
        with w.state.versions.call(v1), w.state.versions.call(v2):
            await w.rollouts.roll_back("v2")
            await w.canary("v3", manner="engine")
            await w.rollouts.promote("v3")
            await w.rollouts.drop("v1")
        await until(lambda: w.role("v1") is w.role("v2") is None)
        assert not w.engine.is_alive
        assert await w.say() == "ceg"

    run(scenario, tmp_path)


def test_a_canary_whose_engine_dies_is_rolled_back(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary(manner="engine")
        w.source.runners["v2"].fail_with = SystemExit("the device is gone")
        with pytest.raises((EngineFailure, Unavailable)):
            await w.say(pinned="v2")
        w.rollouts.tick()
        assert (w.phase, w.reason) == ("rolled_back", "the engine thread has ended")
        assert w.rollouts.status()["decisions"][-1]["by"] == "server"
        assert await w.say() == "bcd"
        assert w.state.ailment() is None
        await until(lambda: w.role("v2") is None)

    run(scenario, tmp_path)


def test_a_canary_whose_engine_hangs_is_rolled_back(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary(manner="engine")
        runner = w.source.runners["v2"]
        runner.gate.clear()
        begun = asyncio.create_task(w.say(pinned="v2"))
        engine = w.state.versions.choose("anybody", "v2").engine
        await until(lambda: engine.seconds_in_turn > 0)
        w.state.limits = replace(w.state.limits, step_timeout_s=0.0)
        w.rollouts.tick()
        assert w.reason.startswith("no engine step has ended for")
        runner.gate.set()
        assert await begun == "ceg"

    run(scenario, tmp_path)


def test_a_stable_version_whose_engine_dies_goes_while_another_stands_by(tmp_path: Path):
    async def scenario(w: World) -> None:
        await w.canary(manner="engine")
        await w.rollouts.promote("v2")
        w.source.runners["v2"].fail_with = SystemExit("the device is gone")
        with pytest.raises((EngineFailure, Unavailable)):
            await w.say()
        w.rollouts.tick()
        assert await w.say() == "bcd"
        assert w.state.ailment() is None

    run(scenario, tmp_path)


# ---- a version that takes the place of the stable one, in a pause


def test_a_streamed_version_waits_for_open_calls_and_new_calls_wait_for_it(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(manner="stream")
        w.runner.gate.clear()
        open_call = asyncio.create_task(w.say(num=5))
        await until(lambda: w.state.versions.num_calls("v1") == 1)
        await w.order("v2")
        await until(lambda: w.state.door.pause is not None)
        assert "v2 is streamed in over v1" in w.rollouts.status()["pause"]
        new_call = asyncio.create_task(w.say())
        w.runner.gate.set()
        assert await open_call == "bcdef"
        assert await new_call == "ceg"
        await until(lambda: w.role("v1") is None)
        assert (w.role("v2"), w.core.versions) == ("stable", ("v2",))
        assert w.runner.dropped == ["v1"]
        with pytest.raises(Conflict, match="no version to go back to"):
            await w.rollouts.roll_back("v2")

    run(scenario, tmp_path)


def test_a_pause_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrival, "PAUSE_S", 0.0)

    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(manner="stream")
        with w.state.versions.call(w.state.versions.choose("caller")):
            await w.order("v2")
            await until(lambda: w.phase == "failed")
        assert "calls have not ended within 0 s" in w.reason
        assert w.state.door.pause is None
        assert await w.say() == "bcd"
        assert w.source.discarded == ["v2"]

    run(scenario, tmp_path)


@pytest.mark.parametrize("fault", ["install", "smoke"])
def test_a_streamed_version_that_is_bad_is_replaced_by_the_one_before(tmp_path: Path, fault: str):
    async def scenario(w: World) -> None:
        error = ValueError("a tensor is gone") if fault == "install" else None
        w.source.ways["v2"] = Way(manner="stream", install_error=error, has_logits=fault != "smoke")
        w.source.ways["v1"] = Way(shift=0)
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        assert await w.say() == "bcd"
        assert w.core.versions == ("v1",)
        assert w.role("v1") == "stable"
        await until(lambda: w.role("v2") is None)

    run(scenario, tmp_path)


def test_without_any_weights_nobody_waits_and_the_process_is_ill(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(manner="stream", install_error=EngineFailure("no weights"))
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        with pytest.raises(Unavailable, match="weights are lost"):
            await w.say()
        assert "must be restarted" in str(w.state.ailment())

    run(scenario, tmp_path)


def test_where_the_version_before_cannot_be_read_again_the_process_is_ill_too(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(manner="stream", has_logits=False)
        await w.order("v2")
        await until(lambda: w.phase == "failed")
        assert "must be restarted" in str(w.state.ailment())

    run(scenario, tmp_path)


def test_a_server_that_shuts_down_in_a_pause_loses_no_weights(tmp_path: Path):
    async def scenario(w: World) -> None:
        w.source.ways["v2"] = Way(manner="stream")
        w.runner.gate.clear()
        await w.order("v2")
        await until(lambda: w.core.versions == ("v2",) and w.core.has_requests)
        waiting = asyncio.create_task(w.say())
        w.state.begin_drain(5)
        w.rollouts.stop()
        w.runner.gate.set()
        await w.state.drain_engines(5)
        await until(lambda: w.phase == "failed")
        assert w.reason == "the server shuts down"
        assert w.state.door.fault is None
        with pytest.raises(Unavailable, match="the server shuts down"):
            await waiting

    run(scenario, tmp_path)


# ---- the same version once more


@pytest.mark.parametrize("manner", ["beside", "stream"])
def test_a_reload_waits_for_a_quiet_second(tmp_path: Path, manner):
    async def scenario(w: World) -> None:
        w.source.ways["v1"] = Way(manner=manner, shift=2)
        with w.state.admission.acquire():
            await w.rollouts.reload("v1", within_s=60)
            await until(lambda: w.source.loaded == ["v1"])
            w.clock.now += 5
            await asyncio.sleep(0.05)
            assert w.rollouts.status()["reload"] is not None
            with pytest.raises(Conflict, match="is being read again"):
                await w.order("v2")
        await asyncio.sleep(0.05)
        w.clock.now += 1
        await until(lambda: w.rollouts.status()["reload"] is None)
        assert await w.say() == "dgj"
        assert w.core.versions == ("v1",)
        assert w.rollouts.status()["decisions"][-1]["kind"] == "reload"

    run(scenario, tmp_path)


def test_a_reload_that_fails_leaves_the_version_as_it_was(tmp_path: Path):
    async def scenario(w: World) -> None:
        with pytest.raises(InvalidRequest, match="found nothing"):
            await w.rollouts.reload("v1", within_s=0)
        w.source.ways["v1"] = Way(load_error=CheckpointError("v1: truncated"))
        await w.rollouts.reload("v1", within_s=0)
        await until(lambda: w.rollouts.status()["reload"] is None)
        w.source.ways["v1"] = Way(shift=0, install_error=Conflict("not now"))
        await w.rollouts.reload("v1", within_s=0)
        await until(lambda: w.rollouts.status()["reload"] is None)
        assert w.source.discarded == ["v1"]
        assert await w.say() == "bcd"
        await w.canary()

    run(scenario, tmp_path)


# ---- the end of the server


@pytest.mark.parametrize("life", ["finding", "loading", "proving", "canary", "standby", "leaving"])
def test_the_server_can_end_in_each_part_of_a_versions_life(tmp_path: Path, life: str):
    async def scenario(w: World) -> None:
        way = w.source.ways["v2"] = Way()
        gates = {"finding": way.may_open, "loading": way.may_load, "proving": w.runner.gate}
        gates.get(life, threading.Event()).clear()
        asked = asyncio.create_task(w.order("v2", ALWAYS))
        first = {"finding": "finding", "loading": "loading", "proving": "proving"}.get(life)
        if first is not None:
            await until(lambda: str(_progress(w, "v2")).startswith(first))
        else:
            await until(lambda: w.role("v2") == "canary")
        if life == "standby":
            await w.rollouts.promote("v2")
        if life == "leaving":
            with w.state.versions.call(w.state.versions.choose("caller")):
                await w.rollouts.roll_back("v2")
        await w.rollouts.close()
        results = await asyncio.gather(asked, return_exceptions=True)
        assert results == [None] or isinstance(results[0], Conflict | Unavailable)
        assert w.records()[-1]["kind"] == "end"
        with pytest.raises(Unavailable):
            await w.order("v3")

    run(scenario, tmp_path)


def _progress(w: World, name: str) -> str | None:
    versions = w.rollouts.status()["versions"]
    return next((v["progress"] for v in versions if v["version"] == name), None)


def test_every_decision_is_in_the_file_with_its_numbers(tmp_path: Path):
    async def scenario(w: World) -> None:
        assert not w.log_path.exists()
        await w.canary()
        await w.rollouts.roll_back("v2")
        await until(lambda: w.role("v2") is None)
        await w.rollouts.close()
        kinds = [(r["kind"], r.get("phase")) for r in w.records()]
        assert kinds == [
            ("start", "started"),
            ("load", "loading"),
            ("begin", "canary"),
            ("roll_back", "rolled_back"),
            ("end", None),
        ]
        assert w.records()[3]["numbers"]["share"] == 0.5
        assert w.records()[3]["at"].startswith("1970-01-01T00:00:00")

    run(scenario, tmp_path)
