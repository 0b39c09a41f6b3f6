"""Softmax cross-entropy with the argmax: loss = lse - logits[label], lse = log sum_v exp(logits_v).

Backward: d loss / d logits_v = exp(logits_v - lse) - [v = label], times d_loss; 0 in rows that are not scored.
The argmax is the lowest id among the largest logits of the first `valid_vocab` ids (a padded vocabulary row must
never be generated); it has no gradient.

The sums run over slices of the vocabulary (`Rows.add`), so that a caller with a large vocabulary can make the logits
slice by slice and never hold [N,V]; `forward` is the case of one slice. log(softmax(x)) was rejected: it underflows.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.errors import InputError

IGNORE_INDEX = -100


def check_labels(labels: np.ndarray, vocab_size: int) -> None:
    """Raises InputError when a label is neither -100 nor in [0, vocab_size)."""
    bad = labels[((labels < 0) & (labels != IGNORE_INDEX)) | (labels >= vocab_size)]
    if bad.size:
        raise InputError(
            f"cross_entropy: got label {bad.flat[0]}, expected 0 <= label < {vocab_size} or {IGNORE_INDEX} (ignored)"
        )


class Rows:
    """Running sums of N rows over slices of the vocabulary, added in order of id."""

    def __init__(self, labels: np.ndarray, valid_vocab: int | None, dtype: np.dtype | type) -> None:
        """labels int [N]: -100 or an id."""
        num = labels.shape[0]
        self.labels = labels
        self.valid_vocab = valid_vocab
        self.max = np.full(num, -np.inf, dtype)
        self.sum = np.zeros(num, dtype)
        self.target = np.zeros(num, dtype)
        self.best = np.full(num, -np.inf, dtype)
        self.argmax = np.zeros(num, np.int64)

    def add(self, logits: np.ndarray, first: int) -> None:
        """logits [N,S] of ids first .. first+S-1."""
        with np.errstate(invalid="ignore"):  # inf - inf: the NaN is the answer
            new_max = np.maximum(self.max, logits.max(axis=1))
            shift = np.where(np.isneginf(new_max), 0, new_max)
            old = np.where(self.sum != 0, self.sum * np.exp(self.max - shift), 0)
            exps = logits - shift[:, None]
            self.sum = old + np.exp(exps, out=exps).sum(axis=1)
        self.max = new_max
        here = np.flatnonzero((self.labels >= first) & (self.labels < first + logits.shape[1]))
        self.target[here] = logits[here, self.labels[here] - first]
        valid = logits.shape[1] if self.valid_vocab is None else min(logits.shape[1], self.valid_vocab - first)
        if valid > 0:
            index = logits[:, :valid].argmax(axis=1)
            best = np.take_along_axis(logits, index[:, None], axis=1)[:, 0]
            better = (best > self.best) | (np.isnan(best) & ~np.isnan(self.best))
            self.argmax = np.where(better, index + first, self.argmax)
            self.best = np.where(better, best, self.best)

    def lse(self) -> np.ndarray:
        """[N] log-sum-exp of the slices added so far."""
        with np.errstate(divide="ignore"):
            return self.max + np.log(self.sum)

    def loss(self) -> np.ndarray:
        """[N] loss, exactly 0 in rows that are not scored."""
        return np.where(self.labels == IGNORE_INDEX, 0, self.lse() - self.target)


def slice_gradient(
    logits: np.ndarray, lse: np.ndarray, labels: np.ndarray, d_loss: np.ndarray, first: int
) -> np.ndarray:
    """logits [N,S] of ids from `first`, lse, labels and d_loss [N] -> d_logits [N,S] (a new array)."""
    scored = labels != IGNORE_INDEX
    with np.errstate(invalid="ignore"):
        d_logits = logits - lse[:, None]
        np.exp(d_logits, out=d_logits)
    here = np.flatnonzero(scored & (labels >= first) & (labels < first + logits.shape[1]))
    d_logits[here, labels[here] - first] -= 1
    d_logits *= d_loss[:, None]
    d_logits[~scored] = 0
    return d_logits


def forward(
    logits: np.ndarray, labels: np.ndarray, *, valid_vocab: int | None = None
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[Any, ...]]:
    """logits [N,V], labels int [N] -> ((loss [N], argmax int64 [N]), saved). Raises InputError on a label."""
    check_labels(labels, logits.shape[1])
    rows = Rows(labels, valid_vocab, logits.dtype)
    rows.add(logits, 0)
    return (rows.loss(), rows.argmax), (logits, labels, rows.lse())


def backward(saved: tuple[Any, ...], d_loss: np.ndarray, d_argmax: np.ndarray | None = None) -> tuple[np.ndarray, None]:
    """d_loss [N] -> (d_logits [N,V], None)."""
    logits, labels, lse = saved
    return slice_gradient(logits, lse, labels, d_loss, 0), None
