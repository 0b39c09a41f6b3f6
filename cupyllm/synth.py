"""Seeded synthetic checkpoints in Hugging Face layout, with the same bits on every machine.

Value i of a parameter is a function of (seed, name, i) alone, so any thread can make any piece in any order:

    word[j]  = splitmix64(key + (j+1) * 0x9E3779B97F4A7C15 mod 2^64),  key = first 8 bytes of SHA-256("seed\\0name")
    index[i] = 16 bits of word[i // 4], lowest first
    value[i] = table[index[i]]

(splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.) The table has 65536
nearly normal entries, each the sum of twelve 16-bit uniform integers (Irwin-Hall: variance 12 * 65536^2 / 12), entry
65535 - k the negative of entry k, so that the mean is exactly 0. Scaling is one float64 multiplication and one
rounding to the stored dtype; scales come from integer square roots. No libm is called: its last bits differ between
machines. NumPy's own generators were rejected because their normal() calls libm and cannot start in the middle.

Scales keep a model of any depth sane and trainable: linear weights have variance 1/fan_in; o_proj and down_proj, which
write into the residual stream, another 1/(2L) (GPT-2), so that all L layers together add about as much as the stream
holds. The embedding has variance 1, or 1/(4C) when it is the head too; the untied head 1/(16C), so that logits have
standard deviation 1/4 and the first loss is about ln V + 0.03. Norm weights are 1 with a standard deviation of 1/16.
(An untied embedding of variance 1/C was rejected: the layers' common direction then rules a 64-layer stream, the first
gradient norm is 45 instead of 5, and AdamW at 5e-4 does not lower the loss at every step.)
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from cupyllm.config import PARAMETER_DTYPES, ModelConfig
from cupyllm.errors import InputError, StorageError
from cupyllm.files import require_space, show_path, staged_directory, write_json
from cupyllm.model import names
from cupyllm.model.checkpoint import INDEX_FILE, SINGLE_FILE
from cupyllm.stream.safetensors import DTYPES, SafetensorsWriter

GENERATOR_VERSION = 2  # part of cache keys; raise it when the same (config, seed) gives other bits
CONSENT_BYTES = 8 * 2**30  # commands ask before they write more
DEFAULT_SHARD_BYTES = 5_000_000_000  # as Hugging Face

Progress = Callable[[int, int], None]  # (bytes written, bytes in all); called from worker threads, one at a time

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_BLOCK_VALUES = 1 << 18  # values of one pass; with a quarter, 8 threads queue for the interpreter at half the rate
_TASK_VALUES = 1 << 21  # what one write call writes


def synthesize(
    config: ModelConfig,
    out_dir: str | os.PathLike[str],
    seed: int,
    dtype: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write config.json, generation_config.json and the weights to `out_dir` (absent or empty); returns it.

    `dtype` is float32, bfloat16 or float16 (default: the config's); `threads` defaults to the cores this process may
    use. Everything is written beside and renamed at the end: on any error, and after a kill, `out_dir` is as before.
    Raises StorageError (no space, not writable, `out_dir` not empty), InputError (seed, dtype).
    """
    target = Path(out_dir)
    config = _stored_as(config, dtype)
    if type(seed) is not int or seed < 0:
        raise InputError(f"seed is {seed!r}, expected an integer >= 0")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError(f"{show_path(target)} exists and is not an empty directory; choose another or remove it")
    require_space(target.parent, plan_bytes(config))
    try:
        with staged_directory(target) as staging:
            write_checkpoint(config, staging, seed, threads, progress, max_shard_bytes)
    except FileExistsError:
        raise StorageError(f"{show_path(target)} was made by somebody else meanwhile; it was left alone") from None
    return target


def plan_bytes(config: ModelConfig, dtype: str | None = None) -> int:
    """Bytes of all parameters of a checkpoint of this shape (the files' headers add less than 0.1 MB a layer)."""
    itemsize = np.dtype(_numpy_dtype(_stored_as(config, dtype).dtype)).itemsize
    return itemsize * sum(math.prod(shape) for shape in names.model_params(config).values())


