"""The loop that serves several sequences at once over one paged cache.

A step gathers rows: one for every sequence that decodes, then chunks of prompts, oldest first, up to the runner's rows.
So a long prompt never makes a decoding sequence wait for more than one step. When pages run out, the youngest running
sequence is preempted: its pages go back and it is recomputed later. That changes no bit of what it says where rows do
not depend on their batch (float32, batch-invariant kernels), since draws are counter-based. The alternative, swapping
its pages out, needs a second store and moves more bytes than short prompts cost to recompute.

The life of a sequence: submit -> waiting -> running (prefill, decode) -> finished, or back to waiting by preemption.
Choices of one prompt (n > 1) share its pages: they are forked from the first one when its prompt has been computed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cupyllm.errors import BackendError, InputError
from cupyllm.kvcache.blocks import Copy, OutOfPages, Pool
from cupyllm.kvcache.blocks import Sequence as Pages
from cupyllm.serve.runner import Runner, StepBatch, all_windows
from cupyllm.serve.sampler import Choice, SamplingError, SamplingParams, choose

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(eq=False)
class Generation:
    """One sequence. `output` grows; `finish_reason` is None until it has ended."""

    number: int  # in order of submission
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    on_token: Callable[[Generation, Choice], bool | None] | None = None
    output: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    pages: Pages | None = None
    siblings: list[Generation] = field(default_factory=list)  # choices that wait for this prompt
    num_preempted: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return 0 if self.pages is None else self.pages.num_tokens


class Engine:
    """Owns the pool; the runner owns weights and pages' memory. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        runner: Runner,
        *,
        stop_ids: Sequence[int] = (),
        valid_vocab: int | None = None,
        chunk_rows: int | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.runner = runner
        self.pool = Pool(runner.num_pages, runner.page_tokens)
        self.stop_ids = frozenset(stop_ids)
        self.valid_vocab = min(valid_vocab or runner.config.vocab_size, runner.config.vocab_size)
        self.chunk_rows = min(chunk_rows or runner.max_rows, runner.max_rows)
        self.reuse_prefixes = reuse_prefixes
        self.window = all_windows(runner.config)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []  # oldest first
        self.num_submitted = 0
        self.num_steps = 0
        self.num_rows = 0  # computed in all steps: tokens whose keys and values were not reused
        self._pid = os.getpid()

    # -- what callers do ----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int = 256,
        n: int = 1,
        ignore_eos: bool = False,
        on_token: Callable[[Generation, Choice], bool | None] | None = None,
    ) -> list[Generation]:
        """Queue a prompt; returns its n choices, whose seeds are params.seed, seed + 1, …

        `on_token` is called with each new token (a stop id is not one); returning True ends that sequence with "stop".
        Raises InputError for an empty prompt, ids out of range, or a length that the model or the cache cannot hold.
        """
        self._check_process()
        params = params or SamplingParams()
        prompt = [int(i) for i in prompt]
        limit = self._check_prompt(prompt, max_tokens, n)
        stops: frozenset[int] = frozenset() if ignore_eos else self.stop_ids
        made = []
        for index in range(n):
            seeded = SamplingParams(**{**params.__dict__, "seed": (params.seed + index) % 2**64})
            made.append(Generation(self.num_submitted, prompt, seeded, limit, stops, on_token))
            self.num_submitted += 1
        made[0].siblings = made[1:]
        self.waiting.append(made[0])
        return made

    def cancel(self, generation: Generation) -> None:
        """End a sequence wherever it is; a second call does nothing."""
        if generation.finish_reason is None:
            self._finish(generation, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Generation]:
        """One pass over the model; returns the sequences that ended in it.

        What a callback raises ends its own sequence, and is raised again once the others have their token.
        """
        self._check_process()
        plan, copies = self._plan()
        if not plan:
            return []
        sampled = [g for g, stop in plan.items() if stop == len(g.ids)]
        try:
            logits = self.runner.step(self._batch(plan, sampled, copies))
        except BaseException:
            # Nobody knows what was written, page copies included: what was planned is computed again from its ids.
            for generation in reversed(plan):
                self._requeue(generation)
            raise
        self.num_steps += 1
        self.num_rows += sum(stop - g.computed for g, stop in plan.items())
        for generation, stop in plan.items():
            assert generation.pages is not None
            self.pool.commit(generation.pages, generation.ids[generation.computed : stop])
            if self.window is not None:  # the next query, at position `stop`, sees nothing before this
                self.pool.free_behind(generation.pages, stop - self.window + 1)
        ended: list[Generation] = []
        failures: list[Exception] = []
        for generation, row in zip(sampled, logits, strict=True):
            for choice in [generation, *self._fork_siblings(generation)]:
                if choice.finish_reason is not None:
                    continue  # another one's callback cancelled it in this very step
                try:
                    self._advance(choice, row, ended)
                except Exception as error:  # a callback's; the others must not miss their token because of it
                    if choice.finish_reason is None:
                        choice.error = f"callback: {type(error).__name__}: {error}"
                        self._finish(choice, "error")
                    failures.append(error)
        if failures:
            raise failures[0]
        return ended

    def run(self) -> None:
        """Step until every sequence has ended."""
        while self.busy:
            self.step()

    # -- scheduling ---------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[dict[Generation, int], list[Copy]]:
        """Sequences to compute and up to which token, with the pages to copy first."""
        plan: dict[Generation, int] = {}
        copies: dict[Generation, list[Copy]] = {}
        rows = self.chunk_rows
        for generation in [g for g in self.running if g.computed == len(g.ids)]:
            self._requeue(generation)  # an interrupt came between its pass and its token: its logits are gone
        decoding = [g for g in self.running if len(g.ids) - g.computed == 1]
        prefilling = [g for g in self.running if len(g.ids) - g.computed > 1]
        for generation in [*decoding, *prefilling]:
            if rows == 0:
                break
            if generation.pages is None:
                continue  # preempted a moment ago, to make room for an older one
            stop = min(len(generation.ids), generation.computed + rows)
            made = self._reserve(generation, stop, plan, copies)
            if made is None:
                continue
            rows -= stop - generation.computed
            plan[generation], copies[generation] = stop, made
        rows = self.chunk_rows - sum(stop - g.computed for g, stop in plan.items())
        while self.waiting and rows > 0 and len(self.running) < self.runner.max_sequences:
            generation = self.waiting[0]
            generation.pages = self.pool.open(generation.ids, reuse=self.reuse_prefixes)
            stop = min(len(generation.ids), generation.computed + rows)
            try:
                made = self.pool.reserve(generation.pages, stop - generation.computed)
            except OutOfPages:
                self._release(generation)
                break  # first come, first served: nobody overtakes
            self.waiting.popleft()
            self.running.append(generation)
            rows -= stop - generation.computed
            plan[generation], copies[generation] = stop, made
        return plan, [pair for g in plan for pair in copies[g]]

    def _reserve(
        self,
        generation: Generation,
        stop: int,
        plan: dict[Generation, int],
        copies: dict[Generation, list[Copy]],
    ) -> list[Copy] | None:
        """Pages for `generation` up to `stop`, preempting younger sequences; None when it had to give way itself."""
        assert generation.pages is not None
        while True:
            try:
                return self.pool.reserve(generation.pages, stop - generation.computed)
            except OutOfPages:
                victim = self.running[-1]
                self._requeue(victim)
                plan.pop(victim, None)
                copies.pop(victim, None)
                if victim is generation:
                    return None

    def _requeue(self, generation: Generation) -> None:
        """Preempt: pages go back, and what they held is computed again."""
        self.running.remove(generation)
        self._release(generation)
        generation.num_preempted += 1
        self.waiting.appendleft(generation)

    def _batch(self, plan: dict[Generation, int], sampled: list[Generation], copies: list[Copy]) -> StepBatch:
        ids: list[int] = []
        positions, slots, starts = [], [], [0]
        table = np.full((len(plan), self.runner.max_pages), -1, np.int32)
        last = {}
        for row, (generation, stop) in enumerate(plan.items()):
            assert generation.pages is not None
            start = generation.computed
            ids += generation.ids[start:stop]
            positions.append(np.arange(start, stop, dtype=np.int32))
            slots.append(generation.pages.slots(start, stop))
            starts.append(len(ids))
            blocks = generation.pages.block_table
            table[row, : len(blocks)] = blocks
            last[generation] = len(ids) - 1
        return StepBatch(
            ids=np.array(ids, np.int64),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots).astype(np.int32),
            q_starts=np.array(starts, np.int32),
            kv_lengths=np.array(list(plan.values()), np.int32),
            block_table=table,
            logits_rows=np.array([last[g] for g in sampled], np.int64),
            copies=copies,
        )

    # -- tokens -------------------------------------------------------------------------------------------------

    def _fork_siblings(self, generation: Generation) -> list[Generation]:
        """The choices that waited for this prompt, sharing its pages; those without room wait on their own."""
        siblings, generation.siblings = generation.siblings, []
        forked = []
        for sibling in siblings:
            if len(self.running) < self.runner.max_sequences and generation.pages is not None:
                sibling.pages = self.pool.fork(generation.pages)
                self.running.append(sibling)
                forked.append(sibling)
            else:
                self.waiting.append(sibling)
        return forked

    def _advance(self, generation: Generation, logits: np.ndarray, ended: list[Generation]) -> None:
        """Choose a token and decide whether the sequence goes on."""
        try:
            choice = choose(
                logits,
                generation.params,
                number=len(generation.output),
                history=np.array(generation.ids),
                valid_vocab=self.valid_vocab,
            )
        except SamplingError as error:
            generation.error = str(error)
            self._finish(generation, "error")
            ended.append(generation)
            return
        if choice.token in generation.stop_ids:
            self._finish(generation, "stop")
            ended.append(generation)
            return
        generation.output.append(choice.token)
        generation.choices.append(choice)
        stopped = generation.on_token is not None and generation.on_token(generation, choice)
        if generation.finish_reason is not None:  # the callback cancelled it
            ended.append(generation)
        elif stopped or len(generation.output) >= generation.max_tokens:
            self._finish(generation, "stop" if stopped else "length")
            ended.append(generation)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        if generation in self.running:
            self.running.remove(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        else:  # a choice whose prompt is not computed yet
            for other in [*self.waiting, *self.running]:
                if generation in other.siblings:
                    other.siblings.remove(generation)
        self._release(generation)
        if generation.siblings:
            first, *rest = generation.siblings
            first.siblings, generation.siblings = rest, []
            self.waiting.append(first)

    def _release(self, generation: Generation) -> None:
        if generation.pages is not None:
            self.pool.close(generation.pages)
        generation.pages = None

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_prompt(self, prompt: list[int], max_tokens: int, n: int) -> int:
        """The number of tokens that may be generated; raises InputError."""
        config = self.runner.config
        if not prompt:
            raise InputError("prompt: got no tokens, expected at least one")
        bad = [(i, t) for i, t in enumerate(prompt) if not 0 <= t < config.vocab_size]
        if bad:
            raise InputError(f"prompt: got id {bad[0][1]} at [{bad[0][0]}], expected 0 <= id < {config.vocab_size}")
        if max_tokens < 1:
            raise InputError(f"max-tokens: got {max_tokens}, expected at least 1")
        if not 1 <= n <= self.runner.max_sequences:
            raise InputError(f"n: got {n}, expected 1 to {self.runner.max_sequences}")
        if len(prompt) >= config.max_position_embeddings:
            raise InputError(
                f"prompt: got {len(prompt)} tokens, expected fewer than the model's {config.max_position_embeddings}; "
                "shorten it"
            )
        limit = min(max_tokens, config.max_position_embeddings - len(prompt))
        pages = -(-(len(prompt) + limit) // self.pool.page_tokens)
        room = min(self.runner.max_pages, self.pool.num_pages)
        if pages > room:
            raise InputError(
                f"prompt: {len(prompt)} tokens and {limit} to generate need {pages} pages, the cache has {room}; "
                "lower --max-tokens or raise --kv-memory"
            )
        return limit

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise BackendError(
                "engine: used in a forked child, expected the process that made it; start workers with "
                'multiprocessing.get_context("spawn") or make the engine in the child'
            )
