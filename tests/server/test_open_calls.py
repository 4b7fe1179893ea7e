"""Who may end which call, by which name."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.edge import KEY_DIGEST
from jaxinfer.server.open_calls import MAX_NAME, OpenCalls, names_of, owner_of


def scope(**headers: str) -> Any:
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http", "headers": pairs}


def test_a_call_ends_once_by_any_of_its_names_and_is_forgotten_with_its_block():
    calls, ended = OpenCalls(), list[str]()
    with calls.open(("id", "mine"), "") as call:
        call.on_abort(lambda: ended.append("now"))
        assert calls.abort("mine", "") == 1
        assert calls.abort("id", "") == 0
    assert ended == ["now"]
    assert len(calls) == calls.abort("id", "") == 0


def test_a_call_that_is_aborted_before_it_can_end_ends_as_soon_as_it_can():
    calls, ended = OpenCalls(), list[str]()
    with calls.open(("id",), "") as call:
        assert calls.abort("id", "") == 1
        assert ended == []
        call.on_abort(lambda: ended.append("late"))
    assert ended == ["late"]


def test_calls_of_one_name_end_together_but_each_for_its_owner():
    calls = OpenCalls()
    with calls.open(("x",), "1"), calls.open(("x",), "1"), calls.open(("x",), "2"):
        assert calls.abort("x", "3") == 0
        assert calls.abort("x", "1") == 2
        assert calls.abort("x", None) == 1


def test_a_name_is_the_clients_own_request_id_and_an_owner_the_digest_of_its_key():
    assert names_of(scope(x_request_id="mine")) == ("mine",)
    assert names_of(scope(x_request_id="x" * (MAX_NAME + 1))) == names_of(scope()) == ()
    assert owner_of(scope()) == ""
    assert owner_of({**scope(), "state": {KEY_DIGEST: "ab12"}}) == "ab12"
