"""A batch, checked on the host before anything is allocated.

Labels arrive unshifted (logits at t are scored against labels at t+1) and leave as one target per row, so that the
loss kernel needs no knowledge of batches, padding or packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.config import ModelConfig
from cupyllm.engine import IGNORE_INDEX
from cupyllm.errors import InputError


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, N = B*T flat rows."""

    batch: int
    tokens: int
    unique: np.ndarray  # int64 [U], sorted ids that occur
    inverse: np.ndarray  # int32 [N], index into `unique`
    positions: np.ndarray  # int32 [N]
    segments: np.ndarray | None  # int32 [B,T], None when every row is one segment
    targets: np.ndarray  # int32 [N], IGNORE_INDEX where nothing is scored
    last_rows: np.ndarray  # int64 [B], flat row of each row's last non-padded token
    num_targets: int
    scored: bool  # labels were given


def prepare(
    config: ModelConfig,
    ids: np.ndarray,
    labels: np.ndarray | None = None,
    segments: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> Batch:
    """Check and flatten a batch (see Engine in cupyllm/engine.py for the meaning of each array).

    Raises InputError naming the array, the position and the value.
    """
    ids = np.asarray(ids)
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise InputError(f"ids: got {ids.dtype} of shape {ids.shape}, expected integers [batch, tokens], not empty")
    _check_range("ids", ids, config.vocab_size)
    batch, tokens = ids.shape
    for name, array in (("labels", labels), ("segments", segments), ("positions", positions)):
        if array is not None and (np.shape(array) != ids.shape or np.asarray(array).dtype.kind not in "iu"):
            raise InputError(
                f"{name}: got {np.asarray(array).dtype} of shape {np.shape(array)}, expected integers {ids.shape}"
            )
    for name, array in (("segments", segments), ("positions", positions)):
        if array is not None:
            _check_int32(name, np.asarray(array))
    unique, inverse = np.unique(ids.reshape(-1), return_inverse=True)
    part = np.zeros(ids.shape, np.int32) if segments is None else np.asarray(segments, np.int32)
    where = _positions(part) if positions is None else np.asarray(positions, np.int32)
    if where.min() < 0:
        raise InputError(f"positions: got {where.min()}, expected >= 0")
    targets = np.full(ids.shape, IGNORE_INDEX, np.int32)
    if labels is not None:
        labels = np.asarray(labels)
        _check_range("labels", labels, config.vocab_size, ignore=True)
        pairs = (part[:, :-1] == part[:, 1:]) & (part[:, 1:] >= 0)
        targets[:, :-1] = np.where(pairs, labels[:, 1:], IGNORE_INDEX)
    real = part >= 0
    last = np.where(real.any(axis=1), tokens - 1 - real[:, ::-1].argmax(axis=1), tokens - 1)
    return Batch(
        batch=batch,
        tokens=tokens,
        unique=unique.astype(np.int64),
        inverse=np.ascontiguousarray(inverse.reshape(-1).astype(np.int32)),
        positions=np.ascontiguousarray(where.reshape(-1), np.int32),
        segments=None if segments is None else np.ascontiguousarray(part),
        targets=np.ascontiguousarray(targets.reshape(-1)),
        last_rows=np.arange(batch) * tokens + last,
        num_targets=int((targets != IGNORE_INDEX).sum()),
        scored=labels is not None,
    )


def _positions(segments: np.ndarray) -> np.ndarray:
    """0, 1, 2, … within each run of equal segment ids; 0 in padding."""
    batch, tokens = segments.shape
    index = np.broadcast_to(np.arange(tokens), (batch, tokens))
    starts = np.ones((batch, tokens), bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return np.where(segments >= 0, index - first, 0).astype(np.int32)


def _check_int32(name: str, array: np.ndarray) -> None:
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        bad = int(array.max()) if array.max() > limits.max else int(array.min())
        raise InputError(f"{name}: got {bad}, expected numbers that fit in 32 bits")


def _check_range(name: str, array: np.ndarray, vocab: int, ignore: bool = False) -> None:
    bad = (array < 0) | (array >= vocab)
    if ignore:
        bad &= array != IGNORE_INDEX
    if bad.any():
        at = np.unravel_index(int(np.flatnonzero(bad)[0]), array.shape)
        extra = f" or {IGNORE_INDEX} (ignored)" if ignore else ""
        where = ", ".join(str(int(i)) for i in at)
        raise InputError(
            f"{name}: got {int(array[at])} at [{where}], expected 0 <= id < {vocab}{extra}; "
            "use ids made with this checkpoint's tokenizer"
        )
