"""The loop over both runners: greedy ids of the goldens, and every way of scheduling gives the same answer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.engine import WeightSource
from cupyllm.errors import BackendError, CheckpointError, InputError
from cupyllm.kvcache.pool import Geometry
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.runner import DeviceRunner
from cupyllm.reference.runner import ReferenceRunner
from cupyllm.serve.engine import Engine, Generation
from cupyllm.serve.runner import Runner, StepBatch
from cupyllm.serve.sampler import SamplingParams
from tests.goldens import FIXTURES, load

H1 = FIXTURES / "goldens" / "h1"
GREEDY = SamplingParams(temperature=0)
SHAPE = {"num_pages": 24, "max_pages": 8, "page_tokens": 32, "max_rows": 64, "max_sequences": 8}
PROMPTS = [
    [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)] for seed, n in enumerate((3, 40, 64, 70, 1))
]


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(H1) as opened:
        yield opened


def on_device(source: WeightSource, backend: Backend, dtype: str = "float32", **options: Any) -> DeviceRunner:
    return DeviceRunner(source, backend, dtype, **{**SHAPE, **options})


def answers(runner: Runner, prompts: list[list[int]], tokens: int = 12, **options: Any) -> list[list[int]]:
    """What each prompt is continued with when all are submitted at once."""
    engine = Engine(runner, **options)
    made = [engine.submit(prompt, GREEDY, max_tokens=tokens)[0] for prompt in prompts]
    engine.run()
    engine.pool.check()
    assert engine.pool.stats().used == 0
    assert all(g.finish_reason == "length" for g in made)
    return [g.output for g in made]


class Recording:
    """A runner that keeps the logits of every step, by sequence position."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seen: dict[tuple[int, ...], bytes] = {}
        self.prefix: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


@pytest.mark.parametrize("name", ["h1", "h2", "h3", "h4", "h5", "h6"])
def test_greedy_ids_of_the_goldens(name: str, backend: Backend) -> None:
    want = load(FIXTURES / "goldens" / name)[0]["greedy_ids"][0].tolist()
    with Checkpoint.open(FIXTURES / "goldens" / name) as opened:
        for runner in (ReferenceRunner(opened, **SHAPE), on_device(opened, backend, max_rows=8)):
            assert answers(runner, [want[:8]], 24) == [want[8:]]
            runner.close()


def test_alone_batched_chunked_reused_preempted_and_travelling_agree(checkpoint: Checkpoint, backend: Backend) -> None:
    """Greedy ids of five prompts, however they are scheduled (test_logits_do_not_depend_on_company: bits of logits)."""
    runner = on_device(checkpoint, backend)
    alone = [answers(runner, [prompt])[0] for prompt in PROMPTS]
    assert answers(runner, PROMPTS) == alone
    assert answers(runner, PROMPTS, chunk_rows=7) == alone
    assert answers(runner, PROMPTS + PROMPTS, reuse_prefixes=True)[5:] == alone
    runner.close()
    for options in ({"mode": "resident"}, {"num_pages": 4, "max_pages": 4}, {"page_tokens": 64}):
        runner = on_device(checkpoint, backend, **options)
        assert answers(runner, PROMPTS) == alone, options
        runner.close()
    layer = Geometry.of(checkpoint.config, SHAPE["num_pages"], "float32", SHAPE["page_tokens"]).layer_bytes
    for kv_bytes in (0, 2 * layer):  # every layer travels; the first one stays
        runner = on_device(checkpoint, backend, kv_bytes=kv_bytes)
        assert runner.num_staying == kv_bytes // layer // 2 and answers(runner, PROMPTS) == alone
        runner.close()
    reference = ReferenceRunner(checkpoint, **SHAPE)
    assert answers(reference, PROMPTS) == alone


