"""A pause refuses nobody: calls wait before they get a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.server.house import open_house


def test_a_call_waits_while_the_door_is_shut_and_others_are_refused_when_it_is_barred():
    with open_house() as house, ThreadPoolExecutor(2) as pool:
        door = house.state.door
        house.on_loop(lambda: door.shut("a version is streamed in"))
        calls = [pool.submit(house.complete, max_tokens=3) for _ in range(2)]
        house.wait_until(lambda: house.state.admission.num_open == 2)
        assert house.engine.num_open == 0
        assert house.get("/health").status_code == 200
        house.on_loop(door.open)
        assert [call.result(5).json()["choices"][0]["text"] for call in calls] == ["bcd"] * 2

        house.on_loop(lambda: door.shut("another one"))
        waiting = pool.submit(house.complete, max_tokens=3)
        house.wait_until(lambda: house.state.admission.num_open == 1)
        house.on_loop(lambda: door.bar("the weights are lost"))
        for reply in (waiting.result(5), house.complete(max_tokens=3)):
            assert reply.status_code == 503
            assert reply.json()["error"]["message"] == "the weights are lost"
        assert house.get("/health").status_code == 503
