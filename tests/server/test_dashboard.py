"""The page and the Grafana file: whole, self-contained, and asking only for what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.server.dashboard_page import CONTENT_SECURITY_POLICY, FOLDER, PAGE, PARTS
from jaxinfer.server.version_status import DecisionCard, EvidenceCard, RolloutCard, VersionCard
from tests.server.house import MODEL, House, open_house

ROOT = Path(__file__).parents[2]
PAGE_TEXT = (FOLDER / PAGE).read_text("utf-8")
SCRIPTS = {n: (FOLDER / n).read_text("utf-8") for n in PARTS if n.endswith(".js")}
GRAFANA = json.loads((FOLDER / "grafana.json").read_text("utf-8"))


def test_the_page_and_its_parts_are_served_with_their_types_and_a_strict_policy():
    with open_house() as house:
        page = house.get("/dashboard")
        assert page.text == PAGE_TEXT
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name, kind in PARTS.items():
            part = house.get(f"/dashboard/{name}")
            assert (part.status_code, part.headers["content-type"]) == (200, kind)
            assert part.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert house.get("/dashboard/elsewhere.js").status_code == 404


def test_the_page_loads_nothing_from_elsewhere_and_nothing_inline():
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', PAGE_TEXT)
    assert {f"dashboard/{name}" for name in ("dashboard.js", "dashboard.css", "icon.svg")} <= {
        *loaded
    }
    known = {"metrics", "dashboard/grafana.json", *(f"dashboard/{name}" for name in PARTS)}
    assert set(loaded) <= known
    for text in (PAGE_TEXT, *SCRIPTS.values(), (FOLDER / "dashboard.css").read_text("utf-8")):
        urls = set(re.findall(r"https?:[^\"' ]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, "a name, not a place"
    assert not re.search(r"<style|\bstyle=|\bon[a-z]+=|<script(?! type=\"module\" src)", PAGE_TEXT)


def test_scripts_import_only_files_that_are_served():
    imported = {n for text in SCRIPTS.values() for n in re.findall(r'from "\./(.*?)"', text)}
    assert imported == {"chart.js", "chat.js", "series.js", "versions.js"}
    for text in SCRIPTS.values():
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert not re.search(r"localStorage|sessionStorage|document\.cookie", text)


def test_every_element_that_a_script_names_is_on_the_page():
    ids = set(re.findall(r'id="([^"]+)"', PAGE_TEXT))
    for name, text in SCRIPTS.items():
        named = set(re.findall(r'byId\("([^"]+)"\)', text))
        assert named <= ids, name


def test_every_metric_that_the_page_reads_is_in_its_data():
    script = SCRIPTS["dashboard.js"]
    read = set(re.findall(r"\bmetrics\.(\w+)", script)) | set(
        re.findall(r'(?:since|percentiles)\("(\w+)"\)', script)
    )
    kinds = set(re.findall(r'kind\("[^"]*", "[^"]*", "(\w+)"\)', script)) | set(
        re.findall(r"\bmemory\.(\w+)", script)
    )
    with open_house() as house:
        metrics = house.get("/dashboard/data").json()["metrics"]
    assert len(read) > 15
    shown_where_known = {"circuit_breaker_state", "queue_depth", "num_requests_paused"}
    assert read - shown_where_known <= metrics.keys()
    assert "kv_cached" in kinds
    assert kinds <= metrics["memory_bytes"].keys()


def test_data_is_what_the_exposition_says():
    with open_house() as house:
        house.complete("abc", max_tokens=5)
        found = house.get("/dashboard/data")
        assert found.headers["cache-control"] == "no-store"
        server, metrics = found.json()["server"], found.json()["metrics"]
        assert metrics["generation_tokens"] == house.metric("generation_tokens_total") == 5
        assert metrics["request_success"] == {"stop": 0, "length": 1, "timeout": 0, "error": 0}
        assert metrics["weights_version"] == {"version": "v1"}
        lengths = metrics["request_prompt_tokens"]
        assert lengths["bounds"][:3] == [1, 2, 5]
        assert lengths["counts"][:4] == [0, 0, 1, 0]
        assert (sum(lengths["counts"]), lengths["sum"]) == (1, 3)
        assert server["models"] == [MODEL]
        assert (server["phase"], server["ailment"]) == ("ready", None)
        assert 0 <= server["uptime_s"] < 60


def test_the_panel_of_versions_reads_what_the_report_has():
    script = SCRIPTS["versions.js"]
    cards = set(re.findall(r"\bcard\.(\w+)", script))
    assert len(cards) > 8
    assert cards <= set(VersionCard.__struct_fields__)
    (signal,) = re.findall(r"function barOf\(\{(.*?)\}\)", script)
    assert names_of(signal) <= set(EvidenceCard.__struct_fields__)
    (line,) = re.findall(r"function lineOf\(\{(.*?)\}\)", script)
    assert names_of(line) <= set(DecisionCard.__struct_fields__)
    (stand,) = re.findall(r"const \{(.*?)\} = rollout;", script)
    assert names_of(stand) <= set(RolloutCard.__struct_fields__)


def names_of(destructured: str) -> set[str]:
    return {part.split(":")[0].strip() for part in destructured.split(",")}


def test_while_loading_there_is_data_that_says_so():
    with open_house(is_ready=False) as house:
        server = house.get("/dashboard/data").json()["server"]
    assert (server["phase"], server["progress"]) == ("loading", "starting")
    assert (server["models"], server["max_model_len"]) == ([], None)


def test_with_keys_the_page_is_open_and_its_numbers_are_not():
    with open_house(api_keys=("k1",)) as house:
        for path in ("/dashboard", *(f"/dashboard/{name}" for name in PARTS)):
            assert house.get(path).status_code == 200
        for path in ("/dashboard/data", "/dashboard/grafana.json", "/metrics"):
            assert house.get(path).status_code == 401
            key = {"authorization": "Bearer k1"}
            assert house.get(path, headers=key).status_code == 200


def exposed(house: House) -> dict[str, set[str]]:
    """Sample name -> names of its labels."""
    text = house.get("/metrics").text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[dict[str, Any]]:
    return [t for panel in GRAFANA["panels"] for t in panel.get("targets", [])]


def test_every_query_of_grafana_is_of_metrics_and_labels_that_exist():
    with open_house() as house:
        known = exposed(house)
        values = set(re.findall(r'="([^"]*)"', house.get("/metrics").text))
    assert len(queries()) > 30
    for query in queries():
        expression = query["expr"]
        selected = re.findall(r"(jaxinfer:\w+)\{(.*?)\}", expression)
        assert selected, expression
        assert expression.count("jaxinfer:") == len(selected), "each has a selector"
        for name, selector in selected:
            assert name in known, expression
            labels = dict(re.findall(r'(\w+)=~?"(.*?)"', selector))
            grouped = re.findall(r"by \((\w+)\)", expression)
            shown = re.findall(r"\{\{(\w+)\}\}", query["legendFormat"])
            if len(selected) == 1:
                assert {*labels, *grouped, *shown} <= known[name], expression
            for label in labels.keys() - {"model_name"}:
                assert set(labels[label].split("|")) <= values, expression


def test_grafana_can_import_it():
    ids = [panel["id"] for panel in GRAFANA["panels"]]
    assert len(ids) == len(set(ids))
    inputs = {given["name"] for given in GRAFANA["__inputs"]}
    uids = {uid for q in queries() for uid in re.findall(r"\$\{(\w+)\}", q["datasource"]["uid"])}
    assert uids == inputs
    assert [v["name"] for v in GRAFANA["templating"]["list"]] == ["model"]
    for panel in GRAFANA["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        refs = [t["refId"] for t in panel.get("targets", [])]
        assert len(refs) == len(set(refs))


@pytest.mark.parametrize("name", [PAGE, "grafana.json", *PARTS])
def test_an_installation_ships_the_file(name: str):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["jaxinfer.server"]
    assert any((FOLDER / name) in FOLDER.parent.glob(pattern) for pattern in patterns)
