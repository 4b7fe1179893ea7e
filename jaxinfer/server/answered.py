"""A request that was answered, for those who look at answers afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxinfer.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Answered:
    """The first choice of a request, when it has ended."""

    model: ServedModel  # that answered it
    request: Request
    token_ids: tuple[int, ...]  # of the output
    text: str
    finish: FinishReason