class Noted(DeviceRunner):
    """Keeps the logits' bytes of every row that was asked for, by the ids before it."""

    def note(self, engine: Engine) -> None:
        self.serving = engine
        self.noted: dict[tuple[int, ...], set[bytes]] = {}

    def step(self, batch: StepBatch) -> np.ndarray:
        logits = super().step(batch)
        planned = [g for g in self.serving.running if g.pages is not None]
        by_end = {(tuple(g.ids)): g for g in planned}
        rows = list(batch.logits_rows)
        starts = batch.q_starts.tolist()
        for index, row in enumerate(rows):
            sequence = next(s for s in range(len(starts) - 1) if starts[s] <= row < starts[s + 1])
            table = [page for page in batch.block_table[sequence] if page >= 0]
            ids = next(key for key, g in by_end.items() if g.pages is not None and g.pages.block_table == table)
            self.noted.setdefault(ids, set()).add(logits[index].tobytes())
        return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_company(dtype: str, checkpoint: Checkpoint, backend: Backend) -> None:
    """Bit for bit: alone, batched, in chunks of 7, from reused prefixes, after preemption, with travelling pages.

    float32 promises it, and bfloat16 under --batch-invariant.
    """
    noted: dict[tuple[int, ...], set[bytes]] = {}
    layer = Geometry.of(checkpoint.config, SHAPE["num_pages"], dtype, SHAPE["page_tokens"]).layer_bytes
    runs: list[tuple[dict[str, Any], dict[str, Any], list[list[list[int]]]]] = [
        ({}, {}, [[prompt] for prompt in PROMPTS]),
        ({}, {}, [PROMPTS]),
        ({}, {"chunk_rows": 7}, [PROMPTS, PROMPTS]),
        ({"num_pages": 4, "max_pages": 4}, {}, [PROMPTS]),
        ({"kv_bytes": 2 * layer}, {}, [PROMPTS]),
    ]
    preempted = 0
    for options, engine_options, rounds in runs:
        runner = Noted(checkpoint, backend, dtype, batch_invariant=dtype == "bfloat16", **{**SHAPE, **options})
        engine = Engine(runner, **engine_options)
        runner.note(engine)
        for prompts in rounds:
            made = [engine.submit(prompt, GREEDY, max_tokens=6)[0] for prompt in prompts]
            engine.run()
            preempted += sum(g.num_preempted for g in made)
        for ids, seen in runner.noted.items():
            noted.setdefault(ids, set()).update(seen)
        runner.close()
    assert preempted > 0 and len(noted) == 6 * len(PROMPTS)
    assert {len(seen) for seen in noted.values()} == {1}


def test_bfloat16_logits_in_company_stay_close(checkpoint: Checkpoint, backend: Backend) -> None:
    """Without --batch-invariant few rows may be summed in another order: 2 units of bfloat16 of the largest logit, and
    the same ids where the two likeliest tokens are further apart (the same prompt beside other ones)."""
    given, tokens = (PROMPTS[:2], 1) if backend.name == "sim" else (PROMPTS, 6)
    noted: dict[tuple[int, ...], list[np.ndarray]] = {}
    for engine_options, rounds in (
        ({}, [[prompt] for prompt in given]),
        ({}, [given]),
        ({"chunk_rows": 7}, [given]),
    ):
        runner = Noted(checkpoint, backend, "bfloat16", **SHAPE)
        engine = Engine(runner, **engine_options)
        runner.note(engine)
        for prompts in rounds:
            for prompt in prompts:
                engine.submit(prompt, GREEDY, max_tokens=tokens)
            engine.run()
        for ids, seen in runner.noted.items():
            noted.setdefault(ids, []).extend(np.frombuffer(bits, np.float32) for bits in seen)
        runner.close()
    compared = 0
    for logits in noted.values():
        limit = 2 * 2.0**-8 * float(np.abs(logits[0]).max())
        first, second = np.sort(logits[0])[::-1][:2]
        for other in logits[1:]:
            compared += 1
            assert np.abs(other - logits[0]).max() <= limit
            assert first - second <= 2 * limit or other.argmax() == logits[0].argmax()
    assert compared >= 2 * len(given), "prompts are noted by each run at least"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged_is_contiguous_bit_for_bit(dtype: str, checkpoint: Checkpoint, backend: Backend) -> None:
    """A prompt's last logits through the cache are those of the whole-model forward (same rows, same kernels)."""
    from cupyllm.model.engine import DeviceEngine

    prompt = PROMPTS[2]  # 64 rows: no padding, so that bfloat16 sees the same shapes too
    invariant = dtype == "bfloat16"  # else one row of logits may be summed in another order than 64
    with DeviceEngine(checkpoint, backend, dtype, batch_invariant=invariant) as engine:
        want = engine.forward(np.array([prompt])).last_logits[0]
    runner = on_device(checkpoint, backend, dtype, batch_invariant=invariant)
    loop = Engine(runner)
    seen: list[np.ndarray] = []
    step = runner.step

    def spy(batch: StepBatch) -> np.ndarray:
        seen.append(step(batch))
        return seen[-1]

    runner.step = spy  # type: ignore[method-assign]
    loop.submit(prompt, GREEDY, max_tokens=1)
    loop.run()
    assert len(seen) == 1 and seen[0][0].tobytes() == want.tobytes()
    runner.close()


