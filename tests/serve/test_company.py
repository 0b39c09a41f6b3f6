"""Cases D1 and D6: what a prompt is answered depends on nothing but the prompt; and 500 random scripts of the loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.engine import WeightSource
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.runner import DeviceRunner
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.reference.runner import ReferenceRunner
from cupyllm.serve.engine import Engine
from cupyllm.serve.runner import Runner
from cupyllm.serve.sampler import SamplingParams
from tests.goldens import FIXTURES
from tests.serve.test_engine import GREEDY, Scripted

H1 = FIXTURES / "goldens" / "h1"
SHAPE = {"num_pages": 160, "max_pages": 4, "page_tokens": 32, "max_rows": 512, "max_sequences": 64}


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(H1) as opened:
        yield opened


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in rng.integers(2, 40, count)]


def make(kind: str, source: WeightSource, backend: Backend, **options: Any) -> Runner:
    shape = {**SHAPE, **options}
    return ReferenceRunner(source, **shape) if kind == "reference" else DeviceRunner(source, backend, **shape)


@pytest.mark.parametrize("kind", ["reference", "device"])
def test_D1_prompts_of_different_lengths_equal_each_alone(kind: str, checkpoint: Checkpoint, backend: Backend) -> None:
    """3 and 5 tokens, 8 steps: positions count from 0 in each; no pad token exists whose value could matter."""
    runner = make(kind, checkpoint, backend, max_rows=8, max_sequences=2)
    three, five = [9, 41, 7], [3, 3, 250, 16, 8]
    together = Engine(runner)
    made = [together.submit(prompt, GREEDY, max_tokens=8)[0] for prompt in (three, five)]
    together.run()
    for prompt, generation in zip((three, five), made, strict=True):
        alone = Engine(runner)
        (one,) = alone.submit(prompt, GREEDY, max_tokens=8)
        alone.run()
        assert one.output == generation.output
    runner.close()


def test_D1_left_padding_changes_nothing(checkpoint: Checkpoint) -> None:
    """Whole-model forward: a left-padded row equals the row alone, whatever the pad token is (to rounding)."""
    engine = ReferenceEngine(checkpoint)
    alone = engine.forward(np.array([[9, 41, 7]])).last_logits[0]
    for pad in (0, 7):
        ids = np.array([[pad, pad, 9, 41, 7], [3, 3, 250, 16, 8]])
        segments = np.array([[-1, -1, 0, 0, 0], [0] * 5], np.int32)
        padded = engine.forward(ids, segments=segments).last_logits[0]
        assert np.abs(padded - alone).max() < 1e-5


@pytest.mark.parametrize("kind", ["reference", "device"])
def test_D6_neighbours_change_no_token(kind: str, checkpoint: Checkpoint, backend: Backend) -> None:
    """Five prompts alone, in batches of 2, 4 and 8, with 45 neighbours that join and leave, in chunks of 7 and 512."""
    tokens = 48 if kind == "reference" else 6
    wanted, noise = prompts(5, 1), prompts(45, 2)
    runner = make(kind, checkpoint, backend)
    answers = set()
    for batch in (1, 2, 4, 8):
        for neighbours in (0, 45) if batch in (1, 8) else (0,):
            for chunk in (7, 512):
                engine = Engine(runner, chunk_rows=chunk, reuse_prefixes=neighbours == 0)
                rng = random.Random(batch)
                others = iter(noise[:neighbours])
                answer = []
                for start in range(0, len(wanted), batch):
                    made = [engine.submit(p, GREEDY, max_tokens=tokens)[0] for p in wanted[start : start + batch]]
                    while any(g.finish_reason is None for g in made):
                        for prompt in [next(others, None) for _ in range(rng.randint(0, 3))]:
                            if prompt is not None:
                                engine.submit(prompt, SamplingParams(seed=3), max_tokens=rng.randint(1, 5))
                        engine.step()
                    answer += [tuple(g.output) for g in made]
                engine.run()
                assert engine.pool.stats().used == 0
                answers.add(tuple(answer))
    assert len(answers) == 1
    runner.close()


def test_500_random_scripts_end_with_every_page_free() -> None:
    preempted = cancelled = 0
    for seed in range(500):
        rng = random.Random(seed)
        pages = rng.randint(4, 12)
        engine = Engine(Scripted(num_pages=pages), chunk_rows=rng.choice([1, 7, 32]), reuse_prefixes=rng.random() < 0.7)
        alive = []
        for _ in range(rng.randint(1, 8)):
            prompt = [rng.randrange(4) for _ in range(rng.choice([1, 15, 16, 17, 32, rng.randint(1, 40)]))]
            alive += engine.submit(
                prompt, SamplingParams(seed=seed), max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2])
            )
            for _ in range(rng.randrange(6)):
                engine.step()
                engine.pool.check()
            if rng.random() < 0.3:
                engine.cancel(rng.choice(alive))
                engine.pool.check()
        engine.run()
        engine.pool.check()
        stats = engine.pool.stats()
        assert stats.used == 0 and stats.free + stats.cached == pages and not engine.waiting and not engine.running
        assert all(g.finish_reason in ("length", "cancelled") for g in alive)
        preempted += sum(g.num_preempted for g in alive)
        cancelled += sum(g.finish_reason == "cancelled" for g in alive)
    print(f"{preempted} preemptions, {cancelled} cancelled")
    assert preempted > 100 and cancelled > 50
