"""The whole-model driver on a device: streamed or resident, forward and backward.

Forward. Embedding rows are gathered on the host (only the rows that occur travel), the residual stream alternates
between two device buffers, each layer's program reads one and writes the other, weights arrive through LayerStream.
The LM head runs over row chunks: logits of a chunk, then loss and argmax in one launch, so [N,V] logits never exist
unless they are asked for.

Backward. Forward keeps each layer's input on the device. Layers stream in reverse; a layer's program recomputes its
forward and runs its backward; its parameter gradients (float32) leave before the next layer's program writes them.

Programs are recorded once per shape and weight address (see backend/record.py) and reused by every layer of one layout;
resident mode records one a layer with the same kernels in the same order, so both modes give the same bits.

Where trained weights live: on the host, as the trainer's arrays (train/state.py), which are this engine's WeightSource.
The device holds two slots, never the model; a step is one forward pass, one backward pass, then an update pass over the
host arrays (`adamw`). Keeping master weights on the device was rejected: it caps the model at the GPU's memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cupyllm import graph
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, align
from cupyllm.backend.space import Space
from cupyllm.config import ModelConfig
from cupyllm.engine import IGNORE_INDEX, ForwardResult, GradientSink, LayerCallback, LossResult, WeightSource
from cupyllm.graph import Node
from cupyllm.model.batch import Batch, prepare
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.names import EMBED, FINAL_NORM, HEAD, head_name, layer_params, layer_prefix
from cupyllm.model.updates import Updates
from cupyllm.ops import adamw as adamw_op
from cupyllm.ops import rope as rope_op
from cupyllm.stream.pieces import gather_rows
from cupyllm.stream.prefetch import LayerStream, Layout, Slot, layout, upload_group

LOGITS_BYTES = 256 << 20  # device bytes of one row chunk of float32 logits
CHUNK_ROWS = 64  # chunks start at multiples of it, which keeps every per-row array aligned


@dataclass
class _Program:
    """A loaded program of one layer, and where its parameter gradients are (backward only)."""

    program: Any
    d_params: dict[str, Tensor]


class _Pass:
    """Device buffers and programs of one batch shape."""

    def __init__(self, engine: DeviceEngine, batch: int, tokens: int, segments: bool, training: bool) -> None:
        self.engine, self.batch, self.tokens, self.segments, self.training = engine, batch, tokens, segments, training
        self.rows = batch * tokens
        self.backend = engine.backend
        self.space = Space(engine.backend)
        self.grads: Buffer | None = None
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        engine, config = self.engine, self.engine.config
        batch, tokens, segments, training = self.batch, self.tokens, self.segments, self.training
        half = config.head_dim // 2
        wide = (self.rows, config.hidden_size)
        self.x = [self.space.tensor(wide, engine.dtype, f"residual {k}") for k in range(2)]
        self.dx = [self.space.tensor(wide, engine.dtype, f"d_residual {k}") for k in range(2 if training else 0)]
        self.kept = [
            self.space.tensor(wide, engine.dtype, f"input {i}")
            for i in range(config.num_hidden_layers if training else 0)
        ]
        self.cos = self.space.tensor((self.rows, half), "float32", "cos")
        self.sin = self.space.tensor((self.rows, half), "float32", "sin")
        self.positions = self.space.tensor((self.rows,), "int32", "positions")
        self.frequencies = self.space.tensor((half,), "float32", "inverse frequencies")
        self.segment_ids = self.space.tensor((batch, tokens), "int32", "segments") if segments else None
        self.labels = self.space.tensor((self.rows,), "int32", "labels")
        self.losses = self.space.tensor((self.rows,), "float32", "losses")
        self.d_losses = self.space.tensor((self.rows,), "float32", "d_losses")
        self.argmax = self.space.tensor((self.rows,), "int32", "argmax")
        self.chunk = min(self.rows, max(CHUNK_ROWS, LOGITS_BYTES // (4 * config.vocab_size) // CHUNK_ROWS * CHUNK_ROWS))
        self.logits = self.space.tensor((self.chunk, config.vocab_size), "float32", "logits")

    def gradient_space(self, nbytes: int) -> int:
        """Device address of at least `nbytes` for one group's float32 gradients."""
        if self.grads is None or self.grads.nbytes < nbytes:
            if self.grads is not None:
                self.backend.synchronize()
                self.space.programs.clear()  # they write to the old one
                grads, self.grads = self.grads, None
                grads.free()
            self.grads = self.backend.allocate(nbytes, "gradients")
        return self.grads.address

    def close(self) -> None:
        self.space.close()
        if self.grads is not None:
            self.grads.free()
        self.grads = None


