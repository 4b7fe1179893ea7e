"""The pool under any order of starts, growth, ends and failures, against what pages really hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from jaxinfer.scheduling.page_pool import PagePool, page_digest
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.sequence import Sequence

SIZE = 2
DIGESTS = {
    "real": page_digest,
    "constant": lambda parent, tokens: b"same",
    "own tokens only": lambda parent, tokens: tokens,
}
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class PagePoolMachine(RuleBasedStateMachine):
    """`written` says which context each page holds; a match must never hand out another one."""

    running = Bundle("running")

    @initialize(num_pages=st.integers(5, 12), digest=st.sampled_from(sorted(DIGESTS)))
    def make(self, num_pages: int, digest: str) -> None:
        self.pool = PagePool(num_pages, SIZE, digest=DIGESTS[digest])
        self.written: dict[int, tuple[object, ...]] = {}
        self.live: list[Sequence] = []
        self.num_computed: dict[Sequence, int] = {}

    @rule(target=running, token_ids=tokens, salt=st.sampled_from(["", "s"]))
    def start(self, token_ids: list[int], salt: str):
        pool = self.pool
        new = Sequence(
            Request("r", tuple(token_ids), cache_salt=salt), index=0, seed=0, version="v"
        )
        pages = pool.match(new)
        assert len(pages) * SIZE < new.num_tokens
        for place, page in enumerate(pages):
            assert self.written[page] == (new.salt, *token_ids[: (place + 1) * SIZE])
        num_new = pool.pages_for(new.num_tokens) - len(pages)
        if num_new + pool.num_idle(pages) > pool.num_available:
            return multiple()
        pool.share(pages)
        new.page_table = pages + pool.allocate(num_new)
        new.num_indexed_pages = len(pages)
        self.num_computed[new] = len(pages) * SIZE
        self.live.append(new)
        return new

    @rule(sequence=running, length=st.integers(1, 9))
    def compute(self, sequence: Sequence, length: int) -> None:
        left = len(sequence.token_ids) - self.num_computed[sequence]
        self.num_computed[sequence] += min(length, left)
        for place in range(sequence.num_indexed_pages, self.num_computed[sequence] // SIZE):
            prefix = sequence.token_ids[: (place + 1) * SIZE]
            self.written[sequence.page_table[place]] = (sequence.salt, *prefix)
        self.pool.index_computed(sequence, self.num_computed[sequence])

    @rule(sequence=running, token_id=st.integers(0, 1))
    def draw(self, sequence: Sequence, token_id: int) -> None:
        num_known = len(sequence.token_ids)
        is_full = num_known == len(sequence.page_table) * SIZE
        if self.num_computed[sequence] < num_known or (is_full and not self.pool.num_available):
            return
        sequence.token_ids.append(token_id)
        sequence.page_table += self.pool.allocate(int(is_full))

    @rule(sequence=consumes(running), is_failed=st.booleans())
    def end(self, sequence: Sequence, is_failed: bool) -> None:
        self.live.remove(sequence)
        pages = sequence.forget_pages()
        if is_failed:
            self.pool.forget(pages)
        self.pool.release(pages)

    @rule()
    def flush(self) -> None:
        num_cached = self.pool.num_cached
        assert self.pool.evict_all() == num_cached
        assert self.pool.num_cached == 0

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages
        pool.check_integrity([sequence.page_table for sequence in self.live])

    @invariant()
    def the_first_pages_of_running_sequences_are_theirs(self) -> None:
        for sequence in self.live:
            for place in range(sequence.num_indexed_pages):
                prefix = sequence.token_ids[: (place + 1) * SIZE]
                assert self.written[sequence.page_table[place]] == (sequence.salt, *prefix)

    def teardown(self) -> None:
        for sequence in self.live:
            self.pool.release(sequence.forget_pages())
        assert self.pool.num_used == 0
        self.pool.check_integrity([])


PagePoolMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)
TestPagePool = PagePoolMachine.TestCase
