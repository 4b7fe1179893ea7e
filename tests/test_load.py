"""The soak and the overload of bench/, scaled down: `pytest -m load`."""

from __future__ import annotations

import pytest

import bench.overload
import bench.soak


@pytest.mark.load
@pytest.mark.timeout(600)
def test_a_soak_with_failing_steps_and_leaving_clients_changes_no_reply_and_leaks_nothing(
    capsys: pytest.CaptureFixture[str],
):
    code = bench.soak.main(["--requests", "2000", "--clients", "24"])
    print(capsys.readouterr().out)
    assert code == 0


@pytest.mark.load
@pytest.mark.timeout(600)
def test_at_several_times_its_capacity_a_server_answers_as_much_as_before(
    capsys: pytest.CaptureFixture[str], default_model: object
):
    code = bench.overload.main(["--model", str(default_model), "--seconds", "40"])
    print(capsys.readouterr().out)
    assert code == 0
