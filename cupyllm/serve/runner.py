"""What a step of generation is, whichever backend runs it.

A step takes rows of several sequences, concatenated: one row for a sequence that decodes, a chunk of its prompt for one
that is prefilled. Keys and values of the rows are written to the slots given, then every row attends to its sequence's
pages. The loop (serve/engine.py) knows nothing of weights, a runner nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cupyllm.config import ModelConfig
from cupyllm.kvcache.blocks import Copy


@dataclass(frozen=True)
class StepBatch:
    """N rows of S sequences, pages of P tokens."""

    ids: np.ndarray  # int64 [N]
    positions: np.ndarray  # int32 [N]
    slots: np.ndarray  # int32 [N], page * P + offset of each row's key and value
    q_starts: np.ndarray  # int32 [S+1], sequence s has rows q_starts[s] to q_starts[s+1]
    kv_lengths: np.ndarray  # int32 [S], tokens in the cache once the rows are written
    block_table: np.ndarray  # int32 [S,max_pages], -1 where a sequence has no page
    logits_rows: np.ndarray  # int64 [R], rows whose logits are wanted
    copies: list[Copy] = field(default_factory=list)  # pages to copy before anything is written, in order


class Runner(Protocol):
    """Owns the weights' way to the processor and the pages' memory."""

    config: ModelConfig
    page_tokens: int
    num_pages: int
    max_rows: int  # N of a step
    max_sequences: int  # S of a step
    max_pages: int  # pages of one sequence: the block table's width
    backend_name: str
    device_name: str

    @property
    def dtype(self) -> str: ...

    @property
    def mode(self) -> str:
        """The word "stream" or "resident"."""
        ...

    def step(self, batch: StepBatch) -> np.ndarray:
        """Logits float32 [R,V]."""
        ...

    def close(self) -> None: ...


def all_windows(config: ModelConfig) -> int | None:
    """The widest window when every layer has one (pages behind it are never read again), else None."""
    windows = config.layer_windows
    if not windows or any(window is None for window in windows):
        return None
    return max(window for window in windows if window is not None)
