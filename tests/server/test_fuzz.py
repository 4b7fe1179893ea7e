"""Random bodies: whatever comes, the answer is a 200 or a 4xx, and the server goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from jaxinfer.server.protocol import ChatRequest, CompletionRequest
from jaxinfer.server.unsupported import NEUTRAL_VALUES
from tests.server.house import House

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 21, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40),
    *(0.0, -0.0, 0.5, 1.5, 1e-300, 1e308, -1e308),
    *("", "a", "\x00", "é", "😀", "<|end|>", "a" * 300, "\ud83d\ude00", "\ud800"),
    *([], [""], ["a"], [[]], [0], [-1], [1.5], [None], [[64]], ["a", 1], [[[]]], list(range(40))),
    *({}, {"a": 1}, {"role": "user"}, {"type": "text"}, {"include_usage": 1}),
    *([{}], [{"role": "user", "content": "a"}], [{"role": "", "content": []}]),
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"type": "function", "function": {"name": "f"}}],
    {"include_usage": True, "continuous_usage_stats": True},
]


def bodies(wire: type, start: dict[str, Any], seed: int, count: int) -> list[dict[str, Any]]:
    """Good bodies with one to four fields spoiled."""
    choose = random.Random(seed)
    fields = [*wire.__struct_fields__, *NEUTRAL_VALUES, "unheard_of"]  # type: ignore[attr-defined]

    def spoiled() -> dict[str, Any]:
        number = choose.choice((1, 1, 2, 4))
        return {**start, **{choose.choice(fields): choose.choice(JUNK) for _ in range(number)}}

    return [spoiled() for _ in range(count)]


def post(house: House, path: str, body: dict[str, Any]) -> httpx.Response:
    """With ASCII escapes, so that halves of surrogate pairs can be sent too."""
    content = json.dumps(body).encode()
    return house.client.post(house.url + path, content=content, timeout=20)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_spoiled_bodies_are_answered_or_refused_but_break_nothing(
    house: House, kind: str, seed: int
):
    if kind == "chat":
        path, wire = "/v1/chat/completions", ChatRequest
        start: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    else:
        path, wire = "/v1/completions", CompletionRequest
        start = {"prompt": "a", "max_tokens": 3}
    seen: set[int] = set()
    for body in bodies(wire, start, seed, 150):
        reply = post(house, path, body)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        seen.add(reply.status_code)
    assert {200, 400} <= seen


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_spoiled_bodies_of_the_tokenizer_routes(house: House, path: str):
    fields = ("prompt", "messages", "tokens", "add_special_tokens", "chat_template_kwargs", "model")
    for field in fields:
        for value in JUNK:
            reply = post(house, path, {"prompt": "a", "tokens": [1], field: value})
            assert reply.status_code in (200, 400, 404), (field, value, reply.text)