def write_checkpoint(
    config: ModelConfig,
    directory: Path,
    seed: int,
    threads: int | None = None,
    progress: Progress | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint's files straight into `directory`, without the staging that `synthesize` adds."""
    shards = shard_plan(config, max_shard_bytes)
    total = plan_bytes(config)
    done = 0
    guard = threading.Lock()

    def wrote(count: int) -> None:
        nonlocal done
        with guard:
            done += count
            if progress is not None:
                progress(done, total)

    write_json(directory / "config.json", config.to_hf())
    write_json(directory / "generation_config.json", _generation_config(config))
    for file_name, shapes in shards.items():
        _write_shard(config, directory / file_name, shapes, seed, threads or default_threads(), wrote)
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shapes in shards.items() for name in shapes}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def parameter_values(config: ModelConfig, name: str, seed: int, begin: int = 0, count: int | None = None) -> np.ndarray:
    """Values `begin` to `begin + count` (flat) of a parameter in the config's dtype: what `synthesize` writes there."""
    size = math.prod(names.model_params(config)[name])
    count = size - begin if count is None else count
    out = np.empty(count, _numpy_dtype(config.dtype))
    Generator(seed, name, value_table(config, name)).fill(out.view(f"u{out.itemsize}"), begin)
    return out


class Generator:
    """Fills pieces of one parameter. Not shared between threads: it owns its scratch."""

    def __init__(self, seed: int, name: str, table: np.ndarray, scratch: Scratch | None = None) -> None:
        self._key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")
        self._table = table  # unsigned integers of the stored width: bit patterns
        self._scratch = scratch or Scratch()

    def fill(self, out: np.ndarray, begin: int) -> None:
        """out (1-D, the table's dtype) = the bit patterns of values begin, begin + 1, …"""
        at = 0
        while at < len(out):
            lead = (begin + at) % 4  # values to skip in the first word
            count = min(_BLOCK_VALUES - lead, len(out) - at)
            words = self._words((begin + at) // 4, (lead + count + 3) // 4)
            index = words.view("<u2")[lead : lead + count]
            np.take(self._table, index, out=out[at : at + count], mode="clip")  # no index can be out of range
            at += count

    def _words(self, first: int, count: int) -> np.ndarray:
        """uint64 [count]: splitmix64 outputs `first`, first + 1, …; valid until the next call."""
        z, t = self._scratch.words[:count], self._scratch.temp[:count]
        np.add(self._scratch.steps[:count], np.uint64((self._key + first * _GOLDEN) & _MASK), out=z)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(z, np.uint64(shift), out=t)
            np.bitwise_xor(z, t, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=t)
        np.bitwise_xor(z, t, out=z)
        return z


class Scratch:
    """One thread's buffers."""

    def __init__(self) -> None:
        count = _BLOCK_VALUES // 4
        self.words = np.empty(count, np.uint64)
        self.temp = np.empty(count, np.uint64)
        self.steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def value_table(config: ModelConfig, name: str) -> np.ndarray:
    """[65536] bit patterns (uint16 or uint32) of the values that parameter `name` can take."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1] if not name.endswith(".bias") else "bias"
    layers = config.num_hidden_layers
    if kind.endswith("norm"):
        return _table(config.dtype, 1.0, 1 / 16)
    if kind == "bias":
        return _table(config.dtype, 0.0, 1 / 8)
    if kind == "embed_tokens":
        return _table(config.dtype, 0.0, _embedding_scale(config))
    if kind == "lm_head":
        return _table(config.dtype, 0.0, _inverse_root(16 * config.hidden_size))
    fan_in = names.model_params(replace(config, num_hidden_layers=1, layer_windows=()))[_first_layer_name(name)][1]
    depth = 2 * layers if kind in ("o_proj", "down_proj") else 1
    return _table(config.dtype, 0.0, _inverse_root(fan_in * depth))


def default_threads() -> int:
    """The cores this process may use, at most 8: more only contend for the interpreter (16 cores: 2.4 GB/s with 8, 2.3
    with 16 threads, to memory; 1.4 and 1.1 to disk; 2026-11-30)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, count)


