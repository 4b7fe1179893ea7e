"""How far a canary's next token is from the stable version's, of the likeliest tokens of each.

Pure, no JAX and no numpy. Only the 20 likeliest tokens of each side and the token that stands in
the text are known. So KL(stable || canary) is bounded from below: by that of two coarser
distributions, whose cells are the tokens that are known to both, and one for all the rest (merging
cells never raises KL: the data-processing inequality). Of the rest more is known: the canary gives
a token that it does not list at most what it gives its last listed one. Where the common cell would
give one of the stable version's listed tokens more than that, it is a cell of its own, at that
bound. So a canary that has lost a likely token is not mistaken for one that is merely unsure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxinfer.canary.facts import ShadowFacts
from jaxinfer.outputs import TokenLogprob

NOISE = 1e-6  # probability: what is left of 1 after 21 float32 terms is not known more closely
LEAST_LOGPROB = -200.0  # below any float32 probability: so that one token leaves a mean finite


def shadow_facts(
    stable: Sequence[TokenLogprob], canary: Sequence[TokenLogprob]
) -> ShadowFacts | None:
    """Means over the leading tokens that both have; None if there are none.

    Raises: ValueError if they are not rows of the same tokens.
    """
    pairs = list(zip(stable, canary, strict=False))
    if not pairs:
        return None
    return ShadowFacts(
        num_tokens=len(pairs),
        kl=math.fsum(kl_at_least(a, b) for a, b in pairs) / len(pairs),
        nll_increase=math.fsum(nll_increase(a, b) for a, b in pairs) / len(pairs),
    )


def nll_increase(stable: TokenLogprob, canary: TokenLogprob) -> float:
    """Nats by which the canary finds the token less likely. Raises: ValueError for two tokens."""
    _check_same(stable, canary)
    return _clipped(stable.logprob) - _clipped(canary.logprob)


def kl_at_least(stable: TokenLogprob, canary: TokenLogprob) -> float:
    """A lower bound of KL(stable || canary), in nats. Raises: ValueError for two tokens."""
    _check_same(stable, canary)
    known_p, known_q = _known(stable), _known(canary)
    common = known_p.keys() & known_q.keys()
    divergence = math.fsum(_term(known_p[i], known_q[i]) for i in common)
    left_p = 1.0 - math.fsum(known_p[i] for i in common)
    left_q = 1.0 - math.fsum(known_q[i] for i in common)
    missing = (p for i, p in known_p.items() if i not in common)
    return divergence + _rest(left_p, left_q, sorted(missing, reverse=True), _last_listed(canary))


def _rest(left_p: float, left_q: float, missing: Sequence[float], most_q: float) -> float:
    """The least that the tokens outside of the common cells can add.

    Args:
        left_p, left_q: of the two sides, in sum.
        missing: of the stable version's listed tokens that the canary does not list, falling.
        most_q: that the canary can give one of them.
    """
    added = 0.0
    for p in missing:  # in the smallest KL the rest is given out in proportion, up to the bound
        if p * left_q <= most_q * left_p or left_q <= most_q:
            break
        added += _term(p, most_q)
        left_p, left_q = left_p - p, left_q - most_q
    return added + _term(max(left_p, 0.0), max(left_q, NOISE))


def _term(p: float, q: float) -> float:
    """What a cell adds: p log(p/q) - p + q. None is below 0, and over all cells they sum to KL."""
    return max(p * math.log(p / q) - p + q, 0.0) if p > 0.0 else q


def _known(row: TokenLogprob) -> Mapping[int, float]:
    """Token -> probability."""
    pairs = (*row.top, (row.token_id, row.logprob))
    return {token_id: math.exp(_clipped(logprob)) for token_id, logprob in pairs}


def _last_listed(row: TokenLogprob) -> float:
    """What a token that is not listed has at most."""
    return math.exp(min((logprob for _, logprob in row.top), default=0.0))


def _clipped(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _check_same(stable: TokenLogprob, canary: TokenLogprob) -> None:
    if stable.token_id != canary.token_id:
        raise ValueError(
            f"rows of one token can be compared; got {stable.token_id} and {canary.token_id}"
        )
