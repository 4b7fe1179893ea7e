"""Start, signals and exit codes, in real processes around the scripted engine."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jaxinfer.server.lifecycle import _spare_what_stays

ROOT = Path(__file__).parents[2]


class Process:
    """A server process; its stderr is read along."""

    def __init__(self, *args: str):
        self.process = subprocess.Popen(
            [sys.executable, *args],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        line = self.wait_for("listening on ")
        return line.removeprefix("listening on ")

    def wait_for(self, start: str, seconds: float = 15.0) -> str:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (found := [line for line in self.lines if line.startswith(start)]):
                left = deadline - time.monotonic()
                assert left > 0, f"no line {start!r} in {self.lines}"
                self._changed.wait(min(left, 0.5))
        return found[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 10.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


@contextlib.contextmanager
def serving(step_s: float = 0.0, kind: str = "ok", *flags: str) -> Generator[Process]:
    module = ("-m", "tests.server.served_letters", str(step_s), kind)
    process = Process(*module, "--port", "0", *flags)
    try:
        yield process
    finally:
        process.end()


def stream(url: str, max_tokens: int) -> list[str]:
    body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as reply:
        return [line for line in reply.iter_lines() if line]


def test_a_clean_run_says_what_it_serves_and_exits_with_0():
    with serving() as process:
        url = process.url
        ready = process.wait_for("READY ")
        assert ready == f"READY {url} serves letters"
        ready_reply = httpx.get(f"{url}/ready")
        assert ready_reply.status_code == 200
        assert "server" not in ready_reply.headers
        metrics = httpx.get(f"{url}/metrics").text
        assert 'startup_seconds{model_name="smollm2-135m-instruct",phase="read"} 0.25' in metrics
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
        text = "\n".join(process.lines)
        assert "KV cache: 512 tokens; max concurrency for 256 tokens: 2.00" in text
        assert "memory: plenty" in text
        assert "start-up: read 0.2 s, total" in text
        assert "routes: /v1/chat/completions" in text
        assert "classes: interactive: priority -1, at most 256 requests; normal (default): " in text
        assert "batch: priority 1, at most 192 requests" in text
        assert "after: normal 30 s, batch 60 s" in text
        assert "Traceback" not in text
        assert "generation_config: top_p" in text


def test_while_it_loads_it_is_healthy_and_not_ready():
    with serving(0.0, "slow") as process:
        url = process.url
        assert httpx.get(f"{url}/health").status_code == 200
        ready = httpx.get(f"{url}/ready")
        assert ready.status_code == 503
        assert "reading letters" in ready.json()["error"]["message"]
        for path in ("/v1/models", "/v1/models/letters"):
            assert httpx.get(url + path).status_code == 503
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "loading"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        metrics = httpx.get(f"{url}/metrics").text
        assert re.search(r'rejected_total\{.*reason="loading"\} 4', metrics)
        process.signal(signal.SIGINT)
        assert process.exit_code() == 0


def test_a_load_error_is_one_line_and_exit_code_1():
    with serving(0.0, "fail") as process:
        assert process.exit_code() == 1
        assert process.lines[-1] == (
            "error: OSError: letters.gguf: expected 26 letters but found 25"
        )
        assert "Traceback" not in "\n".join(process.lines)


def test_a_load_error_shows_its_traceback_only_when_debugging():
    flags = ("--log-level", "debug", "--log-format", "json")
    with serving(0.0, "fail", *flags) as process:
        assert process.exit_code() == 1
        found = [json.loads(line) for line in process.lines]  # with JSON logs, every line
        assert any(line["message"].startswith("listening on ") for line in found)
        errors = [line["message"] for line in found if line["level"] == "error"]
        assert errors == ["OSError: letters.gguf: expected 26 letters but found 25"]
        assert any("Traceback" in line.get("exception", "") for line in found)


def test_a_setting_that_cannot_work_is_exit_code_2():
    with serving(0.0, "config") as process:
        assert process.exit_code() == 2
        assert process.lines[-1] == "error: page_size must fit; got 7"


def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_1():
    with serving(0.0, "unready") as process:
        assert process.exit_code() == 1
        assert process.lines[-1].startswith("error: AttributeError: ")
        assert "Traceback" not in "\n".join(process.lines)


def test_a_host_that_is_no_host_name_is_one_line_and_exit_code_1():
    with serving(0.0, "ok", "--host", "a..b") as process:
        assert process.exit_code() == 1
        assert process.lines[-1].startswith("error: cannot listen on a..b:0: ")
        assert "Traceback" not in "\n".join(process.lines)


def test_a_port_in_use_is_one_line_and_exit_code_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving(0.0, "ok", "--port", port) as process:
            assert process.exit_code() == 1
            assert process.lines[-1].startswith(f"error: cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_end_and_refuses_new_requests(number: int):
    with serving(0.005) as process, ThreadPoolExecutor(3) as pool:
        url = process.url
        process.wait_for("READY ")
        streams = [pool.submit(stream, url, 100) for _ in range(3)]
        while 'requests_running{model_name="smollm2-135m-instruct"} 3.0' not in (
            httpx.get(f"{url}/metrics").text
        ):
            time.sleep(0.01)
        process.signal(number)
        process.wait_for("draining: 3 open requests")
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        for future in streams:
            lines = future.result(10)
            assert lines[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in lines[-2]
        assert process.exit_code() == 0


def test_streams_that_outlast_the_shutdown_timeout_end_with_an_error():
    with serving(0.05, "ok", "--shutdown-timeout", "0.3") as process, ThreadPoolExecutor() as pool:
        url = process.url
        process.wait_for("READY ")
        future = pool.submit(stream, url, 200)
        time.sleep(0.3)
        process.signal(signal.SIGTERM)
        lines = future.result(10)
        assert lines[-1] == "data: [DONE]"
        assert '"error"' in lines[-2]
        assert process.exit_code() == 0


def test_connections_without_a_whole_request_do_not_hold_the_exit_up():
    with serving() as process, contextlib.ExitStack() as stack:
        url = process.url
        process.wait_for("READY ")
        host, port = url.removeprefix("http://").split(":")
        client = stack.enter_context(httpx.Client())
        assert client.get(f"{url}/health").status_code == 200  # and is kept
        for sent in (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
            connection = socket.create_connection((host, int(port)))
            stack.enter_context(connection).sendall(sent)
        process.signal(signal.SIGTERM)
        assert process.exit_code(5) == 0


def test_requests_are_logged_as_json_lines_without_queries():
    with serving(0.0, "ok", "--log-format", "json", "--api-key", "secret-key") as process:
        line = next(iter(process.wait_for("{").splitlines()))
        url = json.loads(line)["message"].removeprefix("listening on ")
        headers = {"authorization": "Bearer secret-key", "x-request-id": "mine"}
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.01)
        body = {"prompt": "3"}
        reply = httpx.post(f"{url}/v1/completions?a=secret", json=body, headers=headers)
        assert reply.status_code == 200
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
        lines = [json.loads(line) for line in process.lines]
        (logged,) = [line for line in lines if line.get("request_id") == "mine"]
        assert (logged["status"], logged["output_tokens"]) == (200, 4)
        assert "secret" not in "".join(process.lines)


def test_a_second_signal_exits_at_once():
    with serving(0.05) as process, ThreadPoolExecutor() as pool:
        url = process.url
        process.wait_for("READY ")
        future = pool.submit(stream, url, 200)
        time.sleep(0.2)
        process.signal(signal.SIGTERM)
        process.wait_for("draining: ")
        process.signal(signal.SIGTERM)
        assert process.exit_code(2.0) == 128 + signal.SIGTERM
        with pytest.raises(httpx.HTTPError):
            future.result(5)


def test_serve_py_refuses_bad_flags_with_exit_code_2():
    for flags, words in (
        (["--page-size", "7"], "page_size must divide"),
        (["--no-such-flag"], "unrecognized arguments"),
    ):
        done = subprocess.run(
            [sys.executable, "serve.py", *flags], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_serve_py_reports_a_missing_model_in_one_line_with_exit_code_1(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "serve.py", str(tmp_path / "missing.gguf"), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "missing.gguf" in last
    assert "Traceback" not in done.stderr


def test_the_server_half_never_imports_jax():
    code = (
        "import sys, serve, jaxinfer.server.lifecycle, jaxinfer.server.app, jaxinfer.async_engine;"
        "bad = [m for m in ('jax', 'jaxlib', 'flax') if m in sys.modules]; assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_start_leaves_is_spared_by_later_collections():
    before = gc.get_freeze_count()
    made: list[list[int]] = [[] for _ in range(10_000)]
    try:
        _spare_what_stays()
        assert gc.get_freeze_count() >= before + len(made)
        assert gc.collect() < 1_000
    finally:
        gc.unfreeze()
