"""Random models held in memory, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.errors import CheckpointError
from cupyllm.model.names import model_params


class ArraySource:
    """A WeightSource over arrays. `arrays` may be changed between calls."""

    def __init__(self, config: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
        self.config = config
        self.arrays = arrays
        self.changed = False

    def names(self) -> list[str]:
        return list(self.arrays)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.arrays[name].dtype.name, self.arrays[name].shape

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        out[...] = np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8)[start : start + out.size]

    def check_unchanged(self) -> None:
        if self.changed:
            raise CheckpointError("the file has changed since it was opened")


def tiny_config(**changes: Any) -> ModelConfig:
    """Qwen3 with q width != hidden, two query heads to a KV head, sizes that are no powers of two."""
    sizes: dict[str, Any] = {
        "family": "qwen3",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "vocab_size": 37,
        "rope": RopeConfig(theta=10000.0),
        "dtype": "float32",
    }
    return ModelConfig(**{**sizes, **changes})


def random_arrays(config: ModelConfig, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Norms around 1, biases 0.3, matrices that keep the variance."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in model_params(config).items():
        noise = rng.standard_normal(shape)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        elif len(shape) == 1:
            noise *= 0.3
        elif "embed" not in name:
            noise *= 1.5 / np.sqrt(shape[1])
        arrays[name] = noise.astype(dtype)
    return arrays


def random_source(seed: int = 0, dtype: Any = np.float32, **changes: Any) -> ArraySource:
    config = tiny_config(**changes)
    return ArraySource(config, random_arrays(config, seed, dtype))
