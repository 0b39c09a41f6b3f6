"""How a generation's memory is divided: weights resident or streamed, pages of the KV cache, pages that travel.

Resident weights are worth more than pages: a step reads every weight once whatever the pages are, and sequences without
pages can wait. So weights stay when they fit beside the working memory and the pages of the longest sequence; pages
get what is left, up to what all sequences need. On a device, pages beyond their budget lie in host memory and travel
(model/runner.py); on the reference the budget bounds them. Rejected: a fixed share of memory for the cache, which
wastes it on short prompts and starves long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.backend.base import ITEMSIZE
from cupyllm.config import ModelConfig
from cupyllm.engine import WeightSource
from cupyllm.errors import InputError, OutOfMemory
from cupyllm.kvcache.blocks import PAGE_TOKENS
from cupyllm.kvcache.pool import bytes_per_token
from cupyllm.model.names import FINAL_NORM, head_name, layer_names

MAX_ROWS, MAX_SEQUENCES = 512, 64
RESERVE_BYTES = 256 << 20  # for what the device's driver and kernels take beside our buffers
HOST_SHARE = 0.8  # of the host's available memory; the rest is the system's and the page cache's


@dataclass(frozen=True)
class Memory:
    """What there is: free bytes of the device (None: the reference computes in host memory) and of the host."""

    host_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """A runner's sizes. `kv_bytes`: device bytes of pages, the rest travels; None where none does."""

    mode: str  # "stream" or "resident"
    num_pages: int
    max_pages: int
    kv_bytes: int | None
    max_rows: int
    max_sequences: int
    weight_bytes: int  # of the mode, where the computing is done
    page_bytes: int  # of a page in all layers

    @property
    def num_tokens(self) -> int:
        """Tokens that one sequence can have."""
        return self.max_pages * PAGE_TOKENS


def plan(
    source: WeightSource,
    dtype: str,
    memory: Memory,
    lengths: Sequence[int],
    *,
    prompt_tokens: int,
    least_tokens: int | None = None,
    stream: bool | None = None,
    kv_memory: int | None = None,
) -> Plan:
    """The plan for sequences of at most `lengths` tokens, prompts of `prompt_tokens` in all.

    `least_tokens` is what one sequence must be able to have (None: the longest length); `stream` and `kv_memory` are
    the user's wishes, None where there are none.
    Raises OutOfMemory for what cannot fit, InputError when only --kv-memory is in the way.
    """
    config, on_device = source.config, memory.device_bytes is not None
    free = int(HOST_SHARE * memory.host_bytes) if memory.device_bytes is None else memory.device_bytes - RESERVE_BYTES
    page = PAGE_TOKENS * bytes_per_token(config, dtype)
    wanted = sum(_pages(length) for length in lengths)
    longest = max(_pages(length) for length in lengths)
    least = longest if least_tokens is None else min(longest, _pages(least_tokens))
    rows, sequences = min(MAX_ROWS, max(prompt_tokens, len(lengths))), min(MAX_SEQUENCES, len(lengths))
    free -= work_bytes(config, rows, sequences, dtype)
    weights = {mode: weight_bytes(source, mode, on_device) for mode in ("resident", "stream")}
    least_bytes = least * page if kv_memory is None or not on_device else min(least * page, kv_memory)
    fits = weights["resident"] + least_bytes <= free
    if stream is False and not fits:
        raise OutOfMemory(
            f"--resident: {weights['resident']} bytes of weights and {least_bytes} of KV cache are needed, "
            f"{max(free, 0)} are free; use --stream"
        )
    mode = "stream" if stream or not fits else "resident"
    room = max(0, free - weights[mode])
    if on_device:
        pages, kv_bytes = _device_pages(page, wanted, least, room, int(HOST_SHARE * memory.host_bytes), kv_memory)
    else:
        pages, kv_bytes = _host_pages(page, wanted, least, room, kv_memory), None
    return Plan(mode, pages, min(longest, pages), kv_bytes, rows, sequences, weights[mode], page)


def weight_bytes(source: WeightSource, mode: str, on_device: bool) -> int:
    """Bytes that weights take where the computing is done. The reference computes in float32, whatever is stored."""
    config = source.config

    def size(names: Sequence[str]) -> int:
        total = 0
        for name in names:
            dtype, shape = source.spec(name)
            count = 1
            for extent in shape:
                count *= extent
            total += count * ITEMSIZE[dtype if on_device else "float32"]
        return total

    layers = [size(layer_names(config, i)) for i in range(config.num_hidden_layers)]
    head = size([FINAL_NORM, head_name(config)])
    if mode == "resident":
        return sum(layers) + head
    return 2 * max(layers) + head if on_device else max(layers) + head // 8


def work_bytes(config: ModelConfig, rows: int, sequences: int, dtype: str) -> int:
    """An estimate of a step's activations, and the logits: rows are padded to a power of two."""
    padded = 1 << max(rows - 1, 0).bit_length()
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    row = 8 * config.hidden_size + 3 * config.intermediate_size + 2 * heads * config.head_dim
    return padded * row * ITEMSIZE[dtype] + 2 * sequences * config.vocab_size * ITEMSIZE["float32"]


def _device_pages(
    page: int, wanted: int, least: int, room: int, host_room: int, kv_memory: int | None
) -> tuple[int, int | None]:
    """Pages, and the device bytes for them when some have to travel."""
    if kv_memory is None and least * page <= room:
        return min(wanted, room // page), None
    budget = room if kv_memory is None else min(kv_memory, room)
    if wanted * page <= budget:
        return wanted, None
    pages = min(wanted, (budget + host_room) // page)
    if pages < least:
        raise OutOfMemory(
            f"KV cache: one sequence needs {least * page} bytes, {budget} on the device and {host_room} on the host "
            "are free; shorten the prompt or lower --max-tokens"
        )
    return pages, budget


def _host_pages(page: int, wanted: int, least: int, room: int, kv_memory: int | None) -> int:
    if kv_memory is not None and least * page > kv_memory:
        raise InputError(
            f"--kv-memory: got {kv_memory} bytes, expected at least the {least * page} of the longest sequence; raise "
            "it, shorten the prompt or lower --max-tokens"
        )
    budget = room if kv_memory is None else min(kv_memory, room)
    if least * page > budget:
        raise OutOfMemory(
            f"KV cache: one sequence needs {least * page} bytes, {budget} of host memory are free; shorten the prompt "
            "or lower --max-tokens"
        )
    return min(wanted, budget // page)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
