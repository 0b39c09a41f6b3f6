"""Checkpoint helpers for tests: tiny models, Hub-cache trees, and the neutral names st_open, load, expect_raises.

Files are written here with struct and json, not with the writer under test, so that they can also be wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.names import model_params
from cupyllm.stream.safetensors import SafetensorsFile

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def st_open(path: str | os.PathLike[str]) -> SafetensorsFile:
    return SafetensorsFile(path)


def load(path: str | os.PathLike[str], num_layers: int | None = None) -> Checkpoint:
    return Checkpoint.open(path, num_layers)


def expect_raises(kind: type[BaseException], call: Callable[[], Any], contains: str = "") -> str:
    """The message, one line, of the error that `call` must raise."""
    try:
        result = call()
    except kind as error:
        message = str(error)
        assert contains in message, f"{contains!r} not in {message!r}"
        assert "\n" not in message
        return message
    raise AssertionError(f"{kind.__name__} was not raised, got {result!r}")


def n_buffers(checkpoint: Checkpoint, axis: str) -> int:
    """How many parameters have the vocabulary as an axis: 1 when tied."""
    assert axis == "vocab"
    return sum(checkpoint.config.vocab_size in checkpoint.spec(name)[1][:1] for name in checkpoint.names())


def tiny_config(**changes: Any) -> ModelConfig:
    """The cases' tiny Qwen3: 2 layers, hidden 64, 4 query and 2 KV heads of 16, FFN 96, vocabulary 320, float32."""
    values: dict[str, Any] = {
        "family": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rope": RopeConfig(theta=10000.0),
        "layer_windows": (None, None),
        "dtype": "float32",
    }
    return ModelConfig(**(values | changes))


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(config.dtype) if config.dtype != "bfloat16" else np.dtype("uint16")
    return {n: (rng.standard_normal(s) * 0.1).astype(dtype) for n, s in model_params(config).items()}


def raw_safetensors(header: Mapping[str, Any] | bytes, data: bytes, length: int | None = None) -> bytes:
    """A file's bytes; `header` as an object or as JSON bytes, `length` what the first 8 bytes claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor_file(tensors: Mapping[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    return raw_safetensors(header, data)


def write_model(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray] | None = None,
    config_json: Mapping[str, Any] | None = None,
) -> Path:
    """config.json and model.safetensors in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf() if config_json is None else config_json))
    (directory / "model.safetensors").write_bytes(tensor_file(tiny_tensors(config) if tensors is None else tensors))
    return directory


def write_sharded(
    directory: Path,
    config: ModelConfig,
    shard_names: tuple[str, str] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
) -> dict[str, str]:
    """Two shards and an index; returns the weight_map, which `write_index` can put down again changed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    tensors = list(tiny_tensors(config).items())
    half = len(tensors) // 2
    weight_map: dict[str, str] = {}
    for shard, part in zip(shard_names, (tensors[:half], tensors[half:]), strict=True):
        (directory / shard).write_bytes(tensor_file(dict(part)))
        weight_map.update({name: shard for name, _ in part})
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def mk_cache(root: Path, source: Path, repo: str = "x/y", revision: str = "abc") -> Path:
    """A Hub cache under `root` whose snapshot links into blobs named by SHA-256; returns the snapshot."""
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    blobs = folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for file in source.iterdir():
        data = file.read_bytes()
        blob = hashlib.sha256(data).hexdigest()
        (blobs / blob).write_bytes(data)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
    return snapshot


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in model_params(config).values())
