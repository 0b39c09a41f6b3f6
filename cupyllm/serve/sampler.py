"""Choosing the next token, in NumPy.

Order, as in transformers: repetition penalty, temperature, top-k, top-p, min-p, one draw. Ids past the tokenizer's
vocabulary are masked before anything is chosen, and kept in the logprobs, which are those of the model's own softmax.
Equal logits rank by id, so a tie never depends on the seed.

The draw is counter-based: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of (seed,
number of the token). No state is carried, so a sequence that was preempted and recomputed draws the same numbers, and
so does a device. A stateful generator was rejected for both reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cupyllm.errors import CupyllmError, InputError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class SamplingError(CupyllmError):
    """Logits from which nothing can be chosen; ends one sequence, not the others."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose. temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 and repetition_penalty 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = 0  # how many alternatives to report beside the chosen token; 0 reports none

    def __post_init__(self) -> None:
        """Raises InputError naming the option, what it got and what it takes."""
        for name, ok, expected in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number >= 0 (0 is greedy)"),
            ("top-k", self.top_k >= 0, "an integer >= 0 (0 is off)"),
            ("top-p", 0 <= self.top_p <= 1, "a number from 0 to 1 (1 is off)"),
            ("min-p", 0 <= self.min_p <= 1, "a number from 0 to 1 (0 is off)"),
            ("repetition-penalty", math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("seed", 0 <= self.seed < 2**64, "an integer from 0 to 2^64 - 1"),
            ("logprobs", self.logprobs >= 0, "an integer >= 0"),
        ):
            if not ok:
                value = getattr(self, name.replace("-", "_"))
                raise InputError(f"{name}: got {value}, expected {expected}")


@dataclass(frozen=True)
class Choice:
    """A token, its logprob under the model's softmax, and the likeliest alternatives when asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    number: int,
    history: np.ndarray | None = None,
    valid_vocab: int | None = None,
) -> Choice:
    """The next token from logits [V] (float32). `number` counts the sequence's sampled tokens from 0.

    `history` (ids so far, prompt included) is what the repetition penalty looks at. Raises SamplingError on NaN or
    +inf, or when no id is left.
    """
    raw = logits.astype(np.float64)
    bad = np.isnan(raw) | (raw == np.inf)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        what = "NaN" if np.isnan(raw[at]) else "inf"
        raise SamplingError(f"logits: got {what} at id {at}, expected numbers (-inf never chooses an id)")
    scores = raw.copy()
    if params.repetition_penalty != 1.0 and history is not None and len(history):
        seen = np.unique(history)
        value = scores[seen]
        scores[seen] = np.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if valid_vocab is not None:
        scores[valid_vocab:] = -np.inf
    if scores.max() == -np.inf:
        raise SamplingError("logits: every id is masked or -inf, expected at least one that can be chosen")
    token = _draw(scores, params, number)
    if not params.logprobs:
        return Choice(token, float(raw[token] - log_sum_exp(raw)))
    logprobs = raw - log_sum_exp(raw)
    best = np.argsort(-raw, kind="stable")[: params.logprobs]
    return Choice(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def log_sum_exp(logits: np.ndarray) -> float:
    """log of the sum of exp of float64 logits [V], of which at least one is finite and none +inf."""
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - top).sum()))


def _draw(scores: np.ndarray, params: SamplingParams, number: int) -> int:
    if params.temperature == 0 or params.top_k == 1 or params.top_p == 0:
        return int(scores.argmax())  # the first, so the lowest id
    top = scores.max()
    order = np.argsort(-scores, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    with np.errstate(over="ignore"):
        weights = np.exp((scores[order] - top) / params.temperature)
    probabilities = weights / weights.sum()
    if params.top_p < 1:
        # The smallest set whose probability reaches top_p: keep an id when what precedes it falls short.
        keep = np.cumsum(probabilities) - probabilities < params.top_p
        order, probabilities = order[keep], probabilities[keep]
    if params.min_p > 0:
        keep = probabilities >= params.min_p * probabilities[0]
        order, probabilities = order[keep], probabilities[keep]
    cumulative = np.cumsum(probabilities)
    at = np.searchsorted(cumulative, uniform(params.seed, number) * cumulative[-1], side="right")
    return int(order[min(at, len(order) - 1)])


def uniform(seed: int, number: int) -> float:
    """Draw `number` of stream `seed`: a multiple of 2^-53 in [0, 1), from two Philox words."""
    words = philox((number & _MASK, number >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (p1 >> 32) ^ b ^ k0, p1 & _MASK, (p0 >> 32) ^ d ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return a, b, c, d
