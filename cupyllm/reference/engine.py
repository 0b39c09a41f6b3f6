"""The Engine in NumPy: runs and differentiates any checkpoint on a CPU, one layer in memory at a time.

Weights stay where they lie, in their file, in their stored dtype. A layer is read and converted piece by piece
(stream/pieces.py) into one slot of the working dtype that every layer reuses, so anonymous memory grows by one layer in
float32 whatever the depth. A pass ends with a look at the files: one that changed meanwhile is an error and not a
number. `mode="resident"` converts each layer into memory of its own and keeps it:
the same numbers through the same code, hence the same bits, sooner on the second call.

The LM head goes through in slices of the vocabulary: no [N,V] array unless logits are asked for, and no float copy of
the whole head. Its gradient makes each slice of logits a second time, which costs one product more and saves N*V
floats. Backward keeps each layer's input and recomputes the layer (Chen et al. 2016), reading every layer twice.

float64 is for proofs: there logits, hidden states and gradients are float64 too, where the contract says float32.

Shapes: B batch, T tokens, N = B*T, C hidden, V vocabulary, L layers.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import numpy as np

from cupyllm.engine import ForwardResult, GradientSink, LayerCallback, LossResult, WeightSource
from cupyllm.errors import CheckpointError, InputError
from cupyllm.model.names import EMBED, FINAL_NORM, HEAD, layer_prefix
from cupyllm.reference import adamw, cross_entropy, embedding, grad_norm, linear, qwen3, rmsnorm, rope
from cupyllm.stream.pieces import PieceReader, gather_rows

Mode = Literal["stream", "resident"]
SLICE_ELEMENTS = 1 << 22  # of a head slice and of its logits: 16 MiB each in float32


class ReferenceEngine:
    """cupyllm.engine.Engine on NumPy. See the protocol for what arguments mean."""

    backend_name = "reference"

    def __init__(
        self,
        source: WeightSource,
        dtype: Literal["float32", "float64"] = "float32",
        valid_vocab: int | None = None,
    ) -> None:
        """`valid_vocab`: ids from there on are padding of the vocabulary and never the argmax. Raises InputError."""
        if dtype not in ("float32", "float64"):
            raise InputError(f"reference: got dtype {dtype}, expected float32 or float64; bfloat16 needs a GPU")
        self.config = source.config
        self.source = source
        self.dtype: str = dtype
        self.device_name = f"CPU ({platform.machine()}, NumPy {np.__version__})"
        self.valid_vocab = valid_vocab
        self._float = np.dtype(dtype)
        names = source.names()
        self._head_name = HEAD if HEAD in names else EMBED
        self._layer_names = [
            [name for name in names if name.startswith(layer_prefix(i))] for i in range(self.config.num_hidden_layers)
        ]
        for i, layer in enumerate(self._layer_names):
            if not layer:
                raise CheckpointError(f"reference: got no tensors for layer {i} of {self.config.num_hidden_layers}")
        self._slot = np.empty(0, self._float)
        self._resident: dict[int | str, dict[str, np.ndarray]] = {}
        self._reader = PieceReader(source)

    # ---- the contract

    def forward(
        self,
        ids: np.ndarray,
        *,
        labels: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        mode: Mode = "stream",
        want_logits: bool = False,
        want_hidden: Iterable[int] = (),
        on_layer: LayerCallback | None = None,
    ) -> ForwardResult:
        """One pass. A row that is padding throughout has the logits of its last position as last_logits."""
        started = self._start()
        self._check(ids, labels, segments, positions)
        wanted = set(want_hidden)
        num_layers = self.config.num_hidden_layers
        if not wanted <= set(range(num_layers + 2)):
            raise InputError(f"forward: got want_hidden {sorted(wanted)}, expected 0 to {num_layers + 1}")
        hidden: dict[int, np.ndarray] = {}

        def keep(index: int, x: np.ndarray) -> None:
            if index in wanted:
                hidden[index] = x.reshape(*ids.shape, -1).copy()

        x, rotation, _ = self._embed(ids, segments, positions)
        keep(0, x)
        for i in range(num_layers):
            x = self._layer(i, x, rotation, segments, ids.shape[0], mode)[0]  # what it saved is dropped at once
            keep(i + 1, x)
            if on_layer is not None:
                on_layer(i + 1, num_layers)
        x, _ = rmsnorm.forward(x, self.whole_tensor(FINAL_NORM, mode), eps=self.config.rms_norm_eps)
        keep(num_layers + 1, x)

        targets = self._targets(ids.shape, labels, segments)
        rows = cross_entropy.Rows(targets, self.valid_vocab, self._float)
        last = _last_rows(ids.shape, segments)
        last_logits = np.empty((ids.shape[0], self.config.vocab_size), self._float)
        logits = np.empty((x.shape[0], self.config.vocab_size), self._float) if want_logits else None
        for first, weight in self.head_slices(x, mode):
            part, _ = linear.forward(x, weight)
            rows.add(part, first)
            last_logits[:, first : first + part.shape[1]] = part[last]
            if logits is not None:
                logits[:, first : first + part.shape[1]] = part
        count = int((targets != cross_entropy.IGNORE_INDEX).sum())
        self.source.check_unchanged()
        return ForwardResult(
            argmax=rows.argmax.reshape(ids.shape),
            last_logits=last_logits,
            logits=None if logits is None else logits.reshape(*ids.shape, -1),
            loss=None if labels is None else _mean(rows.loss(), count),
            num_targets=count,
            hidden=hidden,
            seconds=time.perf_counter() - started,
            streamed_bytes=self._reader.read_bytes,
            transfer_seconds=self._reader.seconds,
        )

    def loss_and_grads(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        sink: GradientSink,
        *,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        on_layer: LayerCallback | None = None,
    ) -> LossResult:
        """Sink order: head, final norm, layers from last to first, embedding. `on_layer` counts to 2L: both passes."""
        self._start()
        self._check(ids, labels, segments, positions)
        targets = self._targets(ids.shape, labels, segments)
        count = int((targets != cross_entropy.IGNORE_INDEX).sum())
        if count == 0:
            # Exactly zero, whatever the activations hold: nothing is scored, so nothing is computed.
            for name in dict.fromkeys((self._head_name, FINAL_NORM, *chain(*self._layer_names), EMBED)):
                sink(name, np.zeros(self.source.spec(name)[1], self._float))
            return LossResult(loss=0.0, num_targets=0)

        num_layers, batch = self.config.num_hidden_layers, ids.shape[0]
        x, rotation, saved_embed = self._embed(ids, segments, positions)
        inputs = []
        for i in range(num_layers):
            inputs.append(x)
            x = self._layer(i, x, rotation, segments, batch, "stream")[0]
            if on_layer is not None:
                on_layer(i + 1, 2 * num_layers)
        normed, saved_norm = rmsnorm.forward(x, self.whole_tensor(FINAL_NORM, "stream"), eps=self.config.rms_norm_eps)
        loss, d_normed, d_head = self._head_backward(normed, targets, count)
        if self._head_name == HEAD:
            sink(HEAD, d_head)
            d_head = np.empty(0, self._float)  # handed over: a large vocabulary's gradient must not wait for the end
        d_x, d_norm = rmsnorm.backward(saved_norm, d_normed)
        sink(FINAL_NORM, d_norm)
        for i in reversed(range(num_layers)):
            _, saved = self._layer(i, inputs.pop(), rotation, segments, batch, "stream")
            d_x, grads = qwen3.layer_backward(saved, d_x)
            del saved
            for name, grad in grads.items():
                sink(layer_prefix(i) + name, grad)
            if on_layer is not None:
                on_layer(2 * num_layers - i, 2 * num_layers)
        _, d_embed = embedding.backward(saved_embed, d_x)
        if self._head_name == EMBED:
            d_embed += d_head
        self.source.check_unchanged()
        sink(EMBED, d_embed)
        return LossResult(loss=loss, num_targets=count, streamed_bytes=self._reader.read_bytes)

    def sum_of_squares(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
        """float64 sum of squares of each gradient; inf or nan when it holds any."""
        return {name: grad_norm.sum_of_squares(grad) for name, grad in gradients.items()}

    def adamw(self, param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray, **options: Any) -> None:
        """reference/adamw.py's update, in place; options: lr, beta1, beta2, eps, weight_decay, step, grad_scale."""
        adamw.update(param, grad, m, v, **options)

    def close(self) -> None:
        """Drop the slot and everything that is resident. The source stays the caller's."""
        self._slot = np.empty(0, self._float)
        self._resident.clear()

    # ---- weights

    def load_layer(self, index: int, mode: Mode) -> dict[str, np.ndarray]:
        """Parameters of a layer in the working dtype, under their names without "model.layers.N.".

        In "stream" mode they are views of the slot, valid until the next call. Raises CheckpointError when a file
        has changed since it was opened or is cut short.
        """
        if mode == "resident" and index in self._resident:
            return self._resident[index]
        self.source.check_unchanged()
        names = self._layer_names[index]
        sizes = [int(np.prod(self.source.spec(name)[1])) for name in names]
        if mode == "resident":
            buffer = np.empty(sum(sizes), self._float)
        else:
            if self._slot.size < sum(sizes):
                self._slot = np.empty(sum(sizes), self._float)
            buffer = self._slot
        params, start = {}, 0
        for name, size in zip(names, sizes, strict=True):
            shape = self.source.spec(name)[1]
            params[name.removeprefix(layer_prefix(index))] = self._reader.read(
                name, buffer[start : start + size].reshape(shape)
            )
            start += size
        if mode == "resident":
            self._resident[index] = params
        return params

    def whole_tensor(self, name: str, mode: Mode) -> np.ndarray:
        """One whole tensor in the working dtype; kept when resident."""
        if name in self._resident:
            return self._resident[name][name]
        tensor = self._reader.read(name, np.empty(self.source.spec(name)[1], self._float))
        if mode == "resident":
            self._resident[name] = {name: tensor}
        return tensor

    def head_slices(self, x: np.ndarray, mode: Mode) -> Iterator[tuple[int, np.ndarray]]:
        """(first id, [S,C] rows of the head in the working dtype), in order."""
        vocab, width = self.source.spec(self._head_name)[1]
        step = min(vocab, max(1, SLICE_ELEMENTS // max(x.shape[0], width)))
        whole = self.whole_tensor(self._head_name, mode) if mode == "resident" else None
        buffer = np.empty((0 if whole is not None else step, width), self._float)
        for first in range(0, vocab, step):
            if whole is not None:
                yield first, whole[first : first + step]
            else:
                rows = buffer[: min(step, vocab - first)]
                yield first, self._reader.read(self._head_name, rows, first * width)

    def embedding_rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the embedding [N,C] for ids [N], in the working dtype; each one that occurs is read once.

        Raises CheckpointError when a file has changed since it was opened or is cut short.
        """
        self.source.check_unchanged()
        unique, inverse = np.unique(ids, return_inverse=True)
        return gather_rows(self.source, EMBED, unique).astype(self._float)[inverse.reshape(-1)]

    # ---- pieces of a pass

    def _start(self) -> float:
        self._reader.read_bytes, self._reader.seconds = 0, 0.0
        return time.perf_counter()

    def _embed(
        self, ids: np.ndarray, segments: np.ndarray | None, positions: np.ndarray | None
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], tuple[Any, ...]]:
        """(x [N,C], (cos, sin), what embedding.backward needs)."""
        flat = ids.reshape(-1)
        saved = (flat, self.source.spec(EMBED)[1], self.config.pad_token_id)
        x = self.embedding_rows(flat)
        if positions is None:
            positions = qwen3.default_positions(segments, (ids.shape[0], ids.shape[1]))
        inv_freq, factor = rope.inverse_frequencies(self.config.rope, self.config.head_dim)
        return x, rope.table(positions.reshape(-1), inv_freq, factor, self._float), saved

    def _layer(
        self,
        index: int,
        x: np.ndarray,
        rotation: tuple[np.ndarray, np.ndarray],
        segments: np.ndarray | None,
        batch: int,
        mode: Mode,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        windows = self.config.layer_windows
        return qwen3.layer_forward(
            x,
            self.load_layer(index, mode),
            self.config,
            batch=batch,
            cos=rotation[0],
            sin=rotation[1],
            segments=segments,
            window=windows[index] if windows else None,
        )

    def _head_backward(
        self, normed: np.ndarray, targets: np.ndarray, count: int
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """normed [N,C], targets [N] -> (mean loss, d_normed [N,C], d_head [V,C])."""
        rows = cross_entropy.Rows(targets, None, self._float)
        for first, weight in self.head_slices(normed, "stream"):
            rows.add(linear.forward(normed, weight)[0], first)
        lse = rows.lse()
        d_loss = np.full(targets.shape, 1 / count, self._float)
        d_normed = np.zeros_like(normed)
        d_head = np.empty(self.source.spec(self._head_name)[1], self._float)
        for first, weight in self.head_slices(normed, "stream"):
            logits, saved = linear.forward(normed, weight)
            d_logits = cross_entropy.slice_gradient(logits, lse, targets, d_loss, first)
            d_rows, d_weight, _ = linear.backward(saved, d_logits)
            d_normed += d_rows
            d_head[first : first + weight.shape[0]] = d_weight
        return _mean(rows.loss(), count), d_normed, d_head

    def _targets(self, shape: tuple[int, ...], labels: np.ndarray | None, segments: np.ndarray | None) -> np.ndarray:
        if labels is None:
            return np.full(shape[0] * shape[1], cross_entropy.IGNORE_INDEX, np.int64)
        return qwen3.shifted_labels(labels, segments).reshape(-1)

    def _check(
        self,
        ids: np.ndarray,
        labels: np.ndarray | None,
        segments: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> None:
        """Raises InputError before any work."""
        if ids.ndim != 2 or not ids.size:
            raise InputError(f"forward: got ids of shape {ids.shape}, expected [rows, tokens] with at least one token")
        arrays = {"ids": ids, "labels": labels, "segments": segments, "positions": positions}
        for name, array in arrays.items():
            if array is None:
                continue
            if array.dtype.kind not in "iu" or array.shape != ids.shape:
                raise InputError(
                    f"forward: got {name} of {array.dtype} {array.shape}, expected integers of shape {ids.shape}"
                )
        vocab = self.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            bad = int(ids[(ids < 0) | (ids >= vocab)][0])
            raise InputError(f"forward: got token id {bad}, expected 0 <= id < {vocab}; check the tokenizer")
        if labels is not None:
            cross_entropy.check_labels(labels, vocab)


def _mean(loss: np.ndarray, count: int) -> float:
    return float(loss.sum(dtype=np.float64)) / count if count else 0.0


def _last_rows(shape: tuple[int, ...], segments: np.ndarray | None) -> np.ndarray:
    """Index into the N rows of each batch row's last token that is not padding."""
    batch, tokens = shape
    last = np.full(batch, tokens - 1)
    if segments is not None:
        valid = segments >= 0
        last = np.where(valid.any(axis=1), tokens - 1 - np.argmax(valid[:, ::-1], axis=1), last)
    return np.arange(batch) * tokens + last
