"""The models that answer, side by side while a version is rolled out, and which call gets which.

No HTTP and no JAX. Everything belongs to the event loop. A call holds the model that it got until
it has ended; whoever takes a model away waits for its calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from jaxinfer.errors import InvalidRequest
from jaxinfer.rollout import place_of

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.server.served_model import ServedModel

VERSION_HEADER = "x-jaxinfer-version"
Role = Literal["stable", "canary", "standby", "leaving"]


class ServedVersions:
    """A stable model, perhaps a canary that gets a share of the calls, and others that only those
    get who name them.
    """

    def __init__(self) -> None:
        self._by_version: dict[str, ServedModel] = {}  # all that take calls
        self._leaving: dict[str, ServedModel] = {}  # taken away, and waited for
        self._stable: str | None = None
        self._canary: str | None = None
        self._share = 0.0
        self._num_calls: Counter[str] = Counter()  # no zeros
        self._ended = asyncio.Event()

    @property
    def stable(self) -> ServedModel | None:
        """None before the server is ready."""
        return None if self._stable is None else self._by_version[self._stable]

    @property
    def canary(self) -> ServedModel | None:
        return None if self._canary is None else self._by_version[self._canary]

    @property
    def share(self) -> float:
        """Of the calls that name no version: how much the canary gets."""
        return self._share if self._canary is not None else 0.0

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """Those that take calls, in the order of their coming."""
        return tuple(self._by_version.values())

    @property
    def here(self) -> tuple[ServedModel, ...]:
        """`all`, and those that were taken away and may still have calls."""
        return (*self.all, *self._leaving.values())

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        """Of those that are here, each once."""
        return tuple({id(model.engine): model.engine for model in self.here}.values())

    def role_of(self, version: str) -> Role:
        """standby: only those get it who name it."""
        if version == self._stable:
            return "stable"
        if version == self._canary:
            return "canary"
        return "standby" if version in self._by_version else "leaving"

    def share_of(self, version: str) -> float:
        """Of the calls that name no version."""
        shares = {self._stable: 1.0 - self.share, self._canary: self.share}
        return shares.get(version, 0.0)

    def is_stable(self, version: str) -> bool:
        return version == self._stable

    def add(self, model: ServedModel) -> None:
        """From here on it answers those who name it; one of the same version is replaced."""
        self._by_version[model.version] = model
        self._leaving.pop(model.version, None)

    def serve(self, model: ServedModel) -> None:
        """Makes it the stable one; who was it stays, for those who name it."""
        self.add(model)
        self._stable = model.version
        if self._canary == model.version:
            self._canary = None

    def try_out(self, version: str, share: float) -> None:
        """One that was added gets this share of the calls, from 0 to 1."""
        self._canary, self._share = version, share

    def remove(self, version: str) -> None:
        """It gets no more calls; unknown ones are ignored. Not for the stable one.

        It is here until `wait_until_unused` has returned.
        """
        assert version != self._stable, "another one must be stable first"
        if self._canary == version:
            self._canary = None
        model = self._by_version.pop(version, None)
        if model is not None:
            self._leaving[version] = model

    def choose(
        self, key: str, pinned: str | None = None, *, param: str = VERSION_HEADER
    ) -> ServedModel:
        """The model of a call. There must be a stable one.

        Args:
            key: calls of one key get the same model, as long as shares only grow.
            pinned: the version that the call names.
            param: where it does.
        Raises: InvalidRequest for a version that is not there.
        """
        if pinned is not None:
            return self._named(pinned, param)
        stable, canary = self.stable, self.canary
        assert stable is not None
        if canary is None or place_of(key, canary.version) >= self._share:
            return stable
        # One whose engine has died answers nobody; this is before the choice, not instead of it.
        return canary if canary.engine.is_alive else stable

    def _named(self, version: str, param: str) -> ServedModel:
        found = self._by_version.get(version)
        if found is None:
            raise InvalidRequest(
                f"the weights version {version[:80]!r} is not served; there is "
                f"{', '.join(self._by_version)}",
                param=param,
            )
        return found

    @contextmanager
    def call(self, model: ServedModel) -> Generator[None]:
        """Around a call that `model` answers."""
        self._num_calls[model.version] += 1
        try:
            yield
        finally:
            self._num_calls[model.version] -= 1
            if not self._num_calls[model.version]:
                del self._num_calls[model.version]
                self._ended.set()

    def num_calls(self, version: str) -> int:
        """Calls that have not ended."""
        return self._num_calls[version]

    async def wait_until_unused(self, version: str) -> None:
        """Returns when no call of a removed version is left; then it is here no more."""
        while self._num_calls[version]:
            self._ended.clear()
            await self._ended.wait()
        self._leaving.pop(version, None)
