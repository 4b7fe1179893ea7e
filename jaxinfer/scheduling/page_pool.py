"""The pages of the KV pool: free, cached or used, and by how many.

Host only: no JAX, and no page contents. Every page is in exactly one of three states:

    free    no content that anybody could use
    cached  nobody's, but indexed: a prefix hit can take it; evicted least recently used first
    used    owned by one or more sequences (ref count > 0)

Allocate, share, release and evict are O(1) per page. Pages of a finished sequence are evicted from
its tail to its head: whoever holds a page holds the pages before it, and gives them back later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Pages

from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.prefix_index import NO_PARENT, PrefixIndex, page_digest
from jaxinfer.scheduling.sequence import Sequence


class PagePool:
    """`num_pages` pages of `page_size` tokens.

    Args:
        digest: finds prefixes; replaced only by tests of what a collision does.
    Raises: ConfigError without pages.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        *,
        digest: Callable[[bytes, bytes], bytes] = page_digest,
    ):
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                f"the KV pool needs at least 1 page of 1 token; got {num_pages} of {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex(page_size, digest)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages, then evicts cached ones; the caller has asked `num_available` first."""
        assert num_pages <= self.num_available, f"{num_pages} pages of {self.num_available}"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page in pages:
            self._num_refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of these indexed pages."""
        for page in pages:
            if self._num_refs[page] == 0:
                del self._cached[page]
            self._num_refs[page] += 1

    def release(self, pages: Pages[int]) -> None:
        """One owner less for each page of a page table, its tail first."""
        for page in reversed(pages):
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                if page in self.index:
                    self._cached[page] = None
                else:
                    self._free.append(page)
            assert self._num_refs[page] >= 0, f"page {page} was released twice"

    def match(self, sequence: Sequence) -> list[int]:
        """The indexed pages that begin the sequence; its last token is never among them."""
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        parent = NO_PARENT
        for page_index in range((sequence.num_tokens - 1) // self.page_size):
            page = self.index.find(sequence, page_index, parent)
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these nobody owns: sharing them takes as many from `num_available`."""
        return sum(self._num_refs[page] == 0 for page in pages)

    def num_own(self, pages: Iterable[int]) -> int:
        """How many of these have one owner: its release adds as many to `num_available`."""
        return sum(self._num_refs[page] == 1 for page in pages)

    def next_digest(self, sequence: Sequence, num_matched: int) -> bytes | None:
        """Digest of the first page that `match` did not find, if it could have found it."""
        if (
            not self.enable_prefix_caching
            or num_matched >= (sequence.num_tokens - 1) // self.page_size
        ):
            return None
        return self.index.digest(sequence, num_matched)

    def digests_filled(self, sequence: Sequence, start: int, end: int) -> set[bytes]:
        """Digests of the pages that tokens [start, end) of a sequence, all known, will fill."""
        if not self.enable_prefix_caching or not sequence.is_indexable:
            return set()
        pages = range(start // self.page_size, end // self.page_size)
        return {self.index.digest(sequence, page_index) for page_index in pages}

    def index_computed(self, sequence: Sequence, num_computed: int) -> list[int]:
        """Indexes the sequence's pages that its first `num_computed` tokens fill.

        Where an older page holds the same content, the sequence shares that one and its own is
        freed. Returns: the places in its page table that changed.
        """
        changed: list[int] = []
        if not self.enable_prefix_caching:
            return changed
        num_full = num_computed // self.page_size
        while sequence.is_indexable and sequence.num_indexed_pages < num_full:
            page_index = sequence.num_indexed_pages
            own, page = sequence.page_table[page_index], self.index.add(sequence, page_index)
            if page is None:
                sequence.is_indexable = False
                break
            if page != own:
                self.share((page,))
                self.release((own,))
                sequence.page_table[page_index] = page
                changed.append(page_index)
            sequence.num_indexed_pages += 1
        return changed

    def forget(self, pages: Pages[int]) -> None:
        """Takes the tail of a page table that nobody else has built on out of the index."""
        for page in reversed(pages):
            if page in self.index:
                if self._num_refs[page] > 1 or not self.index.is_leaf(page):
                    break
                self.index.remove(page)

    def evict_all(self) -> int:
        """Forgets what nobody owns. Returns: how many pages were cached and are free now."""
        num_cached = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return num_cached

    def check_integrity(self, page_tables: Iterable[Pages[int]] | None = None) -> None:
        """Checks that free + cached + used == num_pages and that no page is in two states.

        Args:
            page_tables: of all sequences that own pages; if given, the ref counts must be theirs.
        Raises: AssertionError naming the page.
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, f"free and cached: {sorted(free & cached)}"
        for page, num_refs in enumerate(self._num_refs):
            is_idle = page in free or page in cached
            assert is_idle == (num_refs == 0), f"page {page} has {num_refs} owners; idle: {is_idle}"
            assert page not in free or page not in self.index, f"page {page} is free and indexed"
            assert page not in cached or page in self.index, f"page {page} is cached, not indexed"
        self.index.check_integrity()
        if page_tables is not None:
            owners = [0] * self.num_pages
            for page in (page for table in page_tables for page in table):
                owners[page] += 1
            assert owners == self._num_refs, "the ref counts are not those of the page tables"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.index.remove(page)
        return page
