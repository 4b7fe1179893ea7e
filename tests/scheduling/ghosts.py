"""A device whose pages know whose they are, and what each sequence says alone.

A slot of a page holds a *ghost*: the hash of all that its KV depends on, which is the weights
version, the salt, and every token up to its own. So a stale, foreign or uncomputed slot is found
when it is read or looked at, even where it happens to hold the right token at the right place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.sequence import Sequence

NUM_WORDS = 7  # token ids are below it
EMPTY = (0, -1)


def law(is_kept: bool, name: str) -> None:
    """Raises: AssertionError that begins with the law's name."""
    if not is_kept:
        raise AssertionError(f"law: {name}")


@dataclass(frozen=True, slots=True)
class Solo:
    """What a sequence is alone, from its first token to its last."""

    root: int  # the ghost before the first token
    tokens: tuple[int, ...]  # prompt and output
    ghosts: tuple[int, ...]  # of each token's KV


def solo(sequence: Sequence) -> Solo:
    """What it has to say and its pages have to hold, if it runs to its very end."""
    return _solo(
        sequence.request, sequence.index, sequence.version, max(1, sequence.max_total_tokens)
    )


@functools.cache
def _solo(request: Request, index: int, version: str, num_tokens: int) -> Solo:
    tokens = list(request.token_ids)
    while len(tokens) < num_tokens:
        tokens.append((sum(tokens) + len(tokens) + index + len(version)) % NUM_WORDS)
    root = ghost = root_ghost(version, request)
    ghosts: list[int] = []
    for token in tokens:
        ghost = hash((ghost, token))
        ghosts.append(ghost)
    return Solo(root, tuple(tokens), tuple(ghosts))


def root_ghost(version: str, request: Request) -> int:
    return hash((version, request.cache_salt))


class GhostDevice:
    """Runs a batch as a device does: it sees page tables, tokens, seats and nothing else.

    A slot also remembers the step that wrote it.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.slots = [[EMPTY] * page_size for _ in range(num_pages)]  # (ghost, step)
        self.newest: dict[int, tuple[int, int]] = {}  # seat -> ghost of the context, token drawn

    def run(self, step: int, scheduled: Scheduled) -> list[int]:
        """Writes the step's KV. Returns the tokens drawn; raises where a law is broken."""
        batch = scheduled.batch
        table = batch.page_table.tolist()
        lengths = scheduled.rows.num_new.tolist()
        at = 0
        for row, (sequence, length) in enumerate(zip(scheduled.sequences, lengths, strict=True)):
            law(batch.rows[at : at + length].tolist() == [row] * length, "rows are in order")
            self._compute(step, batch, sequence, table[row], at, length)
            at += length
        law(at == batch.num_tokens, "a batch holds the tokens of its sequences")
        return [self._draw(scheduled, row) for row in range(batch.num_sampled)]

    def spoil(self, step: int) -> None:
        """What a failed step wrote is anything."""
        for slots in self.slots:
            for place, (_, writer) in enumerate(slots):
                if writer == step:
                    slots[place] = EMPTY

    def held(self, page: int) -> tuple[int, ...]:
        """The ghosts on a page."""
        return tuple(ghost for ghost, _ in self.slots[page])

    def read(self, pages: list[int], num_tokens: int) -> list[int]:
        """The ghosts of the first `num_tokens` of a page table."""
        size = self.page_size
        held = [ghost for page in pages[: -(-num_tokens // size)] for ghost, _ in self.slots[page]]
        return held[:num_tokens]

    def _compute(
        self, step: int, batch: Batch, sequence: Sequence, pages: list[int], at: int, length: int
    ) -> None:
        size, alone = self.page_size, solo(sequence)
        positions = batch.positions[at : at + length].tolist()
        start = positions[0]
        law(positions == list(range(start, start + length)), "positions rise by one")
        known = self.read(pages, start)
        law(known == list(alone.ghosts[:start]), "a step reads its own context only")
        root = root_ghost(batch.version, sequence.request)
        ghost = known[-1] if known else root
        for position in positions:
            ghost = hash((ghost, self._input(batch, at, ghost)))
            self.slots[pages[position // size]][position % size] = (ghost, step)
            at += 1
        is_right = root == alone.root and ghost == alone.ghosts[start + length - 1]
        law(is_right, "a step computes the sequence's own tokens")

    def _input(self, batch: Batch, at: int, context: int) -> int:
        seat = int(batch.from_seat[at])
        if seat < 0:
            return int(batch.token_ids[at])
        ghost, token = self.newest.get(seat, EMPTY)
        law(ghost == context, "a seat holds the newest token of who sits there")
        return token

    def _draw(self, scheduled: Scheduled, row: int) -> int:
        batch, sequence = scheduled.batch, scheduled.sampled[row]
        at = int(batch.sample_at[row])
        position = int(batch.positions[at])
        owner = scheduled.sequences[int(batch.rows[at])]
        law(owner is sequence, "a row is sampled for its own sequence")
        law(int(batch.sampling.positions[row]) == position + 1, "a draw is counted by position")
        alone = solo(sequence)
        law(position + 1 < len(alone.tokens), "nothing is drawn past the end")
        token = alone.tokens[position + 1]
        self.newest[int(batch.sampling.seats[row])] = (alone.ghosts[position], token)
        return token
