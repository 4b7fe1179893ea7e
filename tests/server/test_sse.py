"""Events as bytes, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxinfer.server.sse import ClientGone, Departure, EventSender, ReaderStalled


class Wire:
    """Keeps what is sent; may stall or break."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.stalls = False

    async def send(self, message: Any) -> None:
        if self.stalls:
            await asyncio.sleep(60)
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


def test_events_that_are_ready_together_go_out_in_one_write():
    async def check() -> None:
        wire = Wire()
        sender = EventSender(wire.send, stall_s=1)
        await sender.start()
        await sender.events([b"1", b"2"])
        await sender.events([])
        await sender.ping()
        await sender.finish([b"3"])
        assert wire.body == b"data: 1\n\ndata: 2\n\n: ping\n\ndata: 3\n\ndata: [DONE]\n\n"
        assert [m.get("body") for m in wire.messages[1:3]] == [
            b"data: 1\n\ndata: 2\n\n",
            b": ping\n\n",
        ]
        assert wire.messages[0]["status"] == 200
        assert wire.messages[-1]["more_body"] is False

    asyncio.run(check())


def test_a_stream_is_not_to_be_cached_or_collected():
    async def check() -> None:
        wire = Wire()
        await EventSender(wire.send, stall_s=1).start()
        headers = dict(wire.messages[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-cache"
        assert headers[b"x-accel-buffering"] == b"no"

    asyncio.run(check())


def test_a_reader_that_takes_nothing_is_gone_after_the_stall_time():
    async def check() -> None:
        wire = Wire()
        sender = EventSender(wire.send, stall_s=0.01)
        wire.stalls = True
        with pytest.raises(ReaderStalled, match="read nothing for 0"):
            await sender.events([b"1"])

    asyncio.run(check())


def test_a_broken_connection_is_a_client_that_has_gone():
    async def check() -> None:
        wire = Wire()
        wire.error = ConnectionResetError("reset by peer")
        with pytest.raises(ClientGone, match="reset by peer"):
            await EventSender(wire.send, stall_s=1).start()

    asyncio.run(check())


def test_departure_calls_back_when_the_client_goes():
    async def check() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        called: list[str] = []
        with Departure(messages.get) as departure:
            departure.call(lambda: called.append("now"))
            departure.check()
            await messages.put({"type": "http.request", "body": b""})
            await asyncio.sleep(0.001)
            assert not departure.has_happened
            await messages.put({"type": "http.disconnect"})
            await asyncio.sleep(0.001)
            assert called == ["now"]
            with pytest.raises(ClientGone):
                departure.check()
            departure.call(lambda: called.append("late"))
            assert called == ["now", "late"]

    asyncio.run(check())


def test_the_watch_ends_with_the_answer():
    async def check() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        with Departure(messages.get) as departure:
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        await messages.put({"type": "http.disconnect"})
        await asyncio.sleep(0.001)
        assert not departure.has_happened

    asyncio.run(check())
