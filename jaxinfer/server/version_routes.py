"""Routes under /admin/versions: another version of the weights comes, gets calls, stays or goes.

An admin key opens them. What they ask for, `Rollouts` does; an answer is the report of how things
stand then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.errors import InvalidRequest, ModelNotFound, Unavailable
from jaxinfer.server.body import read_body
from jaxinfer.server.openapi import Operation
from jaxinfer.server.protocol import parse
from jaxinfer.server.replies import json_reply
from jaxinfer.server.rollouts import Rollouts
from jaxinfer.server.state import ServerState
from jaxinfer.server.version_status import VersionCard, VersionsReport, versions_report
from jaxinfer.server.version_wire import LoadVersion, ReloadVersion

VERSIONS = "/admin/versions"
ONE = f"{VERSIONS}/{{version}}"
ROLLBACK = f"{VERSIONS}/{{version:path}}/rollback"  # before it is found, its name may be a path
LOOK_EVERY_S = 0.05  # while a caller waits for the end of loading

VERSION_OPERATIONS: Mapping[str, Operation] = {
    f"GET {VERSIONS}": Operation(VersionsReport),
    f"POST {VERSIONS}": Operation(VersionsReport, LoadVersion, is_accepted=True, statuses=(409,)),
    f"GET {ONE}": Operation(VersionCard, statuses=(404,)),
    f"DELETE {ONE}": Operation(VersionsReport, statuses=(404, 409)),
    f"{ONE}/promote": Operation(VersionsReport, statuses=(404, 409)),
    ROLLBACK: Operation(VersionsReport, statuses=(404, 409)),
    f"{ONE}/reload": Operation(
        VersionsReport, ReloadVersion, is_accepted=True, needs_body=False, statuses=(409,)
    ),
}


def version_routes(state: ServerState) -> list[Route]:
    """All of them."""
    rest = _VersionRoutes(state)
    return [
        Route(VERSIONS, rest.listed),
        Route(VERSIONS, rest.load, methods=["POST"]),
        Route(ONE, rest.one),
        Route(ONE, rest.drop, methods=["DELETE"]),
        Route(f"{ONE}/promote", rest.promote, methods=["POST"]),
        Route(ROLLBACK, rest.roll_back, methods=["POST"]),
        Route(f"{ONE}/reload", rest.reload, methods=["POST"]),
    ]


class _VersionRoutes:
    def __init__(self, state: ServerState):
        self._state = state

    async def listed(self, request: Request) -> Response:
        """The versions, the last rollout with its evidence, and what was decided."""
        return self._report()

    async def one(self, request: Request) -> Response:
        """One version."""
        version = request.path_params["version"]
        cards = {card.version: card for card in versions_report(self._state).versions}
        if version not in cards:
            raise ModelNotFound(
                f"no version {version[:80]!r} is here; there is {', '.join(cards) or 'none'}",
                param="version",
            )
        return json_reply(cards[version])

    async def load(self, request: Request) -> Response:
        """Another version: found and checked before the answer, loaded and tried out behind it."""
        body = await read_body(request.scope, request.receive, self._state.limits) or b""
        wire, _ = parse(body, LoadVersion)
        plan, recorded = wire.plan(), wire.recordings()
        rollouts = self._rollouts()
        order = wire.order(rollouts.stable_source)
        await rollouts.begin(order, plan, recorded=recorded, promotes_at_once=wire.promote)
        if not wire.wait:
            return self._report(202)
        await self._until_loaded(request)
        return self._report()

    async def promote(self, request: Request) -> Response:
        """All new calls go to this version."""
        await self._rollouts().promote(request.path_params["version"])
        return self._report()

    async def roll_back(self, request: Request) -> Response:
        """No new call goes to this version; those that began end where they began."""
        await self._rollouts().roll_back(request.path_params["version"])
        return self._report()

    async def reload(self, request: Request) -> Response:
        """The stable version is read again, and put in place in a quiet moment."""
        body = await read_body(request.scope, request.receive, self._state.limits)
        wire, _ = parse(body or b"{}", ReloadVersion)
        wire.check()
        version = request.path_params["version"]
        await self._rollouts().reload(version, within_s=wire.within_s)
        return self._report(202)

    async def drop(self, request: Request) -> Response:
        """No call goes to this version any more; its memory is free when its last one has ended."""
        await self._rollouts().drop(request.path_params["version"])
        return self._report()

    def _report(self, status: int = 200) -> Response:
        return json_reply(versions_report(self._state), status)

    def _rollouts(self) -> Rollouts:
        """Raises: Unavailable while it loads or shuts down."""
        self._state.served()
        if self._state.rollouts is None:
            raise Unavailable("versions cannot be changed yet", retry_after_s=1.0, code="loading")
        return self._state.rollouts

    async def _until_loaded(self, request: Request) -> None:
        """Raises: InvalidRequest with the reason if it does not get that far."""
        while (rollout := versions_report(self._state).rollout) and rollout.phase == "loading":
            if await request.is_disconnected():
                return
            await asyncio.sleep(LOOK_EVERY_S)
        if rollout is not None and rollout.phase == "failed":
            raise InvalidRequest(rollout.reason, param="model", code="load_failed")
