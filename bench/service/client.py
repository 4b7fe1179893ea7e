"""One request to a server, and what came back: text, log-probabilities, times.

Knows the OpenAI shapes and nothing of engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

TIMEOUT_S = 300.0
VERSION_HEADER = "x-jaxinfer-version"
Ending = Literal["done", "refused", "failed", "left"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and whether its client stays to the end."""

    path: str
    body: Mapping[str, Any] | bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    leaves_after_s: float | None = None  # the client closes the connection then


@dataclass(slots=True)
class Reply:
    """What came back of a call."""

    ending: Ending = "failed"
    status: int = 0  # 0: no status came
    error: str = ""  # its code or type, or what went wrong with the connection
    texts: dict[int, str] = field(default_factory=dict[int, str])  # of each choice
    logprobs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    num_tokens: int = 0  # of output, as `usage` says
    retry_after_s: float | None = None
    version: str = ""  # of the weights that answered, as the header says
    ttft_s: float | None = None  # to the first content
    times_s: list[float] = field(default_factory=list[float])  # of events with content, monotonic
    e2e_s: float = 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Between two events with content."""
        return [after - before for before, after in pairwise(self.times_s)]

    @property
    def said(self) -> tuple[object, ...]:
        """All that must be the same in every company."""
        return self.texts, self.logprobs, self.reasons, self.num_tokens


def client_of(
    url: str, *, num_connections: int | None = None, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Of one server; num_connections: at most; None: as many as there are calls."""
    limits = httpx.Limits(max_connections=num_connections)
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=TIMEOUT_S, trust_env=False
    )


async def send(client: httpx.AsyncClient, call: Call) -> Reply:
    """Sends a call and reads the reply to its end, or to where the client leaves."""
    reply, start_s = Reply(), time.monotonic()
    try:
        async with asyncio.timeout(call.leaves_after_s):
            await _read(client, call, reply, start_s)
    except TimeoutError:
        reply.ending = "left"
    except httpx.HTTPError as error:
        reply.error = type(error).__name__
    reply.e2e_s = time.monotonic() - start_s
    return reply


async def _read(client: httpx.AsyncClient, call: Call, reply: Reply, start_s: float) -> None:
    content = call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()
    headers = {"content-type": "application/json", **call.headers}
    async with client.stream("POST", call.path, content=content, headers=headers) as response:
        reply.status = response.status_code
        reply.version = response.headers.get(VERSION_HEADER, "")
        if response.status_code != 200:
            _note_refusal(reply, response, await response.aread())
        elif response.headers["content-type"].startswith("text/event-stream"):
            await _read_events(response, reply, start_s)
        else:
            _note_whole(reply, json.loads(await response.aread()))


def _note_refusal(reply: Reply, response: httpx.Response, body: bytes) -> None:
    reply.ending = "refused"
    retry_after = response.headers.get("retry-after")
    reply.retry_after_s = None if retry_after is None else float(retry_after)
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError):
        reply.ending, reply.error = "failed", "no error object"
    else:
        reply.error = error["code"] or error["type"]


async def _read_events(response: httpx.Response, reply: Reply, start_s: float) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            reply.ending = "failed" if reply.error else "done"
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            reply.error = chunk["error"]["code"] or chunk["error"]["type"]
            continue
        for choice in chunk["choices"]:
            if _note_choice(reply, choice, choice.get("delta", choice)):
                reply.times_s.append(time.monotonic())
        if reply.ttft_s is None and reply.times_s:
            reply.ttft_s = reply.times_s[0] - start_s
        if chunk.get("usage"):
            reply.num_tokens = chunk["usage"]["completion_tokens"]


def _note_whole(reply: Reply, body: dict[str, Any]) -> None:
    for choice in body["choices"]:
        _note_choice(reply, choice, choice.get("message", choice))
    reply.num_tokens = body["usage"]["completion_tokens"]
    reply.ending = "done"


def _note_choice(reply: Reply, choice: dict[str, Any], said: dict[str, Any]) -> bool:
    """Adds what a choice gained. Returns: whether it was text."""
    index, text = choice["index"], said.get("content") or said.get("text") or ""
    reply.texts[index] = reply.texts.get(index, "") + text
    if choice.get("logprobs"):
        reply.logprobs.setdefault(index, []).extend(_logprobs(choice["logprobs"]))
    if choice.get("finish_reason"):
        reply.reasons[index] = choice["finish_reason"]
    return bool(text)


def _logprobs(found: dict[str, Any]) -> list[float]:
    if "content" in found:
        return [token["logprob"] for token in found["content"]]
    return found["token_logprobs"]