def test_unused_pages_may_hold_anything(checkpoint: Checkpoint, backend: Backend) -> None:
    """Free pages are filled with NaN before every step; nothing changes."""
    want = answers(on_device(checkpoint, backend), PROMPTS)
    runner = on_device(checkpoint, backend, num_pages=6, max_pages=6)
    engine = Engine(runner)
    step = runner.step

    def poisoned(batch: StepBatch) -> np.ndarray:
        for page in engine.pool.free_pages():
            runner.kv.poison(page, runner.engine.compute)
        return step(batch)

    runner.step = poisoned  # type: ignore[method-assign]
    made = [engine.submit(prompt, GREEDY, max_tokens=12)[0] for prompt in PROMPTS]
    engine.run()
    assert [g.output for g in made] == want
    runner.close()


class Scripted:
    """A runner without a model: uniform logits, or those given by the ids' last token."""

    def __init__(
        self, next_token: Callable[[int], int] | None = None, num_pages: int = 64, page_tokens: int = 16
    ) -> None:
        self.config = load_config()
        self.num_pages, self.page_tokens, self.max_pages = num_pages, page_tokens, num_pages
        self.max_rows, self.max_sequences = 32, 8
        self.backend_name, self.device_name, self.dtype, self.mode = "scripted", "none", "float32", "resident"
        self.next_token = next_token

    def step(self, batch: StepBatch) -> np.ndarray:
        logits = np.zeros((len(batch.logits_rows), self.config.vocab_size), np.float32)
        if self.next_token is not None:
            for row, at in enumerate(batch.logits_rows):
                logits[row, self.next_token(int(batch.ids[at]))] = 50
        return logits

    def close(self) -> None:
        pass


def load_config() -> Any:
    with Checkpoint.open(H1) as opened:
        return opened.config


def test_B7_any_stop_id_ends_and_is_not_said() -> None:
    script = {7: 26, 26: 13, 13: 300, 300: 33}
    engine = Engine(Scripted(script.__getitem__), stop_ids=[299, 300])
    (one,) = engine.submit([7], GREEDY)
    engine.run()
    assert one.output == [26, 13] and one.finish_reason == "stop"
    (other,) = engine.submit([7], GREEDY, ignore_eos=True, max_tokens=4)
    engine.run()
    assert other.output == [26, 13, 300, 33] and other.finish_reason == "length"


def stepped(engine: Engine) -> None:
    """A step whose callback may fail."""
    try:
        engine.step()
    except RuntimeError as error:
        assert "stop callback" in str(error)


