"""How memory is divided between weights and pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupyllm.errors import InputError, OutOfMemory
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.serve import plan as module
from cupyllm.serve.plan import HOST_SHARE, Memory, plan, weight_bytes, work_bytes
from tests.goldens import FIXTURES

PAGE = 3 * 2 * 64 * 2 * 32 * 4  # layers, keys and values, tokens, heads, head size, float32
MUCH = 1 << 40


@pytest.fixture(scope="module")
def source() -> Iterator[Checkpoint]:
    with Checkpoint.open(FIXTURES / "goldens" / "h1") as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESERVE_BYTES", 0)


def stored(source: Checkpoint) -> int:
    """Layers, final norm and head; the embedding stays in its file."""
    return sum(source.stored_bytes([name]) for name in source.names() if name != "model.embed_tokens.weight")


def test_weights(source: Checkpoint) -> None:
    assert weight_bytes(source, "resident", True) == weight_bytes(source, "resident", False) == stored(source)
    head = source.stored_bytes(["model.norm.weight", "lm_head.weight"])
    assert weight_bytes(source, "stream", True) == 2 * source.layer_bytes(0) + head


def test_with_room_for_all(source: Checkpoint) -> None:
    for memory in (Memory(MUCH), Memory(MUCH, MUCH)):
        made = plan(source, "float32", memory, [64, 65, 200], prompt_tokens=100)
        assert (made.mode, made.num_pages, made.max_pages, made.kv_bytes) == ("resident", 1 + 2 + 4, 4, None)
        assert (made.max_rows, made.max_sequences, made.page_bytes, made.num_tokens) == (100, 3, PAGE, 256)


def test_weights_stay_when_they_fit_beside_the_longest_sequence(source: Checkpoint) -> None:
    work = work_bytes(source.config, 100, 3, "float32")
    enough = stored(source) + work + 4 * PAGE
    for free, mode in ((enough, "resident"), (enough - 1, "stream")):
        made = plan(source, "float32", Memory(MUCH, free), [64, 65, 200], prompt_tokens=100)
        assert made.mode == mode and made.kv_bytes is None
        assert made.num_pages == min(7, (free - work - made.weight_bytes) // PAGE) >= 4
    with pytest.raises(OutOfMemory, match="use --stream"):
        plan(source, "float32", Memory(MUCH, enough - 1), [64, 65, 200], prompt_tokens=100, stream=False)
    assert plan(source, "float32", Memory(MUCH, MUCH), [200], prompt_tokens=9, stream=True).mode == "stream"


def test_pages_of_a_device_travel_beyond_their_memory(source: Checkpoint) -> None:
    made = plan(source, "float32", Memory(MUCH, MUCH), [200, 200], prompt_tokens=9, kv_memory=3 * PAGE)
    assert (made.num_pages, made.kv_bytes) == (8, 3 * PAGE)
    made = plan(source, "float32", Memory(MUCH, MUCH), [200, 200], prompt_tokens=9, kv_memory=8 * PAGE)
    assert (made.num_pages, made.kv_bytes) == (8, None)  # all of it fits
    little = weight_bytes(source, "stream", True) + work_bytes(source.config, 9, 1, "float32") + PAGE
    made = plan(source, "float32", Memory(MUCH, little), [512], prompt_tokens=9)
    assert (made.mode, made.num_pages, made.kv_bytes) == ("stream", 8, PAGE)  # though nobody asked
    with pytest.raises(OutOfMemory, match="one sequence needs"):
        plan(source, "float32", Memory(PAGE, little), [512], prompt_tokens=9)


def test_pages_of_the_reference_are_bounded(source: Checkpoint) -> None:
    made = plan(source, "float32", Memory(MUCH), [200, 200], prompt_tokens=9, kv_memory=5 * PAGE)
    assert (made.num_pages, made.max_pages, made.kv_bytes) == (5, 4, None)
    with pytest.raises(InputError, match="--kv-memory: got"):
        plan(source, "float32", Memory(MUCH), [200, 200], prompt_tokens=9, kv_memory=4 * PAGE - 1)
    with pytest.raises(OutOfMemory, match="host memory are free"):
        plan(source, "float32", Memory(300_000), [200], prompt_tokens=9)


def test_a_conversation_takes_what_there_is(source: Checkpoint) -> None:
    """`least_tokens` must fit; the rest of the context is cut to the memory."""
    work = work_bytes(source.config, 512, 1, "float32")
    free = int((stored(source) + work + 5 * PAGE) / HOST_SHARE) + 1
    made = plan(source, "float32", Memory(free), [512], prompt_tokens=512, least_tokens=100)
    assert (made.mode, made.num_pages, made.max_pages, made.num_tokens) == ("resident", 5, 5, 320)
