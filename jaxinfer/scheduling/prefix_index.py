"""Which page holds the KV of which prefix.

Host only: no JAX. A page's digest chains its parent's digest with its own tokens, the first one
with the salt. The digest only finds: a hit also compares the tokens, the salt and the parent page,
so that a collision is a miss and never another prompt's KV. Who owns a page and when it is evicted
is the PagePool's matter.

Invariant: a page's parent stays indexed as long as the page does (children are removed first), so
a parent's page id names its whole prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.scheduling.sequence import Sequence

NO_PARENT = -1


@dataclass(slots=True)
class _Entry:
    digest: bytes
    tokens: bytes  # int32, page_size of them
    salt: tuple[str, str]
    parent: int  # page; NO_PARENT for a first page
    num_children: int = 0


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """16 bytes for a page of tokens that comes after `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class PrefixIndex:
    """Finds computed pages by their content.

    Args:
        page_size: tokens per page.
        digest: (parent's digest, int32 bytes of the tokens) -> digest.
    """

    def __init__(self, page_size: int, digest: Callable[[bytes, bytes], bytes] = page_digest):
        self._page_size = page_size
        self._digest = digest
        self._page_of: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    def digest(self, sequence: Sequence, page_index: int) -> bytes:
        """Digest of a full page of the sequence; each is computed once."""
        known = sequence.page_digests
        while len(known) <= page_index:
            parent = known[-1] if known else _root(sequence.salt)
            known.append(self._digest(parent, sequence.page_tokens(len(known), self._page_size)))
        return known[page_index]

    def find(self, sequence: Sequence, page_index: int, parent: int) -> int | None:
        """The page that holds the sequence's page `page_index`, if its page before is `parent`."""
        page = self._page_of.get(self.digest(sequence, page_index))
        return (
            page if page is not None and self._holds(page, sequence, page_index, parent) else None
        )

    def add(self, sequence: Sequence, page_index: int) -> int | None:
        """Indexes a page that has been computed, all pages before it being indexed.

        Returns: the page that now holds this content, which is an older one if there was one;
            None if the digest belongs to another prefix: then the page can not be found.
        """
        page = sequence.page_table[page_index]
        parent = sequence.page_table[page_index - 1] if page_index else NO_PARENT
        digest = self.digest(sequence, page_index)
        older = self._page_of.get(digest)
        if older is not None:
            return older if self._holds(older, sequence, page_index, parent) else None
        tokens = sequence.page_tokens(page_index, self._page_size)
        self._page_of[digest] = page
        self._entries[page] = _Entry(digest, tokens, sequence.salt, parent)
        if parent != NO_PARENT:
            self._entries[parent].num_children += 1
        return page

    def is_leaf(self, page: int) -> bool:
        """Whether an indexed page has no indexed child."""
        return self._entries[page].num_children == 0

    def remove(self, page: int) -> None:
        """Takes a leaf out of the index."""
        entry = self._entries.pop(page)
        assert entry.num_children == 0, (
            f"page {page} is evicted before {entry.num_children} children"
        )
        del self._page_of[entry.digest]
        if entry.parent != NO_PARENT:
            self._entries[entry.parent].num_children -= 1

    def check_integrity(self) -> None:
        """Raises: AssertionError if the two maps or the counts of children disagree."""
        children: dict[int, int] = {}
        for page, entry in self._entries.items():
            assert self._page_of.get(entry.digest) == page, f"page {page} is not under its digest"
            if entry.parent != NO_PARENT:
                assert entry.parent in self._entries, f"page {page} outlived its parent"
                children[entry.parent] = children.get(entry.parent, 0) + 1
        assert len(self._page_of) == len(self._entries)
        for page, entry in self._entries.items():
            assert entry.num_children == children.get(page, 0), f"children of page {page}"

    def _holds(self, page: int, sequence: Sequence, page_index: int, parent: int) -> bool:
        entry = self._entries[page]
        return (
            entry.parent == parent
            and entry.salt == sequence.salt
            and entry.tokens == sequence.page_tokens(page_index, self._page_size)
        )


def _root(salt: tuple[str, str]) -> bytes:
    return hashlib.blake2b(repr(salt).encode(), digest_size=16).digest()