def test_D3_every_page_comes_back() -> None:
    """500 requests: finished, cancelled in every state, an error in a callback, double cancels, preemption."""
    rng = random.Random(0)
    engine = Engine(Scripted(num_pages=12), chunk_rows=9)
    alive: list[Generation] = []

    def raising(generation: Generation, choice: object) -> bool | None:
        if generation.number % 97 == 5:
            raise RuntimeError("a stop callback failed")
        return None

    preempted = 0
    for number in range(500):
        length = rng.choice([16, 32, rng.randint(1, 40)])
        prompt = [rng.randrange(320) for _ in range(length)]
        alive += engine.submit(
            prompt,
            SamplingParams(seed=number),
            max_tokens=rng.randint(1, 20),
            n=rng.choice([1, 1, 3]),
            on_token=raising,
        )
        for _ in range(rng.randrange(4)):
            stepped(engine)
        if rng.random() < 0.5 and alive:
            victim = rng.choice(alive)
            engine.cancel(victim)
            engine.cancel(victim)
        engine.pool.check()
    while engine.busy:
        stepped(engine)
    failed = [g for g in alive if g.finish_reason == "error"]
    assert failed and all("callback: RuntimeError" in g.error and g.number % 97 == 5 for g in failed)
    preempted = sum(g.num_preempted for g in alive)
    stats = engine.pool.stats()
    print(f"{len(alive)} sequences, {preempted} preemptions, {stats}")
    assert preempted > 0 and stats.used == 0 and stats.free + stats.cached == 12 and min(stats.refs) >= 0
    assert all(g.finish_reason for g in alive)
    (last,) = engine.submit([1, 2, 3], GREEDY, max_tokens=2)
    engine.run()
    assert last.finish_reason == "length"


def test_G5_choices_differ_repeat_and_share_the_prompt() -> None:
    texts = []
    for _ in range(2):
        engine = Engine(Scripted())
        made = engine.submit(list(range(40)), SamplingParams(seed=7), n=4, max_tokens=16)
        engine.step()
        engine.step()  # 40 prompt tokens in chunks of 32
        used = engine.pool.stats().used
        engine.run()
        texts.append([tuple(g.output) for g in made])
        assert used < 2 * 3  # one prompt is 3 pages of 16; four of them would be 12
        assert engine.pool.stats().used == 0
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    engine = Engine(Scripted())
    greedy = engine.submit(list(range(40)), GREEDY, n=4, max_tokens=16)
    engine.run()
    assert len({tuple(g.output) for g in greedy}) == 1


def test_a_long_prompt_does_not_make_others_wait() -> None:
    engine = Engine(Scripted(num_pages=128), chunk_rows=8)
    gaps: list[int] = []
    said = [0]

    def note(generation: Generation, choice: object) -> None:
        gaps.append(engine.num_steps - said[0])
        said[0] = engine.num_steps

    engine.submit([1], GREEDY, max_tokens=60, on_token=note)
    engine.step()
    engine.submit([2] * 400, GREEDY, max_tokens=4)
    engine.run()
    assert max(gaps[1:]) == 1


def test_nan_ends_one_sequence_and_not_the_others() -> None:
    class Nan(Scripted):
        def step(self, batch: StepBatch) -> np.ndarray:
            logits = super().step(batch)
            logits[[row for row, at in enumerate(batch.logits_rows) if batch.ids[at] == 9], 4] = np.nan
            return logits

    engine = Engine(Nan(lambda token: 9 if token == 8 else token))
    bad, good = engine.submit([8], GREEDY, max_tokens=5)[0], engine.submit([3], GREEDY, max_tokens=5)[0]
    engine.run()
    assert bad.finish_reason == "error" and "NaN" in bad.error and bad.output == [9]
    assert good.output == [3] * 5 and engine.pool.stats().used == 0


