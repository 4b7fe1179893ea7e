"""The stable version once more, from where it came: the trivial case of another version.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxinfer.errors import InvalidRequest
from jaxinfer.server.smoke import smoke

if TYPE_CHECKING:
    from jaxinfer.server.arrival import Arrival
    from jaxinfer.server.version_slot import VersionSlot


async def reload(
    arrival: Arrival, stable: VersionSlot, *, within_s: float, on_found: Callable[[], None]
) -> None:
    """Puts what arrives in the place of the same version, at a quiet moment.

    Args:
        arrival: not begun.
        within_s: at most so long after it is read, the moment is waited for.
        on_found: told when it will be read.
    Raises: what the steps of `arrival` do; the version that was there serves on, except where
        `take_the_place_of` says otherwise.
    """
    await arrival.find()
    if arrival.is_apart:
        raise InvalidRequest(
            f"version {stable.name} has an engine of its own, which cannot be read again in "
            "place; load it as a new version",
            param="version",
        )
    on_found()
    await arrival.load()
    await arrival.wait_for_quiet(within_s)
    if arrival.is_streamed:
        await arrival.take_the_place_of(stable, ())
    else:
        await arrival.install()
    assert stable.model is not None
    await smoke(stable.model, ())
