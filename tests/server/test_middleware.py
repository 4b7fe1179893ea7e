"""Who may pass where, and the headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxinfer.server.app import create_app
from jaxinfer.server.edge import IS_ADMIN, KEY_DIGEST, Edge
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.middleware import Keys
from jaxinfer.server.state import Limits, ServerState
from tests.server.house import House, open_house

ORIGIN = "https://chat.example"
SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[House]:
    edge = Edge(
        admin_keys=("boss",),
        open_metrics=True,
        cors_origins=(ORIGIN,),
        allowed_hosts=("127.0.0.1", "llm.example"),
    )
    with open_house(api_keys=("user",), edge=edge) as house:
        yield house


def test_an_admin_key_opens_everything_and_an_api_key_no_admin_route(guarded: House):
    assert guarded.get("/v1/models", headers=bearer("boss")).status_code == 200
    assert guarded.get("/v1/models", headers=bearer("user")).status_code == 200
    assert guarded.get("/admin/nope", headers=bearer("boss")).status_code == 404
    refused = guarded.get("/admin/nope", headers=bearer("user"))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_needed"
    for headers in ({}, bearer("wrong"), {"authorization": "Bearer"}):
        refused = guarded.get("/admin/nope", headers=headers)
        assert refused.status_code == 401
        assert "admin key" in refused.json()["error"]["message"]


def test_without_an_admin_key_there_are_no_admin_routes(house: House):
    refused = house.post("/admin/log-level", {"level": "info"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "no_admin_key"


def test_an_admin_key_alone_leaves_the_other_routes_open():
    with open_house(edge=Edge(admin_keys=("boss",))) as house:
        assert house.get("/v1/models").status_code == 200
        assert house.get("/admin/x").status_code == 401


def test_metrics_are_open_only_by_the_flag(guarded: House):
    assert guarded.get("/metrics").status_code == 200
    with open_house(api_keys=("user",)) as house:
        assert house.get("/metrics").status_code == 401


def test_the_digest_of_the_key_is_handed_on():
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope.get("state", {}))

    keys = Keys(app, keys=("k",), edge=Edge(), metrics=Metrics("m"))
    for path, header in (("/v1/models", b"Bearer k"), ("/health", b"Bearer k")):
        scope = {"type": "http", "path": path, "headers": [(b"authorization", header)]}
        coroutine = keys(scope, None, None)  # type: ignore[arg-type]
        with pytest.raises(StopIteration):
            coroutine.send(None)
    sha256_of_k = "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a"
    assert seen == [{KEY_DIGEST: sha256_of_k, IS_ADMIN: False}, {}]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope", "/metrics"])
def test_every_answer_has_the_headers_of_safety_and_no_server_name(guarded: House, path: str):
    headers = guarded.get(path).headers
    assert {name: headers[name] for name in SAFE} == SAFE
    assert "server" not in headers


def test_a_stream_keeps_its_own_caching(house: House):
    reply = house.complete("a", max_tokens=1, stream=True)
    assert reply.headers.get_list("cache-control") == ["no-cache"]
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_a_preflight_needs_no_key_and_tells_what_pages_may_do(guarded: House):
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    reply = guarded.client.options(f"{guarded.url}/v1/chat/completions", headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    other = {**asked, "origin": "https://evil.example"}
    reply = guarded.client.options(f"{guarded.url}/v1/chat/completions", headers=other)
    assert reply.status_code == 400
    assert "access-control-allow-origin" not in reply.headers


def test_a_page_may_read_a_refusal_too(guarded: House):
    reply = guarded.get("/v1/models", headers={"origin": ORIGIN})
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


def test_without_the_flag_no_origin_is_let_in(house: House):
    for reply in (
        house.get("/v1/models", headers={"origin": ORIGIN}),
        house.client.options(f"{house.url}/v1/models", headers={"origin": ORIGIN}),
    ):
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [("llm.example", 200), ("LLM.example:8000", 200), ("evil.example", 421), ("x:1:2", 421)],
)
def test_a_host_that_is_not_allowed_is_misdirected(guarded: House, host: str, status: int):
    headers = {**bearer("user"), "host": host}
    assert guarded.get("/v1/models", headers=headers).status_code == status
    assert guarded.get("/health", headers={"host": host}).status_code == 200


async def ask(app: Any, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


@pytest.mark.parametrize(("path", "status"), [("/llm/health", 200), ("/llm/v1/models", 401)])
def test_a_root_path_changes_nothing(path: str, status: int):
    state = ServerState(Limits(), Metrics("m"), api_keys=("k",))
    app = create_app(state)

    async def rooted(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "/llm"}, receive, send)

    assert asyncio.run(ask(rooted, path)).status_code == status
