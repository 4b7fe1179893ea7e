"""Tests of the pool: three states of a page, sharing, eviction, and the prefixes it finds."""

from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.sequence import Sequence

SIZE = 4


def sequence(token_ids: range | list[int], *, salt: str = "", version: str = "v1") -> Sequence:
    request = Request("r", tuple(token_ids), cache_salt=salt)
    return Sequence(request, index=0, seed=0, version=version)


def computed(pool: PagePool, token_ids: range | list[int], **salt: str) -> Sequence:
    """A sequence that took what the pool had, got pages for the rest, and computed it all."""
    new = sequence(token_ids, **salt)
    shared = pool.match(new)
    pool.share(shared)
    new.page_table = shared + pool.allocate(pool.pages_for(new.num_tokens) - len(shared))
    new.num_indexed_pages = len(shared)
    pool.index_computed(new, new.num_tokens)
    return new


def end(pool: PagePool, *sequences: Sequence) -> None:
    for each in sequences:
        pool.release(each.forget_pages())


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(num_pages, page_size):
    with pytest.raises(ConfigError, match="at least 1 page"):
        PagePool(num_pages, page_size)


def test_every_page_of_the_pool_can_be_used():
    pool = PagePool(5, SIZE)
    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    assert counts(pool) == (0, 0, 5)


def test_a_released_page_without_content_is_free_again():
    pool = PagePool(3, SIZE)
    pages = pool.allocate(2)
    pool.release(pages)
    assert counts(pool) == (3, 0, 0)
    pool.check_integrity([])


def test_full_pages_of_an_ended_sequence_stay_cached_and_its_part_is_free():
    pool = PagePool(8, SIZE)
    end(pool, computed(pool, range(10)))
    assert counts(pool) == (6, 2, 0)


def test_a_cached_prefix_is_found_and_shared():
    pool = PagePool(8, SIZE)
    first = computed(pool, range(9))
    second = computed(pool, [*range(8), 77, 78])
    assert second.page_table[:2] == first.page_table[:2]
    assert second.page_table[2] != first.page_table[2]
    assert counts(pool) == (4, 0, 4)
    pool.check_integrity([first.page_table, second.page_table])


@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE])
def test_the_last_token_is_never_taken_from_the_cache(num_tokens):
    pool = PagePool(8, SIZE)
    end(pool, computed(pool, range(num_tokens)))
    assert len(pool.match(sequence(range(num_tokens)))) == (num_tokens - 1) // SIZE


def test_a_page_is_not_found_before_its_tokens_are_computed():
    pool = PagePool(8, SIZE)
    running = sequence(range(9))
    running.page_table = pool.allocate(3)
    pool.index_computed(running, 7)
    assert pool.match(sequence(range(9))) == running.page_table[:1]
    pool.index_computed(running, 8)
    assert pool.match(sequence(range(9))) == running.page_table[:2]


def test_a_prefix_with_another_start_is_not_found():
    pool = PagePool(8, SIZE)
    end(pool, computed(pool, range(12)))
    assert pool.match(sequence([9, *range(1, 12)])) == []


@pytest.mark.parametrize(
    "other", [{"salt": "b"}, {"version": "v2"}, {"salt": "v1", "version": "a"}, {"salt": ""}]
)
def test_another_salt_or_version_shares_nothing(other):
    pool = PagePool(8, SIZE)
    end(pool, computed(pool, range(12), salt="a"))
    assert pool.match(sequence(range(12), **other)) == []
    assert len(pool.match(sequence(range(12), salt="a"))) == 2


def test_without_prefix_caching_nothing_is_kept():
    pool = PagePool(8, SIZE, enable_prefix_caching=False)
    end(pool, computed(pool, range(12)))
    assert counts(pool) == (8, 0, 0)
    assert pool.match(sequence(range(12))) == []
    assert pool.next_digest(sequence(range(12)), 0) is None
    assert pool.digests_filled(sequence(range(12)), 0, 12) == set()


def test_cached_pages_are_evicted_when_no_page_is_free():
    pool = PagePool(4, SIZE)
    end(pool, computed(pool, range(16)))
    assert counts(pool) == (0, 4, 0)
    assert len(pool.allocate(4)) == 4
    pool.check_integrity()
    assert pool.match(sequence(range(16))) == []


def test_all_that_is_cached_can_be_forgotten_and_what_is_used_stays():
    pool = PagePool(6, SIZE)
    end(pool, computed(pool, range(16)))
    running = computed(pool, range(8))  # on the first two pages
    assert counts(pool) == (2, 2, 2)
    assert pool.evict_all() == 2
    assert counts(pool) == (4, 0, 2)
    assert pool.match(sequence(range(16))) == running.page_table
    pool.check_integrity([running.page_table])


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = PagePool(4, SIZE)
    first = computed(pool, range(16))
    table = list(first.page_table)
    end(pool, first)
    assert pool.allocate(1) == [table[3]]
    assert pool.match(sequence(range(16))) == table[:3]
    assert pool.allocate(2) == [table[2], table[1]]
    assert pool.match(sequence(range(16))) == table[:1]


