"""Channels of activations that reach far beyond the others of their site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RATIO = 20.0  # times the site's median channel: what int8 with one scale leaves 6 levels for


@dataclass(frozen=True, slots=True)
class Outliers:
    """Of one site, before its channels are scaled."""

    site: str  # its first product, e.g. "layers.3.mlp.down_proj"
    channels: tuple[int, ...]  # the farthest first
    ratios: tuple[float, ...]  # of each: its largest magnitude / the median channel's


def outliers_of(site: str, largest: npt.NDArray[np.float32], ratio: float = RATIO) -> Outliers:
    """Channels whose largest magnitude is above `ratio` times the median of all channels'.

    Args:
        largest: float32[K], of each channel.
    """
    median = float(np.median(largest))
    if median == 0:
        return Outliers(site, (), ())
    ratios = largest / median
    far = [int(i) for i in np.argsort(-ratios, kind="stable") if ratios[i] > ratio]
    return Outliers(site, tuple(far), tuple(float(ratios[i]) for i in far))
