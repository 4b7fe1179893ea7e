"""`python -m jaxinfer versions`, against a real server whose rollouts are scripted."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jaxinfer.errors import Conflict
from jaxinfer.server.bound_port import bind
from jaxinfer.server.edge import Edge
from jaxinfer.version_command import run
from jaxinfer.version_flags import parse
from tests.server.house import House, open_house
from tests.server.scripted_rollouts import ScriptedRollouts, decision, rollout, version

KEYS = {"JAXINFER_ADMIN_KEY": "boss"}
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def locked() -> Iterator[House]:
    with open_house(edge=Edge(admin_keys=("boss",))) as house:
        yield house


@pytest.fixture
def rollouts(locked: House) -> ScriptedRollouts:
    scripted = ScriptedRollouts()
    locked.state.rollouts = cast(Any, scripted)
    return scripted


def command(
    house: House,
    *words: str,
    environment: dict[str, str] | None = None,
    on_look: Callable[[], None] = lambda: None,
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. `on_look`: called instead of a second's sleep."""
    out, err = io.StringIO(), io.StringIO()
    args = parse(["versions", *words, "--url", house.url])
    keys = KEYS if environment is None else environment
    code = run(args, keys, out=out, err=err, sleep=lambda seconds: on_look())
    return code, out.getvalue(), err.getvalue()


def test_the_list_is_a_table_with_the_evidence_and_the_decisions(
    locked: House, rollouts: ScriptedRollouts
):
    signal = {"name": "failed_requests", "unit": "share", "num_observations": 12}
    rollouts.versions = [version("v1abc", "stable", 0.9), version("v2", "canary", 0.1, calls=3)]
    rollouts.rollout = rollout(
        "v2",
        "canary",
        evidence=[{**signal, "e_value": 10.0, "threshold": 100.0, "canary": 0.25, "stable": 0.0}],
    )
    rollouts.decisions = [decision(10, "begin", "it is loaded", share=0.1)]
    code, out, err = command(locked, "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    heads = "VERSION ROLE SHARE REQUESTS ERRORS FIRST TOKEN TOKENS/S OPEN FROM"
    assert lines[0].split() == heads.split()
    assert lines[1].split() == ["v1abc", "stable", "90", "%", "0", "0", *"--0", "models/v1abc"]
    assert lines[2].split() == ["v2", "canary", "10", "%", "0", "0", *"--3", "models/v2"]
    assert lines[4] == "v2: canary at 10 %"
    bar = "##########.........."  # log 10 is half of log 100
    assert lines[5] == (f"  failed_requests  {bar}  e-value 10 of 100; 0.25 beside 0 share over 12")
    assert lines[7].endswith("v2: begin by operator: it is loaded (share=0.1)")


def test_the_list_says_why_calls_wait_and_what_a_crash_broke_off(
    locked: House, rollouts: ScriptedRollouts
):
    rollouts.pause, rollouts.before_this_start = "v2 is streamed in", "stable v0"
    _, out, _ = command(locked, "list")
    assert "before this start: stable v0\npause: v2 is streamed in\n" in out


def test_load_sends_what_was_typed(locked: House, rollouts: ScriptedRollouts, tmp_path: Path):
    recorded = tmp_path / "said.jsonl"
    recorded.write_text('{"prompt": "a", "text": "b"}\n\n')
    words = ["load", "m", "--schedule", "1%:60s:50,50%", "--quantization", "none"]
    words += ["--guard", "max_slowdown=off", "--max-kl", "inf", "--recorded", str(recorded)]
    code, _, err = command(locked, *words)
    assert (code, err) == (0, "")
    ((_, order, plan, said, _),) = rollouts.told
    assert (order.source.quantization, order.source.max_kl) == ("none", float("inf"))
    assert [(s.share, s.hold_s, s.min_requests) for s in plan.stages] == [
        (0.01, 60, 50),
        (0.5, 300, 0),
    ]
    assert plan.guard.max_slowdown is None
    assert [r.prompt for r in said] == ["a"]


@pytest.mark.parametrize(("phase", "code"), [("canary", 0), ("failed", 1)])
def test_load_waits_until_it_is_loaded_and_says_what_is_done(
    locked: House, rollouts: ScriptedRollouts, phase: str, code: int
):
    rollouts.versions.append(version("v2", "loading", 0.0, progress="loading: reading weights"))
    rollouts.rollout = rollout("v2", "loading")
    looks = iter((0, 1))

    def on_look() -> None:
        if next(looks):
            rollouts.rollout = rollout("v2", phase, reason="told")

    found, out, _ = command(locked, "load", "m", "--share", "10%", "--wait", on_look=on_look)
    assert found == code
    assert out.splitlines()[0] == "v2: loading: reading weights"
    assert out.splitlines()[1].startswith(f"v2: {phase}")
    assert len(out.splitlines()) == 2


def test_watch_tells_decisions_as_they_come_and_ends_with_the_rollout(
    locked: House, rollouts: ScriptedRollouts
):
    rollouts.decisions = [decision(1, "begin", "long ago")]
    rollouts.rollout = rollout("v2", "canary")

    def on_look() -> None:
        rollouts.decisions.append(decision(2, "roll_back", "failed_requests: 0.5 share"))
        rollouts.rollout = rollout("v2", "rolled_back", reason="failed_requests")

    code, out, _ = command(locked, "watch", "--until-end", on_look=on_look)
    assert code == 1
    first, second, third = out.splitlines()
    assert first == "v2: canary at 10 %"
    assert "roll back by operator: failed_requests: 0.5 share" in second
    assert third == "v2: rolled back: failed_requests"


def test_watch_ends_well_with_ctrl_c(locked: House, rollouts: ScriptedRollouts):
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert command(locked, "watch", on_look=interrupt)[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["promote"], ("promote", "v2abc")),
        (["promote", "v2"], ("promote", "v2abc")),
        (["rollback"], ("roll_back", "v2abc")),
        (["drop", "v2abc"], ("drop", "v2abc")),
        (["reload"], ("reload", "v1", 600.0)),
        (["reload", "v1", "--within", "5m"], ("reload", "v1", 300.0)),
    ],
)
def test_an_action_names_its_version_or_means_the_one_that_is_tried(
    locked: House, rollouts: ScriptedRollouts, words: list[str], told: tuple[Any, ...]
):
    rollouts.versions.append(version("v2abc", "canary", 0.1))
    rollouts.rollout = rollout("v2abc", "canary")
    code, out, err = command(locked, *words)
    assert (code, err) == (0, "")
    assert rollouts.told == [told]
    assert out.splitlines()[0].endswith("as asked")
    assert ("v1: reload: finding" in out) == (words[0] == "reload")


