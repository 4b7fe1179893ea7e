"""A certificate comes back from its file as it was, and one that is damaged is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.certificate import read_certificate, shipped_certificate
from checkpoints.errors import CheckpointError
from tests.certificates import certified


def write(folder: Path, found: dict[str, Any]) -> None:
    (folder / "certificate.json").write_text(json.dumps(found))


def test_it_comes_back_as_it_was(tmp_path: Path):
    assert read_certificate(tmp_path) is None
    for kl in (0.003, 1, math.inf):
        write(tmp_path, certified("v", kl).to_json())
        assert read_certificate(tmp_path) == certified("v", kl)


def test_what_is_optional_may_be_absent(tmp_path: Path):
    found = certified("v").to_json()
    write(tmp_path, {k: v for k, v in found.items() if k not in ("layer_errors", "answers")})
    assert read_certificate(tmp_path) == replace(certified("v"), layer_errors=(), answers=())


def test_its_line_says_what_matters():
    assert certified("v").line() == (
        "int8 by nearest: KL 0.0030, perplexity 10.00 (+0.10 %), "
        "99.0 % of greedy tokens agree, 0.25 of the bytes"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("kl"),
        lambda found: found.update(kl="0.001"),
        lambda found: found.update(kl=True),
        lambda found: found.update(kl=None),
        lambda found: found.update(more=1),
        lambda found: found.update(quantized=7),
        lambda found: found.update(seed=0.5),
        lambda found: found.update(perplexity=10.0),
        lambda found: found["perplexity"].update(low="a"),
        lambda found: found.update(layer_errors=7),
        lambda found: found["layer_errors"][0].update(error="small"),
        lambda found: found.update(answers=[{"prompt": "a"}]),
        lambda found: found["answers"][0].update(quantized=None),
    ],
)
def test_what_is_no_certificate_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
):
    found = json.loads(json.dumps(certified("v").to_json()))
    change(found)
    write(tmp_path, found)
    path = tmp_path / "certificate.json"
    with pytest.raises(CheckpointError, match=f"{path}: expected a certificate, found "):
        read_certificate(tmp_path)


def test_the_package_s_own_is_found_by_the_version_it_names(tmp_path: Path):
    write(tmp_path, certified("v").to_json())
    assert shipped_certificate("v", tmp_path) == certified("v")
    assert shipped_certificate("w", tmp_path) is None