def test_what_was_used_last_is_evicted_last():
    pool = PagePool(3, SIZE)
    first, second = computed(pool, range(4)), computed(pool, range(50, 54))
    end(pool, second, first)
    end(pool, computed(pool, range(50, 55)))  # takes the page of `second` once more
    pool.allocate(2)  # the free page and one cached one
    assert pool.match(sequence(range(50, 55)))
    assert not pool.match(sequence(range(5)))


def test_a_shared_page_is_used_until_its_last_owner_ends():
    pool = PagePool(8, SIZE)
    first, second = computed(pool, range(9)), computed(pool, range(9))
    end(pool, first)
    assert pool.num_used == 3
    end(pool, second)
    assert counts(pool) == (6, 2, 0)


def test_equal_pages_computed_at_once_become_one():
    pool = PagePool(8, SIZE)
    first, second = sequence(range(9)), sequence(range(9))
    for each in (first, second):
        each.page_table = pool.allocate(3)
    own = list(second.page_table)
    assert pool.index_computed(first, 9) == []
    assert pool.index_computed(second, 9) == [0, 1]
    assert second.page_table == [*first.page_table[:2], own[2]]
    assert counts(pool) == (4, 0, 4)
    pool.check_integrity([first.page_table, second.page_table])


def test_matching_owns_nothing_until_it_is_shared():
    pool = PagePool(4, SIZE)
    end(pool, computed(pool, range(9)))
    pages = pool.match(sequence(range(9)))
    assert (counts(pool), pool.num_idle(pages)) == ((2, 2, 0), 2)
    pool.share(pages)
    assert (counts(pool), pool.num_idle(pages)) == ((2, 0, 2), 0)


def test_equal_digests_never_give_another_prompts_page():
    pool = PagePool(16, SIZE, digest=lambda parent, tokens: b"same")
    first = computed(pool, range(12))
    other = computed(pool, [9, *range(1, 12)])
    assert not set(first.page_table) & set(other.page_table)
    assert pool.match(sequence(range(12))) == first.page_table[:1]
    end(pool, first, other)
    assert pool.match(sequence([9, *range(1, 12)])) == []
    pool.check_integrity([])


def test_a_digest_that_ignores_the_parent_never_gives_another_context():
    pool = PagePool(16, SIZE, digest=lambda parent, tokens: tokens[:8])
    first = computed(pool, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    other = computed(pool, [4, 3, 2, 1, 5, 6, 7, 8, 0])
    assert first.page_table[1] != other.page_table[1]
    assert not other.is_indexable
    again = sequence([4, 3, 2, 1, 5, 6, 7, 8, 0])
    assert pool.match(again) == other.page_table[:1]
    pool.check_integrity([first.page_table, other.page_table])


def test_a_failed_sequence_leaves_the_index_as_far_as_it_was_its_own():
    pool = PagePool(16, SIZE)
    good = computed(pool, range(9))
    failed = computed(pool, [*range(8), *range(20, 29)])
    pool.forget(failed.page_table)
    end(pool, failed)
    assert len(pool.match(sequence([*range(8), *range(20, 29)]))) == 2
    assert counts(pool) == (13, 0, 3)
    pool.check_integrity([good.page_table])


def test_a_page_that_others_built_on_stays_when_its_owner_fails():
    pool = PagePool(16, SIZE)
    failed = computed(pool, range(9))
    end(pool, computed(pool, [*range(8), *range(30, 35)]))
    pool.forget(failed.page_table)
    end(pool, failed)
    assert len(pool.match(sequence([*range(8), *range(30, 35)]))) == 3
    pool.check_integrity([])


def test_releasing_twice_is_our_own_fault():
    pool = PagePool(4, SIZE)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_integrity_notices_a_page_with_a_wrong_count():
    pool = PagePool(4, SIZE)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="ref counts"):
        pool.check_integrity([pages, pages[:1]])
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="idle"):
        pool.check_integrity()


def test_digests_filled_are_those_that_the_index_will_know():
    pool = PagePool(8, SIZE)
    running = sequence(range(11))
    digests = pool.digests_filled(running, 2, 9)
    assert digests == {pool.index.digest(running, 0), pool.index.digest(running, 1)}
    assert pool.next_digest(sequence(range(20)), 1) in digests
    assert pool.next_digest(sequence(range(20)), 2) not in digests
    assert pool.next_digest(sequence(range(8)), 1) is None  # its last token is in that page


def test_digests_grow_with_the_sequence_and_are_computed_once():
    calls: list[bytes] = []
    pool = PagePool(8, SIZE, digest=lambda parent, tokens: calls.append(tokens) or parent + tokens)
    growing = sequence(range(9))
    pool.match(growing)
    assert len(calls) == 1  # the first page is not indexed, so the second is not asked for
    pool.index.digest(growing, 1)
    growing.token_ids.extend([5, 6, 7])
    pool.index.digest(growing, 2)
    assert len(calls) == 3
