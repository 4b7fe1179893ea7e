"""A test that may be looked at after every observation, by betting against the null.

Null: each observation x in [0, 1] has a mean of at most m0, given all before it. Whoever bets a
fixed part of a fortune on "more than m0" makes prod(1 + bet * (x - m0)) of 1, which the null does
not let grow in expectation; nor the mean of such fortunes over several bets, and over several
moments of beginning. So the chance that it ever reaches 1 / alpha is at most alpha, whenever and
however often one looks (Ville's inequality).

Half of the money is bet from the first observation on, the rest bit by bit later: 1 / (t * (t + 1))
of it from observation t on. So a version that turns bad after a good while is found, too; without
it, the good while would have eaten the fortune. So no fortune comes near 0, and no logarithms are
needed; infinity is a large number like others.

From: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
arXiv:2010.09686. Pure: no clock, no chance.
"""

from __future__ import annotations

FRACTIONS = (0.03, 0.1, 0.25, 0.55, 0.98)  # of the largest bet, 1 / m0; small for small effects


class Bets:
    """The fortunes of one null.

    Args:
        m0: largest mean of the null, within 0..1, both excluded.
    """

    def __init__(self, m0: float):
        if not 0.0 < m0 < 1.0:
            raise ValueError(f"a mean to bet against is within 0..1, not {m0}")
        self._m0 = m0
        self._bets = tuple(fraction / m0 for fraction in FRACTIONS)
        self._fortunes = [0.0] * len(FRACTIONS)  # of what has been put into each bet
        self._num_observations = 0

    def note(self, x: float) -> None:
        """One more observation; what lies outside 0..1 is taken as the nearer end."""
        self._num_observations += 1
        added = 1.0 / (self._num_observations * (self._num_observations + 1))
        gain = min(max(x, 0.0), 1.0) - self._m0
        self._fortunes = [
            (fortune + added) * (1.0 + bet * gain)
            for fortune, bet in zip(self._fortunes, self._bets, strict=True)
        ]

    @property
    def e_value(self) -> float:
        """Mean of the fortunes, with the money that is not bet yet; 1 at first."""
        reserve = 1.0 / (self._num_observations + 1)
        return reserve + sum(self._fortunes) / len(self._fortunes)
