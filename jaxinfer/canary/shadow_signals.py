"""How far a canary's next tokens are from the stable version's, on prompts that both computed."""

from __future__ import annotations

import math

from jaxinfer.canary.facts import ShadowFacts
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.signal import Signal, scaled

KL_RANGE = 16.0  # times max_kl: where an observation is cut off
NLL_LOW, NLL_HIGH = -0.25, 2.0  # nats per token where an observation is cut off


class ShadowSignals:
    """Those that are on.

    A mean over a prompt has no bounds, so it is cut off. High ones: that lowers the mean, so it
    raises no alarm. What is lower than `NLL_LOW` counts as that: a canary whose mean is good only
    for a few prompts that are better by more is not good by this test.
    """

    def __init__(self, guard: Guard):
        self._max_kl = guard.max_kl
        self._kl: Signal | None = None
        self._nll: Signal | None = None
        if guard.max_kl is not None:
            self._kl = Signal("kl", "nats per token", 1.0 / KL_RANGE)
        if guard.max_nll_increase is not None:
            m0 = scaled(guard.max_nll_increase, NLL_LOW, NLL_HIGH)
            self._nll = Signal("nll_increase", "nats per token", m0)
        self.all = tuple(signal for signal in (self._kl, self._nll) if signal)

    def note(self, facts: ShadowFacts) -> None:
        """One without tokens says nothing; what is no number is as bad as can be."""
        if not facts.num_tokens:
            return
        if self._kl and self._max_kl:
            high = KL_RANGE * self._max_kl
            kl = facts.kl if math.isfinite(facts.kl) else high
            self._kl.see(kl)
            self._kl.bet(scaled(kl, 0.0, high))
        if self._nll:
            nll = facts.nll_increase if math.isfinite(facts.nll_increase) else NLL_HIGH
            self._nll.see(nll)
            self._nll.bet(scaled(nll, NLL_LOW, NLL_HIGH))
