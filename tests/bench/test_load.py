"""The load that is put on a server, and the table of what came back."""

from __future__ import annotations

from itertools import accumulate

import pytest

from bench import load
from bench.load import Replies, table
from bench.service.client import Reply
from tests.server.house import open_house


def reply(version: str, ttft_s: float, gaps_s: list[float], num_tokens: int = 4) -> Reply:
    times_s = list(accumulate(gaps_s, initial=0.0))
    return Reply(
        "done", 200, version=version, ttft_s=ttft_s, times_s=times_s, num_tokens=num_tokens
    )


def test_the_table_tells_versions_apart():
    replies = Replies()
    for first in (0.1, 0.2, 0.3):
        replies.add(reply("aaaa", first, [0.010, 0.020]))
    replies.add(reply("bbbb", 0.5, [0.040]))
    replies.add(Reply("refused", 429, "overloaded", version="bbbb"))
    lines = list(table(replies, 2.0))
    assert lines[1].split() == ["aaaa", "3", "0", "6.0", "200", "298", "15.0", "20.0"]
    assert lines[2].split() == ["bbbb", "2", "1", "2.0", "500", "500", "40.0", "40.0"]
    assert lines[3] == "1 x 429 overloaded"


@pytest.mark.parametrize("way", [["--clients", "3"], ["--rate", "40"]])
def test_chats_are_sent_to_a_server_until_the_time_is_over(
    way: list[str], capsys: pytest.CaptureFixture[str]
):
    with open_house() as house:
        args = [house.url, "--seconds", "0.5", "--max-tokens", "6", "--words", "3", *way]
        assert load.main(args) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    num_replies, num_bad = map(int, line[-7:-5])
    assert num_replies >= 3
    assert num_bad == 0


def test_a_server_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]):
    args = ["http://127.0.0.1:9", "--seconds", "0.05", "--clients", "1"]
    assert load.main(args) == 1
    assert "ConnectError" in capsys.readouterr().out
