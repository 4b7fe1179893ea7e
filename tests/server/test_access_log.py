"""One line per request, with its ids and numbers and nothing that anybody wrote."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from jaxinfer.server.edge import Edge
from jaxinfer.server.logs import ConsoleFormatter, JsonFormatter
from jaxinfer.server.request_record import CURRENT, RequestRecord, note, trace_id_of
from tests.server.house import House, open_house

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Lines(logging.Handler):
    """What our loggers write, as JSON lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("request_id") == request_id]


@pytest.fixture
def log():
    lines, logger = Lines(), logging.getLogger("jaxinfer")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)


def line_of(house: House, log: Lines, request_id: str) -> dict[str, Any]:
    house.wait_until(lambda: log.of(request_id))
    (line,) = log.of(request_id)
    return line


def mine(number: int) -> dict[str, str]:
    return {"x-request-id": f"r{number}", "traceparent": PARENT}


@pytest.mark.parametrize("stream", [False, True])
def test_a_generations_line_has_its_numbers(house: House, log: Lines, stream: bool):
    body = {"prompt": "3", "stream": stream}
    reply = house.post("/v1/completions?secret=1", body, headers=mine(1))
    assert reply.status_code == 200
    line = line_of(house, log, "r1")
    assert line["logger"] == "jaxinfer.access"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == (1, 4, "stop")
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["id"] in reply.text
    assert line["trace_id"] == TRACE
    assert "POST /v1/completions 200 " in line["message"]
    assert "output_tokens=4" in line["message"]


def test_a_failed_calls_line_says_how_it_ended(log: Lines):
    with open_house() as house:
        house.runner.fail_with = RuntimeError("broken")
        assert house.post("/v1/completions", {"prompt": "a"}, headers=mine(2)).status_code == 500
        line = line_of(house, log, "r2")
        assert (line["status"], line["finish"]) == (500, "error")
        assert "ttft_s" not in line


def test_an_unknown_path_and_a_wrong_method_are_not_shown_as_they_came(house: House, log: Lines):
    house.get("/secret?key=secret", headers=mine(3))
    line = line_of(house, log, "r3")
    assert (line["route"], line["status"]) == ("-", 404)
    assert "secret" not in json.dumps(line)
    house.get("/v1/models/secret", headers=mine(4))
    assert line_of(house, log, "r4")["route"] == "/v1/models/{name:path}"


def test_nothing_that_a_client_wrote_is_in_any_line(house: House, log: Lines):
    for number, fields in enumerate(({}, {"max_tokens": 0}, {"stop": ["secret"]}, {"user": "s"})):
        body = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 2, **fields}
        headers = {**mine(10 + number), "authorization": "Bearer secret"}
        house.post("/v1/chat/completions", body, headers=headers)
        line_of(house, log, f"r{10 + number}")
    assert "secret" not in json.dumps(log.lines)


def test_probes_are_silent_while_they_are_well(log: Lines):
    with open_house(is_ready=False) as house:
        for number, path in enumerate(("/health", "/metrics", "/ready")):
            house.get(path, headers=mine(20 + number))
        assert line_of(house, log, "r22")["status"] == 503
        assert not log.of("r20")
        assert not log.of("r21")


def test_the_lines_can_be_switched_off(log: Lines):
    with open_house(edge=Edge(log_requests=False)) as house:
        assert house.post("/v1/completions", {"prompt": "3"}, headers=mine(5)).status_code == 200
        house.wait_until_idle()
        assert not log.of("r5")


def test_other_lines_of_a_request_have_its_id_too(house: House, log: Lines):
    for size in (10, 100_000):  # the second is read on another thread
        body = {"prompt": "a", "max_tokens": 1, f"never_heard_{size}": "x" * size}
        house.post("/v1/completions", body, headers=mine(size))
        house.wait_until(lambda size=size: len(log.of(f"r{size}")) == 2)
        assert f"never_heard_{size}" in log.of(f"r{size}")[0]["message"]


def test_a_formatted_line_ends_with_the_id_of_its_request():
    record = logging.LogRecord("jaxinfer.x", logging.INFO, "f", 1, "said %d", (5,), None)
    assert ConsoleFormatter().format(record).endswith(" INFO said 5")
    token = CURRENT.set(RequestRecord("abc"))
    try:
        assert ConsoleFormatter().format(record).endswith(" INFO said 5 [abc]")
        assert json.loads(JsonFormatter().format(record))["request_id"] == "abc"
        note(a=1, b=None)
        assert CURRENT.get() == RequestRecord("abc", None, {"a": 1})
    finally:
        CURRENT.reset(token)
    note(a=1)  # outside of a request nobody listens


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        (PARENT, TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        ("", None),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-00f067aa0ba902b7", None),
    ],
)
def test_a_trace_id_is_taken_only_from_a_well_formed_traceparent(header: str, trace_id: str | None):
    assert trace_id_of(header) == trace_id