class DeviceEngine:
    """Engine (cupyllm/engine.py) on a Backend. One instance serves one weight source."""

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        dtype: str = "float32",
        *,
        forced: dict[str, str] | None = None,
        batch_invariant: bool = False,
        valid_vocab: int | None = None,
    ) -> None:
        assert dtype in ("float32", "bfloat16"), dtype
        self.source, self.backend, self.dtype = source, backend, dtype
        self.config: ModelConfig = source.config
        self.forced, self.batch_invariant = forced or {}, batch_invariant
        self.valid_vocab = valid_vocab or self.config.vocab_size
        self.backend_name, self.device_name = backend.name, backend.device_name
        self.chosen: dict[str, str] = {}  # node -> variant, of everything recorded so far
        self.compute = backend.stream()
        self.stream = LayerStream(backend, source, self.compute)
        self.groups = [
            {key: layer_prefix(i) + key for key in layer_params(self.config)}
            for i in range(self.config.num_hidden_layers)
        ]
        self.layouts = [layout(source, group) for group in self.groups]
        self.head_group = {FINAL_NORM: FINAL_NORM, HEAD: head_name(self.config)}
        self.head_layout = layout(source, self.head_group)
        self._pass: _Pass | None = None
        self._head: Buffer | None = None
        self._resident: list[Buffer] | None = None
        self._updater: Updates | None = None

    # -- the contract -------------------------------------------------------------------------------------------

    def forward(
        self,
        ids: np.ndarray,
        *,
        labels: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        mode: Literal["stream", "resident"] = "stream",
        want_logits: bool = False,
        want_hidden: Iterable[int] = (),
        on_layer: LayerCallback | None = None,
    ) -> ForwardResult:
        batch = prepare(self.config, ids, labels, segments, positions)
        began = time.perf_counter()
        if mode == "stream":
            self._drop_head()
        state = self._begin(batch, training=False)
        hidden: dict[int, np.ndarray] = {}
        wanted, count = set(want_hidden), self.config.num_hidden_layers
        if 0 in wanted:
            hidden[0] = self._download_rows(state.x[0], batch)
        for index, parity, lay, address in self.walk_layers(mode):
            program = self._layer_program(state, index, parity, lay, address)
            self.backend.run(program.program, self.compute)
            if index + 1 in wanted and index + 1 <= count:
                hidden[index + 1] = self._download_rows(state.x[1 - parity], batch)
            if on_layer is not None:
                on_layer(index + 1, count)
        last = state.x[count % 2]
        self.load_head()
        result = self._head_forward(state, last, batch, want_logits, count + 1 in wanted)
        if count + 1 in wanted:
            hidden[count + 1] = result.pop("normed")
        if mode == "stream":
            self._drop_head()
        self.source.check_unchanged()
        streamed, transfer = self.stream.take_accounts()
        return ForwardResult(
            argmax=result["argmax"],
            last_logits=result["last_logits"],
            logits=result.get("logits"),
            loss=result.get("loss"),
            num_targets=batch.num_targets,
            hidden=hidden,
            seconds=time.perf_counter() - began,
            streamed_bytes=streamed,
            transfer_seconds=transfer,
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
        batch = prepare(self.config, ids, labels, segments, positions)
        count = self.config.num_hidden_layers
        if batch.num_targets == 0:  # exactly zero, whatever the activations hold
            for name in self.source.names():
                sink(name, np.zeros(self.source.spec(name)[1], np.float32))
            return LossResult(0.0, 0, 0)
        self._drop_head()
        state = self._begin(batch, training=True)
        row_bytes = Spec((state.rows, self.config.hidden_size), self.dtype).nbytes
        for index, parity, lay, address in self.walk_layers("stream"):
            self.backend.copy(state.kept[index].address, state.x[parity].address, row_bytes, self.compute)
            self.backend.run(self._layer_program(state, index, parity, lay, address).program, self.compute)
            if on_layer is not None:
                on_layer(index + 1, 2 * count)
        self.load_head()
        loss, embedding_grad = self._head_backward(state, batch, sink)
        self._drop_head()
        order = list(range(count - 1, -1, -1))
        for step, parity, lay, address in self.walk_layers("stream", order):
            index = order[step]
            program = self._layer_program(state, index, parity, lay, address, backward=True)
            self.backend.copy(state.x[0].address, state.kept[index].address, row_bytes, self.compute)
            self.backend.run(program.program, self.compute)
            self._deliver(program.d_params, self.groups[index], sink)
            if on_layer is not None:
                on_layer(count + step + 1, 2 * count)
        self.source.check_unchanged()
        self._embedding_backward(state, batch, state.dx[count % 2], embedding_grad, sink)
        streamed, _ = self.stream.take_accounts()
        return LossResult(loss, batch.num_targets, streamed)

    def sum_of_squares(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {name: self._updates().sum_of_squares(gradient) for name, gradient in gradients.items()}

    def adamw(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        scalars = adamw_op.pack_scalars(
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale
        )
        self._updates().adamw(scalars, param, grad, m, v)

    def _updates(self) -> Updates:
        if self._updater is None:
            largest = max(math.prod(self.source.spec(name)[1]) for name in self.source.names())
            self._updater = Updates(self.backend, largest, self.forced)
        return self._updater

    def recorder(self) -> Recorder:
        """For launches of this engine."""
        return Recorder.of(self.backend, self.forced, self.batch_invariant)

    def close(self) -> None:
        """Free every device and pinned byte."""
        self.backend.synchronize()  # after an error in the middle of a pass its launches are still queued
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        self.stream.close()
        self._drop_head()
        if self._updater is not None:
            self._updater.close()
            self._updater = None
        for buffer in self._resident or []:
            buffer.free()
        self._resident = None

    def __enter__(self) -> DeviceEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- layers -------------------------------------------------------------------------------------------------

    def walk_layers(self, mode: str, order: Sequence[int] | None = None) -> Iterable[tuple[int, int, Layout, int]]:
        """(step, parity, layout, weight address) of every layer, in `order`."""
        assert mode in ("stream", "resident"), mode
        order = range(len(self.groups)) if order is None else order
        layouts = [self.layouts[i] for i in order]
        if mode == "stream":
            if self.stream.reserve(max(lay.nbytes for lay in layouts)) and self._pass is not None:
                self._pass.space.programs.clear()
            slot: Slot
            for slot in self.stream.iterate([self.groups[i] for i in order], layouts):
                yield slot.index, slot.parity, slot.layout, slot.address
            return
        if self._resident is None:
            buffers: list[Buffer] = []
            try:
                for group, lay in zip(self.groups, self.layouts, strict=True):
                    buffers.append(self.backend.allocate(lay.nbytes, "resident layer"))
                    upload_group(self.backend, self.source, group, lay, buffers[-1].address)
                    self.stream.streamed_bytes += lay.stored_bytes
            except BaseException:
                for buffer in buffers:
                    buffer.free()
                raise
            self._resident = buffers
        for step, index in enumerate(order):
            yield step, step % 2, self.layouts[index], self._resident[index].address

    def _layer_program(
        self, state: _Pass, index: int, parity: int, lay: Layout, address: int, backward: bool = False
    ) -> _Program:
        """The program of layer `index` with weights at `address`; shared by all layers that look the same."""
        window = self.config.layer_windows[index] if self.config.layer_windows else None
        # In backward the layer's input sits in x[0]; the two gradient buffers alternate by step, which is the parity.
        key = ("layer", backward, lay, window, address, parity)
        if key in state.space.programs:
            return state.space.programs[key]
        nodes = layer_nodes(self.config, index, state.batch, state.tokens, state.segments)
        params = lay.tensors(address)
        rec = self.recorder()
        source = state.x[0] if backward else state.x[parity]
        values = {"x": source, "cos": state.cos, "sin": state.sin}
        if state.segment_ids is not None:
            values["segments"] = state.segment_ids
        d_params: dict[str, Tensor] = {}
        if backward:
            known, saved = graph.forward(rec, nodes, values, params)
            d_params = self._gradient_tensors(state, {k: s.shape for k, s in lay.specs})
            # The head leaves d_y in dx[0]; step s reads dx[s % 2].
            d_y, d_x = state.dx[parity], state.dx[1 - parity]
            graph.backward(rec, nodes, known, saved, {"y": d_y}, d_params, ["x"], {"x": d_x})
        else:
            graph.forward(rec, nodes, values, params, {"y": state.x[1 - parity]})
        program = _Program(self._load(state, rec), d_params)
        state.space.programs[key] = program
        return program

    def _load(self, state: _Pass, rec: Recorder) -> Any:
        self.chosen.update(rec.chosen)
        return state.space.load(rec)

    def _gradient_tensors(self, state: _Pass, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        specs = {name: Spec(shape, "float32") for name, shape in shapes.items()}
        at, tensors = state.gradient_space(sum(align(spec.nbytes) for spec in specs.values())), {}
        for name, spec in specs.items():
            tensors[name] = fixed(at, spec.shape, "float32", f"d_{name}")
            at += align(spec.nbytes)
        return tensors

    def _deliver(self, d_params: Mapping[str, Tensor], names: Mapping[str, str], sink: GradientSink) -> None:
        """Hand one group's gradients to the sink; the device buffer may be overwritten afterwards."""
        self.backend.synchronize()
        for key, tensor in d_params.items():
            host = np.empty(tensor.shape, np.float32)
            self.backend.download(host, tensor.address)
            sink(names[key], host)

    # -- embedding and batch ------------------------------------------------------------------------------------

    def _begin(self, batch: Batch, training: bool) -> _Pass:
        """Buffers of this shape, inputs uploaded, residual stream in x[0]."""
        self.backend.synchronize()  # a pass that failed has left launches behind, which write the residual stream
        self.stream.take_accounts()
        segments = batch.segments is not None
        state = self._pass
        wanted = (batch.batch, batch.tokens, segments)
        if state is None or (state.batch, state.tokens, state.segments) != wanted or (training and not state.training):
            self._pass = None
            if state is not None:
                state.close()
            state = self._pass = _Pass(self, batch.batch, batch.tokens, segments, training)
        self.backend.upload(state.positions.address, batch.positions)
        self.backend.upload(state.labels.address, batch.targets)
        if state.segment_ids is not None and batch.segments is not None:
            self.backend.upload(state.segment_ids.address, batch.segments)
        frequencies, factor = rope_op.inverse_frequencies(self.config.rope, self.config.head_dim)
        self.backend.upload(state.frequencies.address, frequencies)
        # Only the embedding rows that occur travel, in their stored dtype: [U,C].
        rows = self.embedding_rows(batch.unique)
        with Space(self.backend) as scratch:
            table = scratch.put(rows)
            index = scratch.put(batch.inverse)
            rec = self.recorder()
            rope_op.rope_table(rec, state.positions, state.frequencies, factor, state.cos, state.sin)
            node = Node("embed_tokens", "embedding", ("ids",), ("x",), ("table",), {"dtype": self.dtype})
            graph.forward(rec, [node], {"ids": index}, {"table": table}, {"x": state.x[0]})
            self.backend.run(scratch.load(rec))
            self.backend.synchronize()
        return state

    def embedding_rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows [U,C] of the embedding in its stored dtype, by pread: a file cut short is an error, not a SIGBUS."""
        self.source.check_unchanged()
        return gather_rows(self.source, EMBED, ids)

    def _embedding_backward(
        self, state: _Pass, batch: Batch, d_x: Tensor, tied: np.ndarray | None, sink: GradientSink
    ) -> None:
        count = batch.unique.size
        with Space(self.backend) as scratch:
            index = scratch.put(batch.inverse)
            table = scratch.put(np.zeros((count, self.config.hidden_size), np.float32))
            grad = scratch.tensor((count, self.config.hidden_size), "float32")
            node = Node("embed_tokens", "embedding", ("ids",), ("x",), ("table",), {"dtype": self.dtype})
            rec = self.recorder()
            known, saved = graph.forward(rec, [node], {"ids": index}, {"table": table})
            graph.backward(rec, [node], known, saved, {"x": d_x}, {"table": grad})
            self.backend.run(scratch.load(rec))
            self.backend.synchronize()
            rows = np.empty(grad.shape, np.float32)
            self.backend.download(rows, grad.address)
        if self.config.pad_token_id is not None:
            rows[batch.unique == self.config.pad_token_id] = 0.0
        whole = tied if tied is not None else np.zeros((self.config.vocab_size, self.config.hidden_size), np.float32)
        whole[batch.unique] += rows
        sink(EMBED, whole)

    def _download_rows(self, tensor: Tensor, batch: Batch) -> np.ndarray:
        self.backend.synchronize()
        host = np.empty(tensor.shape, NUMPY_DTYPE[tensor.dtype])
        self.backend.download(host, tensor.address)
        return host.astype(np.float32).reshape(batch.batch, batch.tokens, -1)

    # -- the LM head --------------------------------------------------------------------------------------------

    def load_head(self) -> None:
        """Final norm and head weights on the device."""
        if self._head is None:
            head = self.backend.allocate(self.head_layout.nbytes, "lm head")
            try:
                upload_group(self.backend, self.source, self.head_group, self.head_layout, head.address)
            except BaseException:
                head.free()
                raise
            self._head = head
            self.stream.streamed_bytes += self.head_layout.stored_bytes

    def head_params(self) -> dict[str, Tensor]:
        """The loaded final norm and head, under FINAL_NORM and HEAD."""
        assert self._head is not None, "load_head comes first"
        return self.head_layout.tensors(self._head.address)

    def _drop_head(self) -> None:
        if self._head is not None:
            self.backend.synchronize()
            self._head.free()
        self._head = None

    def _head_nodes(self) -> list[Node]:
        return [
            Node("norm", "rmsnorm", ("x",), ("normed",), (FINAL_NORM,), {"eps": self.config.rms_norm_eps}),
            Node("lm_head", "linear", ("normed",), ("logits",), (HEAD,), {"out_dtype": "float32"}),
            Node(
                "cross_entropy",
                "cross_entropy",
                ("logits", "labels"),
                ("loss", "argmax"),
                (),
                {"valid_vocab": self.valid_vocab},
            ),
        ]

    def _chunk_values(
        self, state: _Pass, x: Tensor, start: int, stop: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values = {"x": x.rows(start, stop), "labels": state.labels.rows(start, stop)}
        bind = {
            "loss": state.losses.rows(start, stop),
            "argmax": state.argmax.rows(start, stop),
            "logits": state.logits.rows(0, stop - start),
        }
        return values, bind

    def _head_forward(
        self, state: _Pass, x: Tensor, batch: Batch, want_logits: bool, want_normed: bool
    ) -> dict[str, Any]:
        params = self.head_params()
        vocab, rows = self.config.vocab_size, state.rows
        logits = np.empty((rows, vocab), np.float32) if want_logits else None
        normed = np.empty((rows, self.config.hidden_size), np.float32) if want_normed else None
        last = np.empty((batch.batch, vocab), np.float32)
        row = np.empty(vocab, np.float32)
        with Space(self.backend) as scratch:
            out = scratch.tensor((state.chunk, self.config.hidden_size), self.dtype)
            for start in range(0, rows, state.chunk):
                stop = min(start + state.chunk, rows)
                values, bind = self._chunk_values(state, x, start, stop)
                bind["normed"] = out.rows(0, stop - start)
                rec = self.recorder()
                graph.forward(rec, self._head_nodes(), values, params, bind)
                self.backend.run(self._load(state, rec), self.compute)
                self.backend.synchronize()
                if logits is not None:
                    self.backend.download(logits[start:stop], state.logits.address)
                if normed is not None:
                    part = np.empty((stop - start, self.config.hidden_size), NUMPY_DTYPE[self.dtype])
                    self.backend.download(part, out.address)
                    normed[start:stop] = part.astype(np.float32)
                for b, at in enumerate(batch.last_rows.tolist()):
                    if start <= at < stop:
                        self.backend.download(row, state.logits.rows(at - start, at - start + 1).address)
                        last[b] = row
        result: dict[str, Any] = {"last_logits": last}
        argmax = np.empty(rows, np.int32)
        self.backend.download(argmax, state.argmax.address)
        result["argmax"] = argmax.astype(np.int64).reshape(batch.batch, batch.tokens)
        if logits is not None:
            result["logits"] = logits.reshape(batch.batch, batch.tokens, vocab)
        if normed is not None:
            result["normed"] = normed.reshape(batch.batch, batch.tokens, -1)
        if batch.scored:
            result["loss"] = self._mean_loss(state, batch)
        return result

    def _mean_loss(self, state: _Pass, batch: Batch) -> float:
        losses = np.empty(state.rows, np.float32)
        self.backend.download(losses, state.losses.address)
        return float(losses.astype(np.float64).sum() / batch.num_targets) if batch.num_targets else 0.0

    def _head_backward(self, state: _Pass, batch: Batch, sink: GradientSink) -> tuple[float, np.ndarray | None]:
        """Loss; d_x of the last layer's output into dx[0]; final norm and head gradients to the sink.

        A tied head's gradient is returned instead, to be summed with the embedding's.
        """
        params = self.head_params()
        x = state.x[self.config.num_hidden_layers % 2]
        weight = np.where(batch.targets != IGNORE_INDEX, 1.0 / max(batch.num_targets, 1), 0.0).astype(np.float32)
        self.backend.upload(state.d_losses.address, weight)
        nodes = self._head_nodes()
        shapes = {FINAL_NORM: params[FINAL_NORM].shape, HEAD: params[HEAD].shape}
        d_params = self._gradient_tensors(state, shapes)
        for start in range(0, state.rows, state.chunk):
            stop = min(start + state.chunk, state.rows)
            values, bind = self._chunk_values(state, x, start, stop)
            rec = self.recorder()
            known, saved = graph.forward(rec, nodes, values, params, bind)
            d_loss = {"loss": state.d_losses.rows(start, stop)}
            target = {"x": state.dx[0].rows(start, stop)}
            # The logits' gradient is written over the logits (cross_entropy allows it): one [chunk,V] buffer.
            target["logits"] = bind["logits"]
            graph.backward(rec, nodes, known, saved, d_loss, d_params, ["x"], target, accumulate=start > 0)
            self.backend.run(self._load(state, rec), self.compute)
        self.backend.synchronize()
        loss = self._mean_loss(state, batch)
        tied: list[np.ndarray] = []

        def deliver(name: str, gradient: np.ndarray) -> None:
            if name == EMBED:
                tied.append(gradient)
            else:
                sink(name, gradient)

        self._deliver(d_params, self.head_group, deliver)
        return loss, tied[0] if tied else None