@pytest.mark.parametrize("failing", range(8))
def test_a_step_that_fails_once_changes_no_answer(failing: int, checkpoint: Checkpoint) -> None:
    """Forked choices among them, whose page copies were lost with the step; unwritten pages hold NaN."""
    answers = []
    for fails in (False, True):
        runner = ReferenceRunner(checkpoint, **SHAPE)
        for pages in runner.pages:
            for array in pages:
                array.fill(np.nan)
        engine, step, calls = Engine(runner), runner.step, [0]

        def sometimes(batch: StepBatch, step: Any = step, calls: list[int] = calls, fails: bool = fails) -> np.ndarray:
            calls[0] += 1
            if fails and calls[0] == failing + 1:
                raise MemoryError("once")
            return step(batch)  # type: ignore[no-any-return]

        runner.step = sometimes  # type: ignore[method-assign]
        made = engine.submit(PROMPTS[1], SamplingParams(seed=5), max_tokens=8, n=3)
        made += engine.submit(PROMPTS[0], GREEDY, max_tokens=8)
        while engine.busy:
            try:
                engine.step()
            except MemoryError:
                engine.pool.check()
        assert engine.pool.stats().used == 0 and calls[0] == 8 + fails
        answers.append([g.output for g in made])
        assert all(g.finish_reason == "length" for g in made)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("travelling", [False, True])
def test_a_read_that_fails_once_changes_no_answer(
    travelling: bool, checkpoint: Checkpoint, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer cannot be read in the middle of a step, forked choices among its sequences."""
    options: dict[str, Any] = {"kv_bytes": 0} if travelling else {}
    runner = on_device(checkpoint, backend, **options)
    read, calls, fails, failures = type(checkpoint).read_into, [0], [False], 0

    def sometimes(self: Checkpoint, name: str, out: np.ndarray, start: int = 0) -> None:
        if fails[0] and name.endswith("layers.2.mlp.up_proj.weight"):
            calls[0] += 1
            if calls[0] % 3 == 2:
                raise CheckpointError("cannot be read now")
        read(self, name, out, start)

    monkeypatch.setattr(type(checkpoint), "read_into", sometimes)
    said = []
    for fails[0] in (False, True):
        engine = Engine(runner)
        made = engine.submit(PROMPTS[1], SamplingParams(seed=5), max_tokens=8, n=3)
        made += engine.submit(PROMPTS[0], GREEDY, max_tokens=8)
        while engine.busy:
            try:
                engine.step()
            except CheckpointError:
                failures += 1
        said.append([g.output for g in made])
        backend.synchronize()
        for page in engine.pool.free_pages():  # unwritten pages must not look written by the first round
            if not travelling:
                runner.kv.poison(page)
    assert failures > 3 and said[0] == said[1]
    runner.close()


def test_what_a_callback_cancels_says_nothing_more() -> None:
    engine = Engine(Scripted(), stop_ids=[0])
    said: list[int] = []

    def cancel_others(generation: Generation, choice: object) -> None:
        said.append(generation.number)
        for other in made[1:]:
            engine.cancel(other)

    made = engine.submit([1, 2, 3], SamplingParams(seed=7), n=3, max_tokens=4, ignore_eos=True, on_token=cancel_others)
    engine.run()
    assert said == [0] * 4 and [g.finish_reason for g in made] == ["length", "cancelled", "cancelled"]
    assert [len(g.output) for g in made] == [4, 0, 0] and engine.pool.stats().used == 0


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "got no tokens"),
        ([320], {}, "id 320 at"),
        ([-1], {}, "id -1 at"),
        ([1], {"max_tokens": 0}, "max-tokens: got 0"),
        ([1], {"n": 0}, "n: got 0"),
        ([1], {"n": 1000}, "n: got 1000"),
        ([1] * 512, {}, "512 tokens, expected fewer than the model's 512"),
        ([1] * 100, {"max_tokens": 400}, "--kv-memory"),
    ],
)
def test_what_cannot_be_served_is_refused(prompt: list[int], options: dict[str, int], message: str) -> None:
    engine = Engine(Scripted(num_pages=16))
    with pytest.raises(InputError, match=message):
        engine.submit(prompt, GREEDY, **options)  # type: ignore[arg-type]
    assert not engine.busy


def test_F5_a_forked_child_is_told(checkpoint: Checkpoint) -> None:
    engine = Engine(ReferenceRunner(checkpoint, **SHAPE))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.submit([1], GREEDY)
            os.write(writer, b"no error")
        except BackendError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"fork" in os.read(reader, 1000)