@pytest.mark.parametrize("words", [["drop", "v"], ["drop", "v9"], ["promote"], ["rollback"]])
def test_a_version_that_is_none_or_several_is_no_version(
    locked: House, rollouts: ScriptedRollouts, words: list[str]
):
    rollouts.versions.append(version("v2", "leaving", 0.0))
    rollouts.rollout = rollout("v2", "rolled_back")
    code, out, err = command(locked, *words)
    assert (code, out) == (2, "")
    assert "there is v1, v2" in err
    assert rollouts.told == []


def test_a_promotion_is_rolled_back_though_a_load_has_failed_behind_it(
    locked: House, rollouts: ScriptedRollouts
):
    rollouts.versions = [version("v1", "standby", 0.0), version("v2", "stable", 1.0)]
    rollouts.rollout = rollout("models/v3", "failed")
    assert command(locked, "rollback")[0] == 0
    assert rollouts.told == [("roll_back", "v2")]
    assert command(locked, "promote")[0] == 2


def test_what_the_server_refuses_is_said_and_is_a_1(locked: House, rollouts: ScriptedRollouts):
    rollouts.refusal = Conflict("another version is loading; wait for it")
    code, _, err = command(locked, "load", "m")
    assert (code, err) == (1, "error: another version is loading; wait for it (409)\n")


def test_a_wrong_key_is_told_and_so_is_where_a_key_comes_from(
    locked: House, rollouts: ScriptedRollouts, tmp_path: Path
):
    for environment in ({}, {"JAXINFER_ADMIN_KEY": "wrong"}):
        code, _, err = command(locked, "list", environment=environment)
        assert code == 1
        assert "(401); --admin-key-file, --admin-key or JAXINFER_ADMIN_KEY gives it" in err
    assert command(locked, "list", "--admin-key", "boss", environment={})[0] == 0
    key = tmp_path / "key"
    key.write_text("boss\nsecond\n")
    assert command(locked, "list", "--admin-key-file", str(key), environment={})[0] == 0
    code, _, err = command(locked, "list", "--admin-key-file", str(tmp_path / "none"))
    assert (code, "--admin-key-file" in err) == (2, True)
    assert command(locked, "list", "--admin-key", "a\r\nb")[0] == 2


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_a_url_that_is_none_is_a_2(url: str):
    out, err = io.StringIO(), io.StringIO()
    assert run(parse(["versions", "list", "--url", url]), KEYS, out=out, err=err) == 2
    assert "--url" in err.getvalue()


def test_nobody_there_is_a_1():
    out, err = io.StringIO(), io.StringIO()
    with bind("127.0.0.1", 0) as taken:  # let go again
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert run(parse(["versions", "list", "--url", url]), KEYS, out=out, err=err) == 1
    assert "is the server running" in err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["load"],
        ["load", "m", "--share", "2"],
        ["load", "m", "--share", "1%", "--promote"],
        ["load", "m", "--schedule", "1%:x"],
        ["drop"],
        ["list", "--admin-key", "a", "--admin-key-file", "b"],
    ],
)
def test_a_bad_command_line_is_a_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse(["versions", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_it_starts_without_jax(locked: House, rollouts: ScriptedRollouts):
    code = (
        "import runpy, sys; sys.modules.update(jax=None, jaxlib=None, flax=None)\n"
        f"sys.argv[1:] = ['versions', 'list', '--url', {locked.url!r}, '--admin-key', 'boss']\n"
        "runpy.run_module('jaxinfer', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "v1" in done.stdout


def test_a_reader_that_has_enough_is_no_error(locked: House, rollouts: ScriptedRollouts):
    words = [sys.executable, "-m", "jaxinfer", "versions", "list", "--url", locked.url]
    process = subprocess.Popen(
        [*words, "--admin-key", "boss"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(20) == 0
