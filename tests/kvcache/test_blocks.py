"""The page allocator against a model of what pages must hold: a device whose slots remember (token, position) pairs."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.errors import InputError, OutOfMemory
from cupyllm.kvcache.blocks import NO_PAGE, Copy, OutOfPages, Pool, Sequence

P = 4


class Memory:
    """Slots that hold the whole prefix up to their token, as keys and values depend on it. Free pages hold nothing."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.slots: list[tuple[int, ...] | None] = [None] * (pool.num_pages * pool.page_tokens)

    def run(self, copies: list[Copy]) -> None:
        size = self.pool.page_tokens
        for copy in copies:
            self.slots[copy.target * size : (copy.target + 1) * size] = self.slots[
                copy.source * size : (copy.source + 1) * size
            ]

    def write(self, sequence: Sequence, ids: list[int], start: int, stop: int) -> None:
        for position, slot in zip(range(start, stop), sequence.slots(start, stop).tolist(), strict=True):
            self.slots[slot] = tuple(ids[: position + 1])

    def poison_free_pages(self) -> None:
        size = self.pool.page_tokens
        for page in self.pool.free_pages():
            self.slots[page * size : (page + 1) * size] = [None] * size

    def check(self, sequence: Sequence, ids: list[int]) -> None:
        """Every committed token that is not behind the window is where the block table says."""
        for position in range(sequence.num_tokens):
            page = sequence.block_table[position // self.pool.page_tokens]
            if page != NO_PAGE:
                slot = page * self.pool.page_tokens + position % self.pool.page_tokens
                assert self.slots[slot] == tuple(ids[: position + 1]), (position, page)


def put(pool: Pool, ids: list[int], *, reuse: bool = True) -> Sequence:
    """A sequence of `ids`, all committed."""
    sequence = pool.open(ids, reuse=reuse)
    rest = ids[sequence.num_tokens :]
    assert pool.reserve(sequence, len(rest)) == []
    pool.commit(sequence, rest)
    pool.check()
    return sequence


def test_slots_follow_the_block_table() -> None:
    """An 8-token sequence with pages of 4 fills its second page with 4 tokens, not 0 (D3)."""
    pool = Pool(8, P)
    sequence = pool.open([0] * 8)
    assert (sequence.num_cached, sequence.block_table, pool.stats().used) == (0, [], 0)
    assert pool.reserve(sequence, 8) == []
    assert sequence.block_table == [0, 1]
    slots = sequence.slots(0, 8)
    assert slots.dtype == np.int32 and slots.tolist() == list(range(8))
    pool.commit(sequence, [0] * 8)
    pool.reserve(sequence, 1)
    assert len(sequence.block_table) == 3 and sequence.slots(8, 9).tolist() == [8]
    assert sequence.slots(3, 3).tolist() == []
    with pytest.raises(AssertionError):
        sequence.slots(8, 10)


def test_reserving_again_changes_nothing() -> None:
    pool = Pool(8, P)
    sequence = put(pool, [1, 2])
    other = pool.fork(sequence)
    assert len(pool.reserve(sequence, 5)) == 1
    table = list(sequence.block_table)
    assert pool.reserve(sequence, 5) == [] and pool.reserve(sequence, 1) == [] and pool.reserve(sequence, 0) == []
    assert sequence.block_table == table and sequence.num_reserved == 7
    pool.close(other)
    pool.check()


@pytest.mark.parametrize("length, cached", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_full_pages_are_reused_but_never_the_last_token(length: int, cached: int) -> None:
    pool = Pool(8, P)
    ids = list(range(12))
    first = put(pool, ids[:11])
    pool.close(first)
    again = pool.open([*ids, 99][:length])
    assert again.num_cached == again.num_tokens == cached
    pool.check()
    assert pool.stats().cached == 2 - cached // P
    pool.close(again)
    assert pool.open(ids, reuse=False).num_cached == 0


def test_reuse_while_the_first_is_running_shares_pages() -> None:
    pool = Pool(8, P)
    first, ids = put(pool, list(range(9))), list(range(9))
    second = put(pool, [*ids[:8], 50])
    assert second.num_cached == 8 and second.block_table[:2] == first.block_table[:2]
    assert pool.stats().used == 4 and max(pool.stats().refs) == 2
    pool.close(first)
    assert pool.stats().used == 3
    assert pool.open([*ids[:4], 7, 7, 7, 7, 7]).num_cached == 4, "the second page differs"


def test_a_page_counts_only_behind_its_own_prefix() -> None:
    """The same four tokens at another place, or behind others, have other keys."""
    pool = Pool(8, P)
    put(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.open([2, 2, 2, 2, 0]).num_cached == 0
    assert pool.open([3, 3, 3, 3, 2, 2, 2, 2, 0]).num_cached == 0
    assert pool.open([1, 1, 1, 1, 2, 2, 2, 2, 0]).num_cached == 8


def test_collisions_never_alias() -> None:
    """With a hash that sends everything to one bucket, only equal content is found."""
    pool = Pool(32, P, hash_page=lambda parent, tokens: 7)
    rng = np.random.default_rng(0)
    memory, seen = Memory(pool), 0
    for _ in range(200):
        ids = rng.integers(0, 2, rng.integers(1, 17)).tolist()
        sequence = pool.open(ids)
        memory.check(sequence, ids)
        seen += sequence.num_cached > 0
        start = sequence.num_tokens
        memory.run(pool.reserve(sequence, len(ids) - start))
        memory.write(sequence, ids, start, len(ids))
        pool.commit(sequence, ids[start:])
        pool.check()
        pool.close(sequence)
    assert seen > 50


def test_a_forked_page_is_copied_when_it_is_appended_to() -> None:
    pool = Pool(8, P)
    one = put(pool, [1, 2, 3, 4, 5, 6])
    two, three = pool.fork(one), pool.fork(one)
    assert pool.stats().used == 2 and two.num_cached == 6
    (copy,) = pool.reserve(one, 1)
    assert (copy.source, copy.target) == (1, 2) and one.block_table == [0, 2]
    (copy,) = pool.reserve(two, 1)
    assert (copy.source, copy.target) == (1, 3)
    assert pool.reserve(three, 1) == [] and three.block_table == [0, 1], "the last one has the page to itself"
    assert pool.stats().refs[:4] == (3, 1, 1, 1)
    for sequence in (one, two, three):
        pool.close(sequence)
        pool.check()
    assert pool.stats().used == 0


def test_a_full_page_is_not_copied() -> None:
    pool = Pool(8, P)
    one = put(pool, [1, 2, 3, 4])
    two = pool.fork(one)
    assert pool.reserve(one, 3) == [] and pool.reserve(two, 3) == []
    assert one.block_table[0] == two.block_table[0] and one.block_table[1] != two.block_table[1]


def test_out_of_pages_changes_nothing() -> None:
    pool = Pool(3, P)
    one = put(pool, [1, 2, 3, 4, 5, 6])
    two = pool.fork(one)
    with pytest.raises(OutOfPages, match="2 pages of 4 tokens are needed, 1 of 3 are available") as caught:
        pool.reserve(two, 3)  # a copy and a new page
    assert "\n" not in str(caught.value) and isinstance(caught.value, OutOfMemory)
    pool.check()
    assert (two.block_table, two.num_reserved) == (one.block_table, 6)
    assert len(pool.reserve(two, 2)) == 1
    pool.close(one)
    assert pool.num_available == 1


def test_eviction_is_oldest_first_and_leaves_before_their_parents() -> None:
    pool = Pool(6, P)
    long, short = put(pool, [1] * 9), put(pool, [2] * 5)
    pool.close(long)
    pool.close(short)
    assert (pool.stats().free, pool.stats().cached) == (3, 3)
    filler = pool.open([3] * 16)
    pool.reserve(filler, 16)  # one page more than are free
    pool.check()
    assert pool.open([1] * 9).num_cached == 4, "the second page of the older one went, its parent stays"
    pool.close(filler)
    assert pool.open([2] * 5).num_cached == 4


def test_a_parent_that_is_older_than_its_successors_stays() -> None:
    """A window gave the first page back long before the last; still the last goes first."""
    pool, ids = Pool(4, P), list(range(16))
    sequence = put(pool, ids)
    for position in (4, 8, 12):
        pool.free_behind(sequence, position)
    pool.close(sequence)
    pool.reserve(pool.open([9]), 1)
    pool.check()
    assert pool.open([*ids, 16]).num_cached == 12


def test_pages_behind_a_window_go_when_nothing_else_is_left() -> None:
    """Their successors are in use, so there is no leaf. The farther one, their predecessor, outlives the nearer one."""
    pool, ids = Pool(3, P), list(range(12))
    sequence = put(pool, ids)
    pool.free_behind(sequence, 8)
    pool.reserve(sequence, 1)
    pool.check()
    assert sequence.block_table[2:] == [2, 1] and pool.stats().cached == 1
    assert pool.open(ids).num_cached == 4


def test_use_makes_a_prefix_young_again() -> None:
    pool = Pool(2, P)
    pool.close(put(pool, [1] * 4))
    pool.close(put(pool, [2] * 4))
    pool.close(pool.open([1] * 5))
    pool.reserve(pool.open([9]), 1)
    assert pool.open([1] * 5).num_cached == 4 and pool.open([2] * 5).num_cached == 0


def test_cached_pages_never_stand_in_the_way() -> None:
    pool = Pool(4, P)
    pool.close(put(pool, list(range(16))))
    assert (pool.stats().cached, pool.num_available) == (4, 4)
    put(pool, list(range(100, 116)))
    pool.drop_cached()
    assert pool.stats().cached == 0 and pool.stats().used == 4


def test_duplicates_computed_at_the_same_time() -> None:
    """Two sequences prefill one prompt side by side: one copy is registered, both stay whole, successors are found."""
    pool = Pool(8, P)
    ids = list(range(9))
    one, two = pool.open(ids), pool.open(ids)
    for sequence in (one, two):
        pool.reserve(sequence, 9)
    for sequence in (two, one):
        pool.commit(sequence, ids)
        pool.check()
    assert not set(one.block_table) & set(two.block_table)
    pool.close(two)
    assert pool.stats().cached == 2
    assert pool.open(ids).num_cached == 8
    pool.close(one)
    pool.check()
    assert pool.stats().free == 6, "one's own copies are of no use to anybody"


def test_free_behind_releases_pages_wholly_behind() -> None:
    pool = Pool(8, P)
    ids = list(range(14))
    sequence = put(pool, ids)
    assert [pool.free_behind(sequence, position) for position in (-5, 3, 4, 4, 11)] == [0, 0, 1, 0, 1]
    assert sequence.block_table[:2] == [NO_PAGE, NO_PAGE] and NO_PAGE not in sequence.block_table[2:]
    assert sequence.slots(8, 14).tolist() == [sequence.block_table[2] * P + i for i in range(4)] + [
        sequence.block_table[3] * P + i for i in range(2)
    ]
    with pytest.raises(AssertionError):
        sequence.slots(7, 9)
    pool.check()
    fork = pool.fork(sequence)
    assert len(pool.reserve(fork, 1)) == 1
    for each in (fork, sequence):
        pool.close(each)
        pool.check()
    assert pool.stats().used == 0
    assert pool.open(ids).num_cached == 12


def test_free_behind_keeps_what_is_not_committed() -> None:
    pool = Pool(8, P)
    sequence = pool.open([])
    pool.reserve(sequence, 12)
    assert pool.free_behind(sequence, 12) == 0
    pool.commit(sequence, range(5))
    assert pool.free_behind(sequence, 12) == 1


def test_a_window_longer_than_the_pool() -> None:
    """A sequence of any length runs in the pages of its window; the pages behind are evicted though their successors
    are in use, and what can no longer be found is not registered."""
    pool = Pool(3, P)
    sequence, ids = pool.open([]), list(range(60))
    for position, token in enumerate(ids):
        pool.free_behind(sequence, position - 5 + 1)
        pool.reserve(sequence, 1)
        pool.commit(sequence, [token])
        pool.check()
    assert sequence.num_tokens == 60 and pool.stats().used <= 3
    pool.close(sequence)
    pool.check()
    assert pool.stats().used == 0
    assert pool.open(ids).num_cached == 0


def test_closing_twice_and_before_anything_happened() -> None:
    pool = Pool(4, P)
    queued = pool.open([1, 2, 3])
    pool.close(queued)
    pool.close(queued)
    sequence = put(pool, [1] * 6)
    pool.reserve(sequence, 4)  # cancelled in the middle of a step
    pool.close(sequence)
    pool.close(sequence)
    assert pool.stats().used == 0 and pool.stats().free + pool.stats().cached == 4
    pool.check()


def test_a_fork_needs_committed_tokens() -> None:
    pool = Pool(4, P)
    sequence = put(pool, [1, 2])
    pool.reserve(sequence, 1)
    with pytest.raises(AssertionError, match="not committed"):
        pool.fork(sequence)


@pytest.mark.parametrize("pages, tokens", [(0, 4), (4, 0), (-1, 4), (1 << 26, 64)])
def test_refusals(pages: int, tokens: int) -> None:
    with pytest.raises(InputError, match="KV cache: got") as caught:
        Pool(pages, tokens)
    assert "\n" not in str(caught.value)


def test_d3_pages_come_back() -> None:
    """500 requests of 1 to 40 tokens in a pool of 64 pages of 16: finished, or cancelled while queued, in prefill or in
    decode, lengths of exactly one and two pages among them, double cancels too."""
    pool = Pool(64, 16)
    rng = np.random.default_rng(0)
    running: list[tuple[Sequence, int]] = []
    for number in range(500):
        length = (16, 32, int(rng.integers(1, 41)))[min(number % 5, 2)]
        ids = rng.integers(0, 3, length).tolist()
        sequence, fate = pool.open(ids), number % 4
        if fate > 0:  # 0: cancelled while queued
            prefill = len(ids) - sequence.num_tokens
            part = prefill if fate > 1 else prefill // 2
            try:
                pool.reserve(sequence, prefill)
                pool.commit(sequence, ids[sequence.num_tokens :][:part])
                if fate > 1:
                    running.append((sequence, fate))
            except OutOfPages:
                pass
        if fate < 2 or sequence.num_tokens < len(ids):
            pool.close(sequence)
            pool.close(sequence)
        while len(running) > 9 or (number == 499 and running):
            done, fate = running.pop(int(rng.integers(len(running))))
            for _ in range(5 if fate == 3 else 1):
                pool.reserve(done, 1)
                pool.commit(done, [1])
            pool.close(done)
        pool.check()
    stats = pool.stats()
    assert stats.used == 0 and stats.free + stats.cached == 64 and set(stats.refs) == {0}
    assert pool.reserve(pool.open([5] * 40), 40) == []


class Script:
    """Random calls, with a memory that shows whether every sequence still finds what it wrote."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = Pool(int(self.rng.integers(4, 20)), int(self.rng.choice([1, 2, 4])))
        self.memory = Memory(self.pool)
        self.running: dict[Sequence, list[int]] = {}
        self.window = int(self.rng.integers(1, 12)) if seed % 3 == 0 else None
        self.alphabet = int(self.rng.integers(1, 4))

    def tokens(self, most: int) -> list[int]:
        return self.rng.integers(0, self.alphabet, self.rng.integers(1, most + 1)).tolist()

    def submit(self) -> None:
        ids = self.tokens(20)
        sequence = self.pool.open(ids, reuse=bool(self.rng.random() < 0.9))
        assert sequence.num_cached < len(ids) and sequence.num_cached % self.pool.page_tokens == 0
        self.running[sequence] = ids
        self.memory.check(sequence, ids)

    def advance(self, sequence: Sequence) -> None:
        """A chunk of the prompt, or a new token; where pages run out, another is preempted, at last this one."""
        ids = self.running[sequence]
        if sequence.num_tokens == len(ids):
            ids.append(int(self.rng.integers(0, self.alphabet)))
        count = int(self.rng.integers(1, len(ids) - sequence.num_tokens + 1))
        start, stop = sequence.num_tokens, sequence.num_tokens + count
        if self.window is not None:
            self.pool.free_behind(sequence, start - self.window + 1)
        while True:
            before = (list(sequence.block_table), self.pool.stats())
            try:
                copies = self.pool.reserve(sequence, count)
                break
            except OutOfPages:
                assert before == (sequence.block_table, self.pool.stats())
                victims = [each for each in self.running if each is not sequence]
                victim = victims[int(self.rng.integers(len(victims)))] if victims else sequence
                self.close(victim)
                if victim is sequence:
                    return
        assert all(copy.source != copy.target for copy in copies)
        self.memory.run(copies)
        assert len(set(sequence.slots(start, stop).tolist())) == count
        self.memory.write(sequence, ids, start, stop)
        if self.rng.random() < 0.9:  # else the step failed: nothing is committed
            self.pool.commit(sequence, ids[start:stop])

    def fork(self, sequence: Sequence) -> None:
        if sequence.num_reserved == sequence.num_tokens:
            self.running[self.pool.fork(sequence)] = self.running[sequence][: sequence.num_tokens] + self.tokens(3)

    def close(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.pool.close(sequence)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            draw = self.rng.random()
            chosen = list(self.running)[int(self.rng.integers(len(self.running)))] if self.running else None
            if chosen is None or draw < 0.2:
                self.submit()
            elif draw < 0.75:
                self.advance(chosen)
            elif draw < 0.85:
                self.fork(chosen)
            else:
                self.close(chosen)
            self.pool.check()
            self.memory.poison_free_pages()
            for sequence, ids in self.running.items():
                self.memory.check(sequence, ids)


@pytest.mark.parametrize("block", range(10))
def test_random_scripts(block: int) -> None:
    """600 scripts of 40 calls: every invariant holds after every call, no sequence loses a token, all pages return."""
    reused = 0
    for seed in range(60 * block, 60 * block + 60):
        script = Script(seed)
        script.run(40)
        reused += sum(sequence.num_cached for sequence in script.running)
        for sequence in list(script.running):
            script.close(sequence)
        script.pool.check()
        stats = script.pool.stats()
        assert stats.used == 0 and stats.free + stats.cached == script.pool.num_pages and set(stats.refs) == {0}
        script.pool.drop_cached()
        assert script.pool.stats().free == script.pool.num_pages
    assert reused > 0
