"""What operators send for a version, as wire types, and what that means to the rollout.

No HTTP. A field that is not known is refused: a typo must not change what a rollout does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from jaxinfer.canary.guard import Guard
from jaxinfer.canary.schedule import DEFAULT_STAGES, Stage, check_share
from jaxinfer.config import ModelSource, Quantize
from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.rollout import RolloutPlan
from jaxinfer.server.smoke import MAX_RECORDED, MAX_TOKENS, Recorded
from jaxinfer.version_order import SwapMode, VersionOrder

# Their ranges are those of Stage and Guard, which say more when they refuse.
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
AtLeastZero = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Signal = AtLeastZero | None | UnsetType

RELOAD_WITHIN_S = 600.0
RECORDED_TOKENS = 32
SHADOW_SHARE = 0.05  # of the calls; how much of the time that may take is bounded besides


class StageFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Left out: as a stage of the default schedule."""

    share: Share
    hold_s: AtLeastZero | UnsetType = UNSET
    min_requests: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class GuardFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """See Guard. Null switches a signal off."""

    false_alarm_rate: AtLeastZero | UnsetType = UNSET
    max_slowdown: Signal = UNSET
    max_kl: Signal = UNSET
    max_nll_increase: Signal = UNSET
    max_length_rank: Signal = UNSET
    max_repetition_rank: Signal = UNSET
    max_cut_increase: Signal = UNSET


class RecordedFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `prompt` or `messages`."""

    text: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = RECORDED_TOKENS


class LoadVersion(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/versions. At most one of `share`, `schedule` and `promote`."""

    model: Annotated[str, Meta(min_length=1)]
    revision: str | None = None
    quantization: Quantize | None = None
    max_kl: AtLeastZero | Literal["inf"] | None = None
    version: str | None = None  # that it must be
    share: Share | None = None
    schedule: Annotated[list[StageFields], Meta(min_length=1)] | None = None
    promote: bool = False
    guard: GuardFields | None = None
    shadow_share: Share | None = None
    swap_mode: SwapMode = "beside"
    recorded: Annotated[list[RecordedFields], Meta(max_length=MAX_RECORDED)] = []
    wait: bool = False

    def order(self, stable: ModelSource) -> VersionOrder:
        """What is not given is as of the stable version. Raises: InvalidRequest."""
        given: dict[str, Any] = {"model": self.model, "revision": self.revision}
        if self.quantization is not None:
            given["quantization"] = self.quantization
        if self.max_kl is not None:
            given["max_kl"] = float(self.max_kl)
        try:
            source = dataclasses.replace(stable, **given)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="max_kl") from None
        return VersionOrder(source, expected_version=self.version, swap_mode=self.swap_mode)

    def plan(self) -> RolloutPlan:
        """Raises: InvalidRequest."""
        self._check_one_way()
        default = 0.0 if self.promote else SHADOW_SHARE
        shadow_share = default if self.shadow_share is None else self.shadow_share
        check_share("shadow_share", shadow_share)
        return RolloutPlan(
            stages=self._stages(),
            guard=self._guard(),
            shadow_share=shadow_share,
            promotes=self.share is None,
        )

    def recordings(self) -> tuple[Recorded, ...]:
        """Raises: InvalidRequest."""
        return tuple(map(_recorded, self.recorded, range(len(self.recorded))))

    def _check_one_way(self) -> None:
        ways = {"share": self.share, "schedule": self.schedule, "promote": self.promote or None}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"expected one of share, schedule and promote; got {' and '.join(given)}",
                param=given[-1],
            )
        if self.promote and (self.guard is not None or self.shadow_share):
            raise InvalidRequest(
                "promote gives it all calls at once, and nothing is judged: leave out guard and "
                "shadow_share, or send share or schedule instead",
                param="promote",
            )

    def _stages(self) -> tuple[Stage, ...]:
        if self.promote:
            return ()
        if self.share is not None:
            return (Stage(self.share),)
        if self.schedule is None:
            return DEFAULT_STAGES
        return tuple(Stage(**_given(stage)) for stage in self.schedule)

    def _guard(self) -> Guard:
        return Guard() if self.guard is None else Guard(**_given(self.guard))


class ReloadVersion(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/versions/{version}/reload."""

    within_s: AtLeastZero = RELOAD_WITHIN_S  # that a quiet moment is sought; then it is made

    def check(self) -> None:
        """Raises: InvalidRequest."""
        if not (math.isfinite(self.within_s) and self.within_s >= 0):
            raise InvalidRequest(
                f"within_s is a number of seconds from 0, not {self.within_s!r}", param="within_s"
            )


def _recorded(fields: RecordedFields, number: int) -> Recorded:
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest(
            f"recorded[{number}]: expected either prompt or messages", param="recorded"
        )
    prompt = fields.prompt if fields.prompt is not None else tuple(fields.messages or ())
    return Recorded(prompt, fields.text, fields.max_tokens)


def _given(fields: Struct) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(fields).items() if v is not UNSET}