def _stored_as(config: ModelConfig, dtype: str | None) -> ModelConfig:
    if dtype is None:
        return config
    if dtype not in PARAMETER_DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected one of {', '.join(PARAMETER_DTYPES)}")
    return replace(config, dtype=cast(Literal["float32", "bfloat16", "float16"], dtype))


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return DTYPES[{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[name]]


def _first_layer_name(name: str) -> str:
    return names.layer_prefix(0) + name.split(".", 3)[3]


def _embedding_scale(config: ModelConfig) -> float:
    return _inverse_root(4 * config.hidden_size) if config.tie_word_embeddings else 1.0


def _inverse_root(n: int) -> float:
    """1/sqrt(n), truncated to 30 bits after the point: exact integers, the same everywhere."""
    return math.isqrt(2**60 // n) / 2**30


@lru_cache(maxsize=64)
def _table(dtype: str, center: float, scale: float) -> np.ndarray:
    stored = (_normal_table() * scale + center).astype(np.float32).astype(_numpy_dtype(dtype))
    bits = stored.view(f"u{stored.itemsize}")
    bits.flags.writeable = False
    return bits


@lru_cache(maxsize=1)
def _normal_table() -> np.ndarray:
    """float64 [65536], mean 0, standard deviation near 1; every entry is an integer / 2^16, so exact."""
    words = Generator(0, "table", np.empty(0, np.uint16))
    sums = np.zeros(1 << 15, np.int64)
    for part in range(3):  # three words of four 16-bit uniforms an entry
        for at in range(0, 1 << 15, _BLOCK_VALUES // 4):
            count = min(_BLOCK_VALUES // 4, (1 << 15) - at)
            uniforms = words._words(part << 15 | at, count).view("<u2").reshape(count, 4)
            sums[at : at + count] += uniforms.sum(axis=1, dtype=np.int64)
    half = (2 * sums - 12 * 65535) / 2**17
    return np.concatenate([half, -half[::-1]])


def shard_plan(config: ModelConfig, max_shard_bytes: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """File name -> parameters, filled in forward order; a parameter larger than the limit has a shard of its own."""
    itemsize = _numpy_dtype(config.dtype).itemsize
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in names.model_params(config).items():
        size = math.prod(shape) * itemsize
        if groups[-1] and used + size > max_shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = shape
        used += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _write_shard(
    config: ModelConfig,
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    seed: int,
    threads: int,
    wrote: Callable[[int], None],
) -> None:
    dtype = _numpy_dtype(config.dtype)
    with SafetensorsWriter(path, {n: (dtype, s) for n, s in shapes.items()}, {"format": "pt"}) as writer:
        tasks = _tasks(shapes)
        guard = threading.Lock()
        stop = threading.Event()

        def work() -> None:
            scratch = Scratch()
            buffer = np.empty(_TASK_VALUES, f"u{dtype.itemsize}")
            while not stop.is_set():
                with guard:
                    task = next(tasks, None)
                if task is None:
                    return
                name, begin, count = task
                try:
                    Generator(seed, name, value_table(config, name), scratch).fill(buffer[:count], begin)
                    writer.write_at(name, begin * dtype.itemsize, buffer[:count].view(np.uint8))
                    wrote(count * dtype.itemsize)
                except BaseException:
                    stop.set()
                    raise

        with ThreadPoolExecutor(threads) as pool:
            try:
                for future in [pool.submit(work) for _ in range(threads)]:
                    future.result()
            finally:
                stop.set()  # at an interrupt here the workers would go on, and the pool waits for them


def _tasks(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    for name, shape in shapes.items():
        size = math.prod(shape)
        for begin in range(0, size, _TASK_VALUES):
            yield name, begin, min(_TASK_VALUES, size - begin)


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    result: dict[str, Any] = {"do_sample": False}
    if config.eos_token_ids:
        result["eos_token_id"] = list(config.eos_token_ids)
    for key in ("bos_token_id", "pad_token_id"):
        if getattr(config, key) is not None:
            result[key] = getattr(config, key)
    return result
