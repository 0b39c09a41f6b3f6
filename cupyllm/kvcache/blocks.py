"""Which page of the KV cache holds which tokens: a page allocator in plain Python that never touches a device.

Keys and values of P consecutive tokens lie in one page; a sequence's block table names its pages in order, so token t
lies in slot block_table[t // P] * P + t % P of every layer (Kwon et al. 2023, PagedAttention). Pages carry reference
counts, since sequences share them in two ways:
- fork: another continuation of the same tokens shares every page. Whoever first appends to a partly filled page that
  is shared gets a copy of it (copy-on-write); full pages are never written again.
- prefix reuse: a full page is registered under a hash of its tokens and of its predecessor's hash. A hit is then
  compared token by token, and its predecessor must be the page matched just before, so a collision can only cost time
  and never gives one prompt another's keys. Pages that nobody uses stay registered until their memory is wanted.
Evicted is the page unused for longest among those without registered successors: a successor whose predecessor is gone
could never be found again.

Rejected: one contiguous run a sequence (its memory must be reserved for the longest answer), and trusting the hash.

A step of generation, in this order:
    sequence = pool.open(prompt_ids)             # sequence.num_cached tokens need not be computed
    copies = pool.reserve(sequence, n)           # room for the next n tokens; OutOfPages: preempt somebody, ask again
    run the copies (source page -> target page, in order, every layer), then kv_append and paged_attention with
        sequence.slots(sequence.num_tokens, sequence.num_tokens + n) and sequence.block_table
    pool.commit(sequence, the n token ids)       # their keys and values are written; full pages become reusable
    pool.free_behind(sequence, position)         # only where every layer has a sliding window
    pool.close(sequence)                         # finish, cancel and preempt alike; twice does no harm
Preemption by recompute is close, and later open with all tokens so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from cupyllm.errors import InputError, OutOfMemory

PAGE_TOKENS = 64
NO_PAGE = -1  # block table entry of a page that fell behind the window

HashPage = Callable[[int, tuple[int, ...]], int]  # (predecessor's hash or 0, the page's tokens) -> hash


class OutOfPages(OutOfMemory):
    """A reservation found too few pages; nothing was changed. Preempt a sequence and ask again."""


@dataclass(frozen=True)
class Copy:
    """Page to copy before anything is appended, in every layer, keys and values."""

    source: int
    target: int


@dataclass(frozen=True)
class Stats:
    """free + cached + used = num_pages."""

    num_pages: int
    free: int  # nothing of worth in them
    cached: int  # registered for reuse, not in use
    used: int  # by one sequence or more
    refs: tuple[int, ...]  # users of each page


class Sequence:
    """Tokens of one sequence and the pages they lie in. Made by Pool.open and Pool.fork, changed by the pool alone."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.block_table: list[int] = []
        self.num_cached = 0  # tokens taken over from earlier sequences when it was opened
        self.num_tokens = 0  # tokens whose keys and values are written (committed)
        self.num_reserved = 0  # tokens that have slots; never less
        self.closed = False
        self._num_behind = 0  # pages given back behind the window
        self._tail: list[int] = []  # committed tokens of the last, partly filled page
        self._prefix: _Prefix | None = None  # of the last full page
        self._chained = True  # whether the full pages so far can be found by their content

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Flat slots int32 [stop - start] of the token positions from start to stop, all reserved and not behind."""
        assert self._num_behind * self.page_tokens <= start <= stop <= self.num_reserved, (start, stop)
        positions = np.arange(start, stop)
        pages = np.array(self.block_table, np.int32)[positions // self.page_tokens]
        return (pages * self.page_tokens + positions % self.page_tokens).astype(np.int32)


class Pool:
    """Hands out `num_pages` pages of `page_tokens` tokens. Not thread-safe: one scheduler owns it."""

    def __init__(self, num_pages: int, page_tokens: int = PAGE_TOKENS, hash_page: HashPage | None = None) -> None:
        """Raises InputError on sizes below 1 or so many slots that int32 cannot number them."""
        if num_pages < 1 or page_tokens < 1 or num_pages * page_tokens >= 2**31:
            raise InputError(
                f"KV cache: got {num_pages} pages of {page_tokens} tokens, expected at least 1 of each and fewer than "
                "2^31 tokens; change --kv-memory"
            )
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._hash = _hash if hash_page is None else hash_page
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 first
        self._registered: list[_Prefix | None] = [None] * num_pages
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered pages without users, longest unused first
        self._by_hash: dict[int, list[_Prefix]] = {}
        self._open: dict[Sequence, None] = {}

    @property
    def num_available(self) -> int:
        """Pages that a reservation can get: free ones and cached ones."""
        return len(self._free) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_tokens)

    def open(self, token_ids: Tokens[int] | np.ndarray, *, reuse: bool = True) -> Sequence:
        """A sequence that begins with the cached pages of `token_ids`; takes no other page.

        The last token is never taken over, because its logits are wanted. The tokens from sequence.num_cached on are
        the caller's to reserve, compute and commit.
        """
        ids = [int(token) for token in token_ids]
        sequence = Sequence(self.page_tokens)
        self._open[sequence] = None
        for start in range(0, len(ids) - self.page_tokens, self.page_tokens) if reuse else ():
            found = self._find(sequence._prefix, tuple(ids[start : start + self.page_tokens]))
            if found is None:
                break
            self._take(found.page)
            sequence.block_table.append(found.page)
            sequence._prefix = found
        sequence.num_cached = sequence.num_tokens = len(sequence.block_table) * self.page_tokens
        sequence.num_reserved = sequence.num_tokens
        return sequence

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[Copy]:
        """Make room for `num_tokens` tokens behind the committed ones; asking again for no more changes nothing.

        The copies returned must run in order, before anything is appended. Raises OutOfPages, and changes nothing then.
        """
        assert not sequence.closed and num_tokens >= 0, (sequence.closed, num_tokens)
        stop = sequence.num_tokens + num_tokens
        last = sequence.num_tokens // self.page_tokens  # the page that the first new token goes to
        shared = num_tokens > 0 and bool(sequence._tail) and self._refs[sequence.block_table[last]] > 1
        wanted = max(0, self.pages_for(stop) - len(sequence.block_table)) + shared
        if wanted > self.num_available:
            raise OutOfPages(
                f"KV cache: {wanted} pages of {self.page_tokens} tokens are needed, {self.num_available} of "
                f"{self.num_pages} are available; raise --kv-memory, or run fewer or shorter sequences"
            )
        copies = []
        if shared:
            source, target = sequence.block_table[last], self._new_page()
            self._release(source)
            sequence.block_table[last] = target
            copies.append(Copy(source, target))
        while len(sequence.block_table) < self.pages_for(stop):
            sequence.block_table.append(self._new_page())
        sequence.num_reserved = max(sequence.num_reserved, stop)
        return copies

    def commit(self, sequence: Sequence, token_ids: Tokens[int] | np.ndarray) -> None:
        """Note that the next reserved tokens are `token_ids` and that their keys and values are written."""
        ids = [int(token) for token in token_ids]
        assert not sequence.closed and sequence.num_tokens + len(ids) <= sequence.num_reserved, len(ids)
        for token in ids:
            sequence._tail.append(token)
            sequence.num_tokens += 1
            if len(sequence._tail) == self.page_tokens:
                page = sequence.block_table[sequence.num_tokens // self.page_tokens - 1]
                self._register(sequence, page, tuple(sequence._tail))
                sequence._tail.clear()

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same committed tokens on the same pages. Fork between commit and reserve."""
        assert not sequence.closed and sequence.num_reserved == sequence.num_tokens, "reserved tokens are not committed"
        child = Sequence(self.page_tokens)
        child.block_table = list(sequence.block_table)
        child.num_cached = child.num_tokens = child.num_reserved = sequence.num_tokens
        child._num_behind, child._tail = sequence._num_behind, list(sequence._tail)
        child._prefix, child._chained = sequence._prefix, sequence._chained
        for page in child.block_table[child._num_behind :]:
            self._take(page)
        self._open[child] = None
        return child

    def free_behind(self, sequence: Sequence, position: int) -> int:
        """Give back the pages that hold only committed tokens before `position`; returns how many.

        With a window of W, the query at position t sees t - W + 1 to t: `position` is t - W + 1 of the next query t.
        """
        assert not sequence.closed
        behind = min(position, sequence.num_tokens) // self.page_tokens
        released = max(0, behind - sequence._num_behind)
        # The nearest first: the farther ones are their predecessors, and should outlive them.
        for index in reversed(range(sequence._num_behind, sequence._num_behind + released)):
            self._release(sequence.block_table[index])
            sequence.block_table[index] = NO_PAGE
        sequence._num_behind += released
        return released

    def close(self, sequence: Sequence) -> None:
        """Give every page back, whatever state the sequence is in. Closing again does nothing."""
        if sequence.closed:
            return
        for page in reversed(sequence.block_table[sequence._num_behind :]):  # successors first: they are evicted first
            self._release(page)
        sequence.block_table.clear()
        sequence.num_reserved = sequence._num_behind = 0
        sequence._tail.clear()
        sequence._prefix = None
        sequence.closed = True
        del self._open[sequence]

    def free_pages(self) -> list[int]:
        """Pages whose content nobody may rely on (a test fills them with NaN)."""
        return sorted(self._free)

    def drop_cached(self) -> None:
        """Forget every page that is kept for reuse only."""
        while self._unused:
            self._evict()

    def stats(self) -> Stats:
        free, cached = len(self._free), len(self._unused)
        return Stats(self.num_pages, free, cached, self.num_pages - free - cached, tuple(self._refs))

    def check(self) -> None:
        """Assert every invariant; for tests, at the cost of a walk over all pages."""
        counted = [0] * self.num_pages
        for sequence in self._open:
            assert not sequence.closed and sequence.num_tokens <= sequence.num_reserved
            assert len(sequence.block_table) == self.pages_for(sequence.num_reserved)
            assert len(sequence._tail) == sequence.num_tokens % self.page_tokens
            for index, page in enumerate(sequence.block_table):
                assert (page == NO_PAGE) == (index < sequence._num_behind)
                if page != NO_PAGE:
                    counted[page] += 1
        assert counted == self._refs, (counted, self._refs)
        free, unused = set(self._free), set(self._unused)
        assert len(free) == len(self._free) and not free & unused
        for page in range(self.num_pages):
            prefix = self._registered[page]
            assert (page in free) == (counted[page] == 0 and prefix is None), page
            assert (page in unused) == (counted[page] == 0 and prefix is not None), page
            assert prefix is None or prefix.page == page
        alive = [prefix for prefix in self._registered if prefix is not None]
        assert sorted(p.page for bucket in self._by_hash.values() for p in bucket) == sorted(p.page for p in alive)
        assert all(self._by_hash.values()), "an empty bucket was kept"
        assert len({(id(p.parent), p.tokens) for p in alive}) == len(alive), "one content is registered twice"
        for prefix in alive:
            assert prefix in self._by_hash[prefix.key] and len(prefix.tokens) == self.page_tokens
            assert prefix.parent is None or (prefix.parent.alive and prefix in prefix.parent.children)
            assert all(child.alive and child.parent is prefix for child in prefix.children)

    # ---- pages ----

    def _new_page(self) -> int:
        """A page with one user. The caller has seen that there is one."""
        if not self._free:
            self._evict()
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _take(self, page: int) -> None:
        self._refs[page] += 1
        self._unused.pop(page, None)

    def _release(self, page: int) -> None:
        assert self._refs[page] > 0, page
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if self._registered[page] is None:
                self._free.append(page)
            else:
                self._unused[page] = None

    # ---- content ----

    def _find(self, parent: _Prefix | None, tokens: tuple[int, ...]) -> _Prefix | None:
        """The registered page of `tokens` behind `parent`, or None."""
        for prefix in self._by_hash.get(self._key(parent, tokens), ()):
            if prefix.parent is parent and prefix.tokens == tokens:
                return prefix
        return None

    def _register(self, sequence: Sequence, page: int, tokens: tuple[int, ...]) -> None:
        """Make a full page reusable. One whose content is registered already (two sequences computed it at the same
        time) stays the sequence's own, and its successors go behind the registered one."""
        parent = sequence._prefix
        sequence._chained &= parent is None or parent.alive
        if not sequence._chained:
            return
        found = self._find(parent, tokens)
        if found is None:
            found = _Prefix(page, tokens, parent, self._key(parent, tokens))
            self._by_hash.setdefault(found.key, []).append(found)
            self._registered[page] = found
            if parent is not None:
                parent.children.append(found)
        sequence._prefix = found

    def _evict(self) -> None:
        """Free at least the page unused for longest that has no successor.

        Where every unused page has successors in use (a window gave back what lies behind it), the longest unused goes,
        and its successors cannot be found any more.
        """
        page = next((page for page in self._unused if not self._children(page)), next(iter(self._unused)))
        prefix = self._registered[page]
        assert prefix is not None
        self._forget(prefix)

    def _children(self, page: int) -> list[_Prefix]:
        prefix = self._registered[page]
        assert prefix is not None
        return prefix.children

    def _forget(self, prefix: _Prefix) -> None:
        """Unregister a page and all its successors; those without users become free."""
        if prefix.parent is not None:
            prefix.parent.children.remove(prefix)
        remaining = [prefix]
        while remaining:
            gone = remaining.pop()
            remaining += gone.children
            gone.children = []
            gone.alive = False
            self._registered[gone.page] = None
            bucket = self._by_hash[gone.key]
            bucket.remove(gone)
            if not bucket:
                del self._by_hash[gone.key]
            if gone.page in self._unused:
                del self._unused[gone.page]
                self._free.append(gone.page)

    def _key(self, parent: _Prefix | None, tokens: tuple[int, ...]) -> int:
        return self._hash(0 if parent is None else parent.key, tokens)


@dataclass(eq=False)
class _Prefix:
    """A registered full page: its tokens, and the registered page before it (None: it begins the sequence)."""

    page: int
    tokens: tuple[int, ...]
    parent: _Prefix | None
    key: int  # its chained hash
    alive: bool = True  # False once evicted: the page may hold something else
    children: list[_Prefix] = field(default_factory=list)


def _hash(parent: int, tokens: tuple[int, ...]) -> int:
    return hash((parent, tokens))  # of integers: the same in every process
