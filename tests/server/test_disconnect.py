"""Clients that leave, stall or crowd in: pages come back and the others are served."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.responses import Response

from jaxinfer.server.process_memory import resident_bytes
from jaxinfer.server.replies import json_reply
from jaxinfer.server.state import Limits
from tests.server.house import House, letter_tokenizer, open_house


def send(
    house: House, body: dict[str, Any], path: str = "/v1/completions", *, buffer: int = 0
) -> socket.socket:
    """A raw request, so that the test decides when to read and when to hang up.

    Args:
        buffer: bytes that the kernel takes for it unread; 0: as it likes.
    """
    host, port = house.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


LONG = {"prompt": "a", "max_tokens": 200}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_hangs_up_frees_its_pages(stream: bool, n: int):
    with open_house() as house:
        house.runner.step_s = 0.01
        connection = send(house, {**LONG, "stream": stream, "n": n})
        house.wait_until(lambda: house.engine.pool_stats.num_running == n)
        connection.close()
        num_steps = house.runner.num_steps
        house.wait_until_idle(1.0)
        assert house.runner.num_steps - num_steps <= 4
        assert house.metric("aborted_total") == n


def test_all_prompts_of_a_call_are_aborted_together():
    with open_house() as house:
        house.runner.step_s = 0.01
        connection = send(house, {**LONG, "prompt": ["a", "b", "c"], "n": 2})
        house.wait_until(lambda: house.engine.pool_stats.num_running == 6)
        connection.close()
        house.wait_until_idle(1.0)
        assert house.metric("aborted_total") == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(stream: bool):
    with open_house(max_num_seqs=1) as house:
        house.runner.step_s = 0.01
        first = send(house, LONG)
        house.wait_until(lambda: house.engine.pool_stats.num_running == 1)
        second = send(house, {**LONG, "prompt": "b", "stream": stream})
        house.wait_until(lambda: house.engine.pool_stats.num_waiting == 1)
        second.close()
        house.wait_until(lambda: house.engine.pool_stats.num_waiting == 0, 1.0)
        assert house.engine.pool_stats.num_running == 1
        first.close()
        house.wait_until_idle(1.0)


def test_a_client_that_hangs_up_during_prefill_is_aborted():
    with open_house() as house:
        house.runner.gate.clear()
        connection = send(house, {**LONG, "prompt": "a" * 50})
        house.wait_until(lambda: house.engine.num_open == 1)
        connection.close()
        time.sleep(0.05)
        house.runner.gate.set()
        house.wait_until_idle(1.0)
        assert house.runner.num_steps <= 2


def test_a_client_that_hangs_up_while_its_prompt_is_tokenized_never_reaches_the_engine():
    tokenizer = SlowTokenizer()
    with open_house(tokenizer=tokenizer) as house:
        tokenizer.gate.clear()
        connection = send(house, LONG)
        house.wait_until(lambda: bool(tokenizer.threads))
        connection.close()
        time.sleep(0.05)
        tokenizer.gate.set()
        house.wait_until_idle(2.0)
        assert house.runner.num_steps == 0


SHAPES = ({}, {"n": 3}, {"prompt": ["a", "b"], "n": 2})


@pytest.mark.parametrize("phase", ["tokenizing", "queued", "prefill", "decode"])
def test_whoever_leaves_in_any_phase_gives_pages_and_permits_back_within_a_step(phase: str):
    tokenizer = SlowTokenizer()
    with open_house(tokenizer=tokenizer, max_num_seqs=4) as house:
        house.runner.step_s = 0.005
        for stream in (False, True):
            for shape in SHAPES:
                leave(house, tokenizer, phase, {**LONG, **shape, "stream": stream})


def leave(house: House, tokenizer: SlowTokenizer, phase: str, body: dict[str, Any]) -> None:
    """Sends a call, hangs up in that phase, and waits until nothing is left of it."""
    runner, engine = house.runner, house.engine
    held = [send(house, {**LONG, "n": 4})] if phase == "queued" else []
    house.wait_until(lambda: engine.pool_stats.num_running == 4 * len(held))
    gate = tokenizer.gate if phase == "tokenizing" else runner.gate
    if phase != "decode":
        gate.clear()
    num_open, num_steps = engine.num_open, runner.num_steps
    tokenizer.threads.clear()
    connection = send(house, body)
    house.wait_until(
        lambda: (
            bool(tokenizer.threads)
            if phase == "tokenizing"
            else engine.num_open > num_open
            and (phase != "decode" or runner.num_steps > num_steps + 2)
        )
    )
    for client in (connection, *held):
        client.close()
    time.sleep(0.02)
    num_steps = runner.num_steps
    gate.set()
    house.wait_until_idle(2.0)
    assert runner.num_steps - num_steps <= 2  # what was under way


def test_a_client_that_hangs_up_inside_its_body_leaves_nothing():
    with open_house() as house:
        connection = socket.create_connection(tuple(house.url[7:].split(":")))  # type: ignore[arg-type]
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        time.sleep(0.05)
        connection.close()
        house.wait_until_idle(1.0)
        assert house.complete("a").status_code == 200


def test_a_hundred_normal_requests_abort_nothing():
    with open_house() as house:
        for i in range(50):
            assert house.complete("a", max_tokens=2).status_code == 200
            assert house.complete("a", max_tokens=1 + i % 3, stream=True).status_code == 200
        house.wait_until_idle()
        assert house.metric("aborted_total") == 0


def test_of_32_streams_half_are_cut_at_random_and_the_others_get_their_solo_texts():
    choose = random.Random(3)
    prompts = [chr(97 + i % 26) * (1 + i % 19) for i in range(32)]
    lengths = [20 + (i * 7) % 60 for i in range(32)]
    with open_house(num_pages=128) as house:
        solo = [
            house.complete(p, max_tokens=m).json()["choices"][0]["text"]
            for p, m in zip(prompts, lengths, strict=True)
        ]
        house.runner.step_s = 0.001
        cut_after = [choose.randint(1, 10) if i % 2 else None for i in range(32)]

        def read(i: int) -> str | None:
            body = {"prompt": prompts[i], "max_tokens": lengths[i], "stream": True}
            url = f"{house.url}/v1/completions"
            texts: list[str] = []
            with house.client.stream("POST", url, json=body, timeout=20) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        texts.append(json.loads(line[6:])["choices"][0]["text"])
                    cut = cut_after[i]
                    if cut is not None and len(texts) >= cut:
                        return None
            return "".join(texts)

        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(read, range(32)))
        house.wait_until_idle(2.0)
        assert [t for t in found if t is not None] == [
            t for t, cut in zip(solo, cut_after, strict=True) if cut is None
        ]


def test_readers_that_read_nothing_are_cut_off_and_hold_no_memory(caplog):
    caplog.set_level(logging.INFO)
    body = {"messages": [{"role": "user", "content": "a"}], "n": 4, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 240}
    with open_house(limits=Limits(stall_s=0.3), send_buffer=16384, num_pages=256) as house:
        house.runner.step_s = 0.002
        before = resident_bytes()
        with contextlib.ExitStack() as connections:
            for _ in range(6):
                connections.enter_context(send(house, body, "/v1/chat/completions"))
            assert house.complete("a", max_tokens=3).json()["choices"][0]["text"] == "bcd"
            house.wait_until_idle(15.0)
        assert resident_bytes() - before < 64 * 2**20
        cut = [r for r in caplog.records if "has read nothing for 0.3 s" in r.getMessage()]
        assert len(cut) == 6


STALLED = {
    "messages": [{"role": "user", "content": "a"}],
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
    "max_completion_tokens": 200,
}


def test_of_fifty_stalled_readers_none_holds_pages_or_memory_and_the_others_get_their_texts():
    limits = Limits(stall_s=1.0)
    with open_house(limits=limits, send_buffer=4096, num_pages=512, max_unread_tokens=16) as house:
        prompts = ["a", "bb", "ccc"]
        solo = [house.complete(p, max_tokens=100).json()["choices"][0]["text"] for p in prompts]
        house.runner.step_s = 0.001
        before = resident_bytes()
        with contextlib.ExitStack() as connections, ThreadPoolExecutor(3) as pool:
            for _ in range(50):
                connections.enter_context(send(house, STALLED, "/v1/chat/completions", buffer=4096))
            good = [pool.submit(streamed, house, prompt) for prompt in prompts]
            house.wait_until(lambda: house.engine.pool_stats.num_paused > 0)
            assert [answer.result(20) for answer in good] == solo
            house.wait_until_idle(20.0)
        assert house.metric("readers_cut_total") == 50
        assert house.metric("num_requests_paused") == 0
        assert house.metric("num_preemptions_total") == 0
        assert resident_bytes() - before < 64 * 2**20


def streamed(house: House, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 100, "stream": True}
    url = f"{house.url}/v1/completions"
    with house.client.stream("POST", url, json=body, timeout=20) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


def test_a_reader_that_catches_up_after_a_pause_gets_every_token():
    with open_house(send_buffer=4096, max_unread_tokens=16) as house:
        whole = {k: v for k, v in STALLED.items() if k != "stream"}
        solo = house.post("/v1/chat/completions", whole).json()["choices"][0]
        with send(house, STALLED, "/v1/chat/completions", buffer=4096) as connection:
            house.wait_until(lambda: house.engine.pool_stats.num_paused == 1)
            assert house.engine.pool_stats.pages_used == 0
            received = bytearray()
            while b"[DONE]" not in received:
                received += connection.recv(65536)
        events = re.findall(rb"data: ({.*})", bytes(received))
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == solo["message"]["content"]
        content = [t for c in choices if c.get("logprobs") for t in c["logprobs"]["content"]]
        assert content == solo["logprobs"]["content"]
        assert house.metric("readers_cut_total") == 0
        house.wait_until_idle()


class SlowTokenizer:
    """The tokenizer of the house, which waits for `gate`."""

    def __init__(self) -> None:
        self._inner = letter_tokenizer()
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()
        self.spelling_threads: set[str] = set()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(10)
        return self._inner.encode(text, **options)

    def token_text(self, token_id: int) -> str:
        self.spelling_threads.add(threading.current_thread().name)
        return self._inner.token_text(token_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_health_answers_while_long_prompts_are_tokenized():
    """Five megabytes of text through the real tokenizer, and health polled all along."""
    with open_house() as house:
        prompt = "x" * 5_000_000
        done = threading.Event()
        status: list[int] = []

        def post() -> None:
            status.append(house.complete(prompt).status_code)
            done.set()

        thread = threading.Thread(target=post)
        thread.start()
        latencies: list[float] = []
        while not done.is_set():
            start = time.perf_counter()
            assert house.get("/health").status_code == 200
            latencies.append(time.perf_counter() - start)
            time.sleep(0.02)
        thread.join()
        assert status == [400]
        assert len(latencies) > 3


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_the_event_loop_is_free_while_a_prompt_is_tokenized(path: str):
    tokenizer = SlowTokenizer()
    with open_house(tokenizer=tokenizer) as house, ThreadPoolExecutor(1) as pool:
        tokenizer.gate.clear()
        answer = pool.submit(house.post, path, {"prompt": "abc"})
        house.wait_until(lambda: bool(tokenizer.threads))
        for _ in range(3):
            assert house.get("/health").status_code == 200
        assert not answer.done()
        tokenizer.gate.set()
        assert answer.result(5).status_code == 200


def test_over_the_bound_requests_get_429_at_once_with_a_time_to_come_back():
    with open_house(limits=Limits(max_queued_requests=2)) as house:
        house.runner.gate.clear()
        held = [send(house, LONG) for _ in range(2)]
        house.wait_until(lambda: house.state.admission.num_open == 2)
        for stream in (False, True):
            reply = house.complete("a", stream=stream)
            assert reply.status_code == 429
            assert reply.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert house.metric("rejected_total") == 2
        for connection in held:
            connection.close()
        house.runner.gate.set()
        house.wait_until_idle()
        assert house.complete("a").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [64]})]
)
def test_the_tokenizers_routes_need_room_too_and_give_it_back(path: str, body: dict[str, Any]):
    with open_house(limits=Limits(max_queued_requests=1)) as house:
        house.runner.gate.clear()
        held = send(house, LONG)
        house.wait_until(lambda: house.state.admission.num_open == 1)
        assert house.post(path, body).status_code == 429
        held.close()
        house.runner.gate.set()
        house.wait_until_idle()
        for _ in range(2):
            assert house.post(path, body).status_code == 200
            assert house.post(path, {}).status_code == 400


def test_a_call_takes_room_before_its_body_has_come():
    with open_house(limits=Limits(max_queued_requests=1)) as house:
        host, port = house.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            house.wait_until(lambda: house.state.admission.num_open == 1)
            assert house.complete("a").status_code == 429
        house.wait_until_idle()
        assert house.complete("a").status_code == 200


def test_each_of_n_choices_takes_room():
    with open_house(limits=Limits(max_queued_requests=4)) as house:
        house.runner.gate.clear()
        held = send(house, {**LONG, "n": 3})
        house.wait_until(lambda: house.state.admission.num_open == 3)
        assert house.complete("a", n=2).status_code == 429
        assert house.complete(["a", "b"]).status_code == 429
        assert house.state.admission.num_open == 3
        held.close()
        house.runner.gate.set()
        house.wait_until_idle()
        assert len(house.complete(["a", "b"], n=2).json()["choices"]) == 4
        for refused in (house.complete("a", n=5), house.chat("a", n=5)):
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "n"


def test_spelled_tokens_are_made_and_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def noting(content: Any) -> Response:
        threads.append(threading.current_thread())
        return json_reply(content)

    with open_house(tokenizer=(tokenizer := SlowTokenizer())) as house:
        monkeypatch.setattr("jaxinfer.server.routes.json_reply", noting)
        reply = house.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert reply.json()["token_strs"] == ["a", "b"]
        assert tokenizer.threads == tokenizer.spelling_threads == {t.name for t in threads}


def test_a_call_with_more_prompts_than_ever_fit_is_a_400():
    with open_house(limits=Limits(max_queued_requests=2)) as house:
        reply = house.complete(["a", "b", "c"])
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "prompt"


def test_permits_come_back_after_every_kind_of_end():
    with open_house(limits=Limits(max_queued_requests=3, request_timeout_s=0.2)) as house:
        house.complete("a")
        house.complete("a", stream=True)
        house.complete("a" * 999)
        house.complete("")
        house.runner.step_s = 0.05
        house.complete("a", max_tokens=100)
        house.runner.step_s = 0.0
        house.runner.fail_with = RuntimeError("no")
        house.complete("a")
        house.runner.fail_with = None
        house.wait_until_idle()
        assert house.complete(["a", "b", "c"]).status_code == 200
