"""A restart in a process of its own, on a tiny model."""

from __future__ import annotations

from functools import partial

import pytest

from bench.exactness.circumstance import Lab
from bench.exactness.probes import random_probes
from bench.exactness.restart import in_another_process, in_this_process, restart
from bench.exactness.subject import Restart, Subject
from bench.exactness.trace import difference
from jaxinfer.build import build
from jaxinfer.config import EngineConfig
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache

PROBES = random_probes((3, 40), 250, seed=0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    return tiny_engine_config(model, shared_cache(tmp_path_factory), **SMALL)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_restart_gives_the_same_bits_and_compiles_nothing(config: EngineConfig, elsewhere: bool):
    run: Restart = (
        in_another_process(config) if elsewhere else in_this_process(partial(build, config))
    )
    lab = Lab(Subject(build(config), restart=run), PROBES)
    (circumstance,) = restart()
    for probe in PROBES:
        case = lab.check(circumstance, probe)
        assert case.wrong is None, str(case)


def test_a_restart_that_compiles_proves_nothing(config: EngineConfig):
    subject = Subject(build(config))
    (circumstance,) = restart()

    def cold(requests):
        traces, about = in_this_process(partial(build, config))(requests)
        return traces, about.replace("0 compiled", "2 compiled")

    subject.restart = cold
    case = Lab(subject, PROBES).check(circumstance, PROBES[0])
    assert not case.is_proved
    assert case.wrong is not None
    assert "2 compiled" in case.wrong


def test_traces_come_back_whole(config: EngineConfig):
    requests = [probe.request for probe in PROBES]
    here, _ = in_this_process(partial(build, config))(requests)
    there, about = in_another_process(config)(requests)
    assert about.endswith("0 compiled")
    for one, other in zip(here, there, strict=True):
        assert difference(one, other) is None
        assert len(one) == len(other) > 0
        assert other.finish_reason == one.finish_reason
