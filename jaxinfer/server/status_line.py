"""One line every few seconds about what the engine does, while it does something.

Pure: the clock is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.server.metrics import Metrics
from jaxinfer.stats import PoolStats


@dataclass(slots=True)
class StatusLine:
    """Rates since the line before."""

    metrics: Metrics
    last_s: float
    _sampled: int = 0
    _computed: int = 0
    _queries: int = 0
    _hits: int = 0

    def line(self, pool: PoolStats, now_s: float) -> str | None:
        """The line, or None when nothing ran and nothing waits.

        Prompt tokens are those computed less those sampled: exact but for the one token by which a
        prompt's last chunk is both.
        """
        sampled = self.metrics.tokens_sampled - self._sampled
        computed = self.metrics.tokens_computed - self._computed
        queries = pool.prefix_query_tokens - self._queries
        hits = pool.prefix_hit_tokens - self._hits
        seconds = max(now_s - self.last_s, 1e-3)
        self._sampled += sampled
        self._computed += computed
        self._queries += queries
        self._hits += hits
        self.last_s = now_s
        if not (computed or pool.num_running or pool.num_waiting):
            return None
        hit_share = f"{hits / queries:.0%}" if queries > 0 else "-"
        return (
            f"prompt {max(computed - sampled, 0) / seconds:.1f} tok/s, "
            f"generation {sampled / seconds:.1f} tok/s, "
            f"running {pool.num_running}, waiting {pool.num_waiting}, "
            f"KV {pool.pages_used / max(pool.pages_total, 1):.0%}, prefix hit {hit_share}"
        )
