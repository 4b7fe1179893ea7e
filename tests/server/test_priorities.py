"""Classes, time limits and refusals over HTTP."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxinfer.scheduling.request import Request
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.state import Limits
from tests.server.house import MODEL, House, open_house

CLASSES = PriorityClasses(
    (
        PriorityClass("interactive", -1, timeout_s=50.0, api_keys=("ki",)),
        PriorityClass("normal", 0, queue_timeout_s=20.0),
        PriorityClass("batch", 1, max_requests=2, api_keys=("kb",)),
    )
)


def spied(house: House) -> list[Request]:
    """What reaches the engine from now on."""
    seen: list[Request] = []
    submit = house.engine.submit

    def spy(*requests: Request) -> Any:
        seen.extend(requests)
        return submit(*requests)

    house.engine.submit = spy  # type: ignore[method-assign]
    return seen


@contextlib.contextmanager
def held(house: House, count: int, **fields: Any) -> Generator[None]:
    """So many requests are open while this lasts."""
    house.runner.gate.clear()
    num_open = house.state.admission.num_open
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(house.complete, "a", **fields) for _ in range(count)]
        house.wait_until(lambda: house.state.admission.num_open == num_open + count)
        try:
            yield
        finally:
            house.runner.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * count
    house.wait_until_idle()


def rejected(house: House, reason: str) -> float:
    lines = house.get("/metrics").text.splitlines()
    found = [line for line in lines if "rejected_total" in line and f'"{reason}"' in line]
    return float(found[0].rsplit(" ", 1)[1])


def test_the_class_of_a_request_reaches_the_scheduler():
    with open_house(classes=CLASSES) as house:
        seen = spied(house)
        header = {"x-jaxinfer-priority": "batch"}
        house.complete("a")
        house.complete("a", priority="interactive")
        house.complete("a", priority=-100)
        house.post("/v1/completions", {"prompt": "a"}, headers=header)
        house.post("/v1/completions", {"prompt": "a", "priority": "normal"}, headers=header)
        house.chat("a", priority=1, max_tokens=1)
        assert [r.priority for r in seen] == [0, -1, -1, 1, 0, 1]


def test_a_key_has_a_class_which_is_also_its_ceiling():
    keys = ("plain", *CLASSES.api_keys)
    with open_house(classes=CLASSES, api_keys=keys) as house:
        seen = spied(house)
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            reply = house.post("/v1/completions", {"prompt": "a"}, headers=headers)
            assert reply.status_code == 200
        assert [r.priority for r in seen] == [0, -1, 1]
        lowest = {"authorization": "Bearer kb"}
        for fields, more in (({"priority": "normal"}, {}), ({}, {"x-jaxinfer-priority": "normal"})):
            reply = house.post(
                "/v1/completions", {"prompt": "a", **fields}, headers={**lowest, **more}
            )
            assert reply.status_code == 403
            assert reply.json()["error"]["type"] == "permission_error"
            assert "'batch'" in reply.json()["error"]["message"]
        metrics = house.get("/metrics", headers=lowest).text
        assert f'rejected_total{{model_name="{MODEL}",reason="unauthorized"}} 2.0' in metrics
        assert house.complete("a").status_code == 401
        house.wait_until_idle()


def test_a_class_that_does_not_exist_is_a_400_that_names_those_that_do(house: House):
    for reply in (
        house.complete("a", priority="gold"),
        house.post("/v1/completions", {"prompt": "a"}, headers={"x-jaxinfer-priority": "gold"}),
    ):
        assert reply.status_code == 400
        assert "interactive, normal, batch" in reply.json()["error"]["message"]


def test_the_smallest_time_limit_reaches_the_scheduler():
    limits = Limits(request_timeout_s=40.0, queue_timeout_s=30.0)
    with open_house(classes=CLASSES, limits=limits) as house:
        seen = spied(house)
        house.complete("a")
        house.complete("a", priority="interactive")
        house.complete("a", timeout=10)
        house.post(
            "/v1/completions", {"prompt": "a", "timeout": 15}, headers={"x-request-timeout": "12.5"}
        )
        found = [
            (r.deadline_s and r.deadline_s - r.arrival_s, r.queue_deadline_s - r.arrival_s)  # type: ignore[operator]
            for r in seen
        ]
        wanted = [(40, 20), (40, 30), (10, 20), (12.5, 20)]
        assert [tuple(map(float, w)) for w in wanted] == [pytest.approx(f) for f in found]


@pytest.mark.parametrize("value", [0, -1, "5", True, [1], 10**400])
def test_a_time_limit_that_is_none_is_refused_by_name(house: House, value: Any):
    reply = house.complete("a", timeout=value)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "timeout"


def test_a_requests_own_time_limit_ends_it():
    with open_house() as house:
        house.runner.step_s = 0.02
        for headers, fields in (({}, {"timeout": 0.1}), ({"x-request-timeout": "0.1"}, {})):
            body = {"prompt": "a", "max_tokens": 200, **fields}
            reply = house.post("/v1/completions", body, headers=headers)
            assert reply.status_code == 504
            assert reply.json()["error"]["code"] == "deadline_exceeded"
            house.wait_until_idle()


def test_a_class_at_its_cap_is_refused_and_the_others_are_not():
    with open_house(classes=CLASSES) as house:
        with held(house, 2, priority="batch"):
            reply = house.complete("a", priority="batch")
            assert reply.status_code == 429
            assert "2 requests of class 'batch'" in reply.json()["error"]["message"]
            assert 1000 <= int(reply.headers["retry-after-ms"]) <= 60_000
            house.runner.gate.set()
            assert house.complete("a").status_code == 200
        assert rejected(house, "overloaded") == 1


def test_the_last_seats_are_for_those_whose_body_asks_for_a_better_class():
    limits = Limits(max_queued_requests=8)  # 7 for normal
    with open_house(limits=limits) as house, held(house, 7):
        assert house.complete("a").status_code == 429
        large = {"prompt": "a", "priority": "interactive", "user": "u" * 70_000}
        assert house.post("/v1/completions", large).status_code == 429
        header = {"x-jaxinfer-priority": "interactive"}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(house.complete, "a", priority="interactive")
            house.wait_until(lambda: house.state.admission.num_open == 8)
            full = house.post("/v1/completions", {"prompt": "a"}, headers=header)
            assert full.status_code == 429
            house.runner.gate.set()
            assert answer.result(10).status_code == 200


def test_tokens_over_the_bound_are_refused():
    with (
        open_house(limits=Limits(max_queued_tokens=240)) as house,
        held(house, 1, max_tokens=150),
    ):
        reply = house.complete("a", max_tokens=100)
        assert reply.status_code == 429
        assert "151 tokens are open" in reply.json()["error"]["message"]


def test_what_cannot_end_in_time_is_refused_at_once_and_counted_apart():
    with open_house(max_num_seqs=1) as house, ThreadPoolExecutor(1) as pool:
        house.runner.step_s = 0.01
        running = pool.submit(house.complete, "a", max_tokens=150)
        house.wait_until(lambda: house.metric("generation_tokens_total") > 20)
        reply = house.complete("a", timeout=0.3)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "deadline"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert house.complete("a", timeout=30).status_code == 200
        assert running.result(10).status_code == 200
        assert rejected(house, "deadline") == 1
        house.wait_until_idle()


def test_what_is_open_is_shown_by_class():
    with open_house(classes=CLASSES) as house:
        with held(house, 2, priority="batch", max_tokens=5):
            shown = house.get("/metrics").text
            labels = f'{{model_name="{MODEL}",priority_class="batch"}}'
            assert f"jaxinfer:open_requests{labels} 2.0" in shown
            house.wait_until(lambda: f"open_tokens{labels} 12.0" in house.get("/metrics").text)
            assert f"jaxinfer:queue_depth{labels} 2.0" in house.get("/metrics").text
        assert house.metric("open_requests") == 0
        assert house.metric("open_tokens") == 0
        assert house.metric("queue_depth") == 0


def test_three_times_as_many_clients_as_seats_leave_the_admitted_untouched():
    with open_house(limits=Limits(max_queued_requests=8)) as house:
        alone = house.complete("k", max_tokens=40).json()["choices"][0]["text"]
        house.runner.step_s = 0.002
        with httpx.Client(limits=httpx.Limits(max_connections=24)) as client:

            def call(number: int) -> httpx.Response:
                body = {"model": MODEL, "prompt": "k", "max_tokens": 40, "stream": number % 2 == 1}
                return client.post(f"{house.url}/v1/completions", json=body, timeout=20)

            with ThreadPoolExecutor(24) as pool:
                replies = list(pool.map(call, range(96)))
        counts = Counter(reply.status_code for reply in replies)
        assert set(counts) == {200, 429}
        assert counts[429] >= 10
        for reply in replies:
            if reply.status_code == 429:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
            elif reply.headers["content-type"].startswith("text/event-stream"):
                assert reply.text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in reply.text
            else:
                assert reply.json()["choices"][0]["text"] == alone
        house.wait_until_idle()
        assert rejected(house, "overloaded") == counts[429]
