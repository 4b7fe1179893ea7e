"""The live state of one choice of a request: its tokens, counters and page table.

Host only: no JAX. A sequence is *behind* while num_scheduled_tokens < num_tokens; a first prefill,
a chunk, a prefix hit and a resume after preemption are all that one case (idea: vLLM v1
scheduler). It decides nothing itself.

    #  |<- num_cached ->|<- computed here ->|<- in steps under way ->|      |
    #  0               128                 320                      448    500 = num_tokens
    #                                      num_computed             num_scheduled
    #  page_table: [ full, shared ][ full, shared ][ full ][ part ]

A step is dispatched before the one before it has been read. When all known tokens are scheduled,
the next one is on its way: num_tokens counts it, token_ids does not have it yet.
"""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING

from jaxinfer.constraint import Constraint
from jaxinfer.scheduling.rank import Rank, Turn
from jaxinfer.scheduling.request import Request
from jaxinfer.stats import RequestStats

if TYPE_CHECKING:
    from jaxinfer.scheduling.running_table import RunningTable

_MASK = (1 << 64) - 1


class Status(enum.Enum):
    """Where a sequence is. Only a running one holds pages."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, after it has given its pages back
    PAUSED = "paused"  # out of the queue, without pages, until its reader has caught up
    FINISHED = "finished"


class Sequence:
    """Choice `index` of `request`.

    Args:
        seed: of the request; each choice derives its own from it (`choice_seed`).
        version: of the weights that compute it from its first to its last token.
    """

    __slots__ = (
        "constraint",
        "first_scheduled_s",
        "first_token_s",
        "index",
        "is_awaited",
        "is_indexable",
        "max_total_tokens",
        "num_cached_tokens",
        "num_indexed_pages",
        "num_pages_wanted",
        "num_preemptions",
        "num_prompt_tokens",
        "num_proven_tokens",
        "num_retries",
        "page_digests",
        "page_table",
        "rank",
        "request",
        "salt",
        "seat",
        "seed",
        "status",
        "table",
        "token_ids",
        "turn",
        "version",
    )

    request: Request
    index: int
    version: str
    seed: int  # 64 bits, unsigned
    constraint: Constraint | None  # its own state, which follows the tokens that were read
    salt: tuple[str, str]  # (version, cache_salt): prefix pages are shared only within it
    token_ids: array[int]  # int32: prompt and output, as far as it has been read
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, taken from the prefix cache when it first ran
    max_total_tokens: int  # prompt and output end here; set when it is submitted
    page_table: list[int]
    num_indexed_pages: int  # leading pages that are in the prefix index
    is_indexable: bool  # False once a digest of its pages belongs to other tokens
    page_digests: list[bytes]  # of its full pages, as far as they were asked for
    num_pages_wanted: int  # it could not start with fewer when it last tried
    status: Status
    is_awaited: bool  # it was preempted while a token of it was on its way
    rank: Rank  # smaller runs first and is preempted last; unique
    turn: Turn  # smaller is served first with what is left
    table: RunningTable | None  # where it sits while it runs; has its counters
    seat: int  # its line there; -1: none
    num_preemptions: int
    num_retries: int  # in a row, without getting further
    num_proven_tokens: int  # it had got so far when that was last looked at
    first_scheduled_s: float | None
    first_token_s: float | None

    def __init__(self, request: Request, *, index: int, seed: int, version: str):
        self.request = request
        self.index = index
        self.version = version
        self.seed = choice_seed(seed, index)
        self.constraint = None if request.constraint is None else request.constraint.copy()
        self.salt = (version, request.cache_salt)
        self.token_ids = array("i", request.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.max_total_tokens = 0
        self.page_table = []
        self.num_indexed_pages = 0
        self.is_indexable = True
        self.page_digests = []
        self.num_pages_wanted = 0
        self.status = Status.WAITING
        self.is_awaited = False
        self.rank = (0.0, 0)
        self.turn = (0, self.rank)
        self.table = None
        self.seat = -1
        self.num_preemptions = 0
        self.num_retries = 0
        self.num_proven_tokens = 0
        self.first_scheduled_s = None
        self.first_token_s = None

    @property
    def num_scheduled_tokens(self) -> int:
        """In KV when the steps under way have ended."""
        return 0 if self.table is None else int(self.table.num_scheduled[self.seat])

    @property
    def num_computed_tokens(self) -> int:
        """In KV, by steps that have been read."""
        return 0 if self.table is None else int(self.table.num_computed[self.seat])

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with the token that a step under way draws."""
        return max(len(self.token_ids), self.num_scheduled_tokens + 1)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reached_tokens(self) -> int:
        """Leading tokens that steps which were read have computed: in this sitting, or to draw."""
        drawn = len(self.token_ids) - 1 if self.num_output_tokens else 0
        return max(self.num_computed_tokens, drawn)

    @property
    def num_behind(self) -> int:
        """Tokens to schedule before the next one can be drawn."""
        return max(len(self.token_ids) - self.num_scheduled_tokens, 1)

    def page_tokens(self, page_index: int, page_size: int) -> bytes:
        """The int32 bytes of the tokens on its page `page_index`."""
        start = page_index * page_size
        return self.token_ids[start : start + page_size].tobytes()

    def forget_pages(self) -> list[int]:
        """Takes its page table away, after it has stood up; nothing of it is computed any more."""
        pages, self.page_table = self.page_table, []
        self.num_indexed_pages = 0
        self.is_indexable = True
        return pages

    def begin_again(self, num_output_tokens: int) -> None:
        """Leaves a scheduler that is given up, with so many tokens of output."""
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        self.table, self.seat = None, -1
        self.forget_pages()
        self.page_digests = []
        self.num_proven_tokens = min(self.num_proven_tokens, len(self.token_ids) - 1)
        self.num_pages_wanted = 0
        self.is_awaited = False
        if self.status is not Status.PAUSED:
            is_new = self.first_scheduled_s is None
            self.status = Status.WAITING if is_new else Status.PREEMPTED

    def stats(self, now: float) -> RequestStats:
        """Its facts if it ends at `now`."""
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            arrival_s=self.request.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            version=self.version,
            is_shadow=self.request.is_shadow,
        )


def choice_seed(seed: int, index: int) -> int:
    """64 bits for choice `index` of a request with this seed.

    SplitMix64 (Steele, Lea and Flood 2014): bijections only, so the choices of a seed differ.
    """
    mixed = ((seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
