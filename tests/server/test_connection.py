"""What is bounded before there is a request: its head, its time, how many are open."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from jaxinfer.server.connection import MAX_PIPELINED, SPARE_CONNECTIONS
from jaxinfer.server.state import Limits
from tests.server.house import House, open_house

HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\n"
SMALL = Limits(max_target_bytes=200, max_header_bytes=1000, max_headers=10, header_s=0.15)


@pytest.fixture(scope="module")
def small() -> Iterator[House]:
    with open_house(limits=SMALL) as house:
        yield house


def connect(house: House) -> socket.socket:
    host, port = house.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def all_of(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection, which a reset is too."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def is_answered(connection: socket.socket) -> bool:
    """Asks on a connection that stays open."""
    connection.sendall(HEAD + b"\r\n")
    found = b""
    while not found.endswith(b"}"):
        found += connection.recv(65536)
    return found.startswith(b"HTTP/1.1 200 ")


def ask(house: House, data: bytes) -> bytes:
    with connect(house) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return all_of(connection)


def check(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "longer than 200"),
        (b"GET /v?" + b"a" * 300 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "longer than 200"),
        (HEAD + b"a: " + b"x" * 1000 + b"\r\n\r\n", 431, "longer than 1000"),
        (HEAD + b"a: x\r\n" * 20 + b"\r\n", 431, "more than 10 headers"),
        (b"GET /version HTTP/1.1\r\n\r\n", 400, "got 0"),
        (HEAD + b"Host: y\r\n\r\n", 400, "got 2"),
    ],
)
def test_a_head_that_is_too_much_is_refused_by_what_is_wrong(
    small: House, head: bytes, status: int, words: str
):
    answer = ask(small, head)
    assert words in check(answer, status)
    assert b"x-request-id: " in answer
    assert small.get("/version").status_code == 200


@pytest.mark.parametrize(
    "start",
    [b"GET /", HEAD + b"a: ", HEAD + b"a", b"GET /version HTTP/1.1\r\nHost: x\r\na: b\r\nc: "],
)
def test_a_head_without_an_end_is_cut_at_the_bound(small: House, start: bytes):
    assert check(ask(small, start + b"x" * 100_000), 431)


@pytest.mark.parametrize(
    "tail", [b"0\r\n" + b"a: b\r\n" * 5000, b"0\r\na: " + b"x" * 30_000, b"1;" + b"x" * 30_000]
)
def test_trailers_and_chunk_extensions_without_an_end_are_cut(small: House, tail: bytes):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(small) as connection:
        connection.sendall(head)
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(tail), 500):
                connection.sendall(tail[start : start + 500])
                time.sleep(0.001)
        assert not all_of(connection)
    small.wait_until_idle()


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n"])
def test_what_is_no_http_gets_a_400_in_the_usual_shape(small: House, data: bytes):
    assert check(ask(small, data), 400)


def test_a_connection_that_sends_nothing_is_closed(small: House):
    with connect(small) as connection:
        assert all_of(connection) == b""


@pytest.mark.parametrize("kept_alive", [False, True])
def test_a_head_that_comes_byte_by_byte_gets_a_408(small: House, kept_alive: bool):
    with connect(small) as connection:
        if kept_alive:
            assert is_answered(connection)
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"\r\n\r\n" + HEAD:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() > start + 1:
                    break
        assert "within 0.15 s" in check(all_of(connection), 408)


def test_a_kept_connection_may_be_quiet_for_longer_than_a_head_may_take(small: House):
    with connect(small) as connection:
        for _ in range(2):
            assert is_answered(connection)
            time.sleep(0.25)


def test_a_running_request_outlives_the_time_for_heads(small: House):
    small.runner.step_s = 0.02
    try:
        assert small.complete("a", max_tokens=20).status_code == 200
    finally:
        small.runner.step_s = 0.0


def test_requests_may_be_pipelined_but_not_without_end(small: House):
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert ask(small, one * 5 + last).count(b"HTTP/1.1 200 ") == 6
    assert ask(small, one * (MAX_PIPELINED + 5)).count(b"HTTP/1.1 200 ") == 0
    assert small.get("/version").status_code == 200


def test_a_head_and_a_whole_body_may_come_at_once_and_a_body_may_be_long(small: House):
    assert small.complete("a", max_tokens=1, user="x" * 50_000).status_code == 200
    chunks = (b" " * 10 for _ in range(500))
    body = b'{"prompt": "a", "max_tokens": 1}'
    url = f"{small.url}/v1/completions"
    reply = small.client.post(url, content=iter([*chunks, body]), timeout=20)
    assert reply.status_code == 200


def test_connections_over_the_bound_get_a_503_but_probes_are_answered():
    with open_house(limits=Limits(max_connections=2)) as house, contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(connect(house)) for _ in range(2)]
        for connection in open_ones:
            assert is_answered(connection)
        answer = ask(house, HEAD + b"\r\n")
        assert "more than 2 connections" in check(answer, 503)
        assert b"retry-after: 1" in answer
        probe = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert ask(house, probe).startswith(b"HTTP/1.1 200 ")
        assert is_answered(open_ones[0])  # who was there first goes on
        open_ones.pop().close()
        house.wait_until(lambda: ask(house, probe.replace(b"/health", b"/version"))[9:12] == b"200")


def test_connections_far_over_the_bound_are_closed_unheard():
    with open_house(limits=Limits(max_connections=1)) as house, contextlib.ExitStack() as stack:
        for _ in range(1 + SPARE_CONNECTIONS):
            stack.enter_context(connect(house))
        assert all_of(stack.enter_context(connect(house))) == b""
