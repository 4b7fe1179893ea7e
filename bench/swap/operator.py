"""The admin routes as an operator's script uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

KEY = "operator"
POLL_S = 0.05


class Refused(Exception):
    """An order that the server did not take; its words are in the message."""


class Operator:
    """Of one server.

    Args:
        fields: of every order, such as {"quantization": "int8"}.
    """

    def __init__(self, client: httpx.AsyncClient, fields: Mapping[str, Any]):
        self._client, self._fields = client, dict(fields)
        self._headers = {"authorization": f"Bearer {KEY}"}

    async def load(self, model: str, **fields: Any) -> dict[str, Any]:
        """Returns when it is loaded: the status. Raises: Refused."""
        order = {"model": model, "wait": True, **self._fields, **fields}
        return await self._call("POST", "/admin/versions", order)

    async def promote(self, version: str) -> dict[str, Any]:
        return await self._call("POST", f"/admin/versions/{version}/promote")

    async def roll_back(self, version: str) -> dict[str, Any]:
        return await self._call("POST", f"/admin/versions/{version}/rollback")

    async def drop(self, version: str) -> None:
        """Returns when it is gone."""
        await self._call("DELETE", f"/admin/versions/{version}")
        while any(found["version"] == version for found in (await self.status())["versions"]):
            await asyncio.sleep(POLL_S)

    async def status(self) -> dict[str, Any]:
        return await self._call("GET", "/admin/versions")

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        reply = await self._client.request(method, path, json=body, headers=self._headers)
        if reply.status_code >= 400:
            raise Refused(f"{reply.status_code}: {reply.json()['error']['message']}")
        return reply.json() if reply.content else {}
