"""The published document is true: of the routes, of the ranges, and of what the server answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks
from starlette.routing import Route

from jaxinfer.config import SamplingParams
from jaxinfer.errors import InvalidRequest
from jaxinfer.server.dashboard_page import dashboard_routes
from jaxinfer.server.edge import Edge
from jaxinfer.server.openapi import RANGES
from jaxinfer.server.routes import ABSENT_FEATURES, OPERATIONS, routes
from tests.server.house import House, open_house
from tests.server.scripted_rollouts import ScriptedRollouts

KEYS = {"Authorization": "Bearer boss"}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.ignored_auth,
]

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def locked() -> Iterator[House]:
    with open_house(api_keys=("user",), edge=Edge(admin_keys=("boss",))) as house:
        house.state.rollouts = cast(Any, ScriptedRollouts())
        yield house


@pytest.fixture(scope="module")
def published(locked: House) -> dict[str, Any]:
    return locked.get("/openapi.json", headers=KEYS).json()


def test_every_route_is_described(locked: House, published: dict[str, Any]):
    paths = {route.path for route in routes(locked.state, Edge()) if isinstance(route, Route)}
    pages = {r.path for r in dashboard_routes(locked.state) if isinstance(r, Route)}
    left_out = {*ABSENT_FEATURES, "/openapi.json", *pages}
    described = {key.rpartition(" ")[2] for key in OPERATIONS}
    assert described == paths - left_out
    assert {path.replace(":path", "") for path in described} == set(published["paths"])


def test_a_path_of_several_methods_has_an_operation_for_each(published: dict[str, Any]):
    operations = published["paths"]["/admin/versions"]
    assert set(operations) == {"get", "post"}
    assert "requestBody" not in operations["get"]
    assert {"200", "202", "409"} <= set(operations["post"]["responses"])
    ids = [o["operationId"] for path in published["paths"].values() for o in path.values()]
    assert len(ids) == len(set(ids))


def test_a_key_is_asked_for_where_the_server_asks(house: House, published: dict[str, Any]):
    def locked_paths(document: dict[str, Any]) -> set[str]:
        return {
            path
            for path, methods in document["paths"].items()
            for operation in methods.values()
            if operation["security"]
        }

    assert locked_paths(published) == set(published["paths"]) - {"/health", "/ready"}
    with open_house(api_keys=("user",), edge=Edge(open_metrics=True)) as open_metrics:
        half = open_metrics.get("/openapi.json", headers={"Authorization": "Bearer user"}).json()
    assert locked_paths(published) - locked_paths(half) == {"/metrics"}
    public = house.get("/openapi.json").json()
    assert locked_paths(public) == {p for p in public["paths"] if p.startswith("/admin/")}


def properties(published: dict[str, Any], name: str) -> dict[str, Any]:
    return published["components"]["schemas"][name]["properties"]


def test_the_wire_types_are_there_with_their_ranges(published: dict[str, Any]):
    fields = properties(published, "ChatRequest")
    number, null = fields["temperature"]["anyOf"]
    assert number == {"type": "number", "minimum": 0, "maximum": 2}
    assert null == {"type": "null"}
    assert fields["messages"]["maxItems"] == 10_000
    assert fields["logprobs"]["anyOf"][0] == {"type": "boolean"}
    for name, item in (("ChatChoice", "ChatChoice"), ("ChatDelta", "ChatDelta")):
        choices = properties(published, f"CompletionOf{name}")["choices"]
        assert choices["items"] == {"$ref": f"#/components/schemas/{item}"}


# What is not a field of SamplingParams: names that stand for one, and what the wire adds.
STANDS_FOR = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
NOT_SAMPLED = {"messages", "tokens"}


def is_taken(name: str, value: Any) -> bool:
    fields: dict[str, Any] = {"max_tokens": None, STANDS_FOR.get(name, name): value}
    try:
        SamplingParams(**fields)
    except InvalidRequest:
        return False
    return True


def edges(rule: dict[str, Any], step: float) -> tuple[list[Any], list[Any]]:
    """Values just inside and just outside of a range."""
    inside, outside = [], []
    for keyword, sign in (("minimum", -1), ("maximum", 1)):
        if keyword in rule:
            inside.append(rule[keyword])
            outside.append(rule[keyword] + sign * step)
    if "exclusiveMinimum" in rule:
        inside.append(rule["exclusiveMinimum"] + step)
        outside.append(rule["exclusiveMinimum"])
    return inside, outside


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in RANGES for k in ("integer", "number") if k in RANGES[n]],
)
def test_a_range_of_numbers_is_that_of_sampling_params(name: str, kind: str):
    inside, outside = edges(dict(RANGES[name][kind]), 1 if kind == "integer" else 1e-9)
    assert inside
    assert all(is_taken(name, value) for value in inside)
    assert not any(is_taken(name, value) for value in outside)


def test_the_other_ranges_are_those_of_sampling_params():
    stop, bias = RANGES["stop"], RANGES["logit_bias"]["object"]
    assert stop["string"]["minLength"] == 1
    assert not is_taken("stop", "")
    most = stop["array"]["maxItems"]
    assert is_taken("stop", ["x"] * most)
    assert not is_taken("stop", ["x"] * (most + 1))
    assert is_taken("stop_token_ids", [0])
    assert not is_taken("stop_token_ids", [-1])
    most = bias["maxProperties"]
    assert is_taken("logit_bias", {str(i): 1 for i in range(most)})
    assert not is_taken("logit_bias", {str(i): 1 for i in range(most + 1)})
    inside, outside = edges(bias["additionalProperties"], 1e-9)
    assert all(is_taken("logit_bias", {"5": value}) for value in inside)
    assert not any(is_taken("logit_bias", {"5": value}) for value in outside)
    assert set(RANGES) - NOT_SAMPLED - set(STANDS_FOR) <= set(SamplingParams.__dataclass_fields__)


def explore(house: House, document: dict[str, Any], mode: GenerationMode, count: int) -> set[int]:
    """Sends `count` requests per operation and checks each answer. Returns: the statuses seen."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=house.url)
    seen: set[int] = set()
    session = requests.Session()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        written = document["paths"][operation.path][operation.method]
        if mode is GenerationMode.NEGATIVE and "requestBody" not in written:
            continue  # nothing to spoil

        @hypothesis.given(case=operation.as_strategy(mode, headers=KEYS))
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=SLOW_TO_DRAW,
        )
        def answers_as_written(case: schemathesis.Case) -> None:
            reply = case.call_and_validate(headers=KEYS, session=session, checks=CHECKS, timeout=20)
            seen.add(reply.status_code)

        answers_as_written()
    return seen


@pytest.fixture
def kept_log_levels():
    """One of the operations changes them."""
    loggers = [logging.getLogger(name) for name in ("jaxinfer", "checkpoints", "pallas_kernels")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("kept_log_levels")
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_server_answers_as_it_is_written(
    locked: House, published: dict[str, Any], mode: GenerationMode, count: int
):
    seen = explore(locked, published, mode, count)
    assert 400 in seen
    assert 200 in seen or mode is GenerationMode.NEGATIVE
    locked.wait_until_idle()
