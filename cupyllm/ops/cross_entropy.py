"""Softmax cross-entropy with the argmax in one launch: cu/cross_entropy.cu, reference/cross_entropy.py in NumPy.

    loss = lse - logits[label], lse = log sum_v exp(logits_v)
    d_logits_v = (exp(logits_v - lse) - [v = label]) d_loss

One CTA a row carries maximum, sum, best id and best logit through a single pass (Milakov and Gimelshein 2018), so that
logits are read once. Two passes, maximum first, were rejected: V = 151936 does not stay in a cache.
Label -100 is not scored: its loss is 0 and its gradient exactly 0. The argmax is the lowest id among the largest of the
first `valid_vocab` logits; padded ids beyond stay in the softmax, as in the model's training, but never win.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256
IGNORE_INDEX = -100


class CrossEntropy(Op):
    """Inputs logits [N,V], labels int32 [N]. Attr: valid_vocab (None: V). Outputs: loss float32 [N], argmax int32 [N].

    Saved: logits, labels, lse float32 [N]. Labels are the caller's to check on the host: `check_labels`.
    """

    name = "cross_entropy"
    variants = (Variant("plain", "cross_entropy.cu", note="one CTA a row, one pass"),)
    differentiable = (True, False)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Specs of loss and argmax. Raises InputError."""
        assert len(inputs) == 2 and not params, (len(inputs), len(params))
        logits, labels = inputs
        assert logits is not None and labels is not None
        check(len(logits.shape) == 2, "cross_entropy", "logits' shape", logits.shape, "[N, V]")
        check(
            logits.dtype in ACTIVATION_DTYPES,
            "cross_entropy",
            "logits' dtype",
            logits.dtype,
            " or ".join(ACTIVATION_DTYPES),
        )
        num_rows, vocab = logits.shape
        check(0 < vocab < 2**31 - 1, "cross_entropy", "the vocabulary", vocab, "at least 1 and below 2^31 - 1")
        check(labels.shape == (num_rows,), "cross_entropy", "labels' shape", labels.shape, (num_rows,))
        check(labels.dtype == "int32", "cross_entropy", "labels' dtype", labels.dtype, "int32")
        valid = attrs.get("valid_vocab")
        check(valid is None or 0 < valid <= vocab, "cross_entropy", "valid_vocab", valid, f"1 to {vocab}, or None")
        return [Spec((num_rows,), "float32"), Spec((num_rows,), "int32")]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """loss and argmax are written (=)."""
        self.infer(inputs, params, attrs)
        self.select(rec, inputs, params, attrs)
        logits, labels = inputs
        loss, argmax = outputs
        assert logits is not None
        num_rows, vocab = logits.shape
        valid = attrs.get("valid_vocab")
        lse = rec.empty((num_rows,), "float32", "lse")
        rec.launch(
            kernel("cross_entropy.cu", "cross_entropy_forward", dtypes={"X_T": logits.dtype}),
            num_rows,
            THREADS,
            *(logits, labels, loss, argmax, lse, vocab, vocab if valid is None else int(valid)),
        )
        return logits, labels, lse

    def backward(
        self,
        rec: Recorder,
        saved: tuple[Tensor | None, ...],
        d_outputs: Sequence[Tensor | None],
        d_inputs: Sequence[Tensor | None],
        d_params: Sequence[Tensor | None],
        attrs: Attrs,
        accumulate: bool,
    ) -> None:
        """d_logits is written (=), in the logits' dtype. It may BE the saved logits: nothing else is then allocated."""
        logits, labels, lse = saved
        d_loss, d_logits = d_outputs[0], d_inputs[0]
        if d_logits is None:
            return
        assert logits is not None and d_loss is not None and d_loss.dtype == "float32"
        assert d_logits.shape == logits.shape and d_logits.dtype == logits.dtype
        rec.launch(
            kernel("cross_entropy.cu", "cross_entropy_backward", dtypes={"X_T": logits.dtype}),
            logits.shape[0],
            THREADS,
            *(logits, labels, lse, d_loss, d_logits, logits.shape[1]),
        )

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """Logits are read once in the forward; read and written in the backward."""
        logits = inputs[0]
        assert logits is not None
        row_bytes = logits.shape[0] * 16
        return Cost(3.0 * logits.size, logits.nbytes + row_bytes), Cost(
            4.0 * logits.size, 2 * logits.nbytes + row_bytes
        )

    def cases(self) -> list[Case]:
        """One, odd, around the 256 threads and the 2048 logits of one pass of a CTA; Qwen3's vocabulary."""

        def case(name: str, rows: int, vocab: int, size: str = "small", **attrs: object) -> Case:
            return Case(name, ((rows, vocab), (rows,)), (), dict(attrs), ("normal", f"labels:{vocab}"), size)

        return [
            case("one", 1, 1),
            case("odd", 3, 7),
            case("threads-1", 2, 255),
            case("threads", 2, 256),
            case("threads+1", 2, 257, valid_vocab=200),
            case("tile-1", 1, 2047),
            case("tile", 1, 2048),
            case("tile+1", 2, 2049, valid_vocab=2048),
            case("Qwen3, 2048 tokens", 2048, 151936, "model", valid_vocab=151669),
        ]


OP = CrossEntropy()


def check_labels(labels: np.ndarray, vocab: int) -> None:
    """Raise InputError naming the first position whose label is neither -100 nor in [0, vocab). Host arrays."""
    bad = np.argwhere(((labels < 0) & (labels != IGNORE_INDEX)) | (labels >= vocab))
    if len(bad):
        position = tuple(int(i) for i in bad[0])
        where = position[0] if len(position) == 1 else position
        raise InputError(
            f"cross_entropy: label at position {where} is {labels[position]}, expected 0 to {vocab - 1}, or "
            f"{IGNORE_INDEX} for a token that is not scored"
        )
