"""Generation steps on a device: layers streamed or resident, attention over paged keys and values.

A step is one walk over the layers for all sequences at once. Rows and sequences are padded to powers of two, so that a
handful of programs serves every step: padded rows have slot -1 (nothing is written) and lie behind q_starts[S] (their
attention is 0); in float32 the number of rows changes no bit of a row, so padding changes none either.

KV memory. The first layers' pages lie on the device; those that exceed `kv_bytes` lie in pinned host memory and travel
with their layer: the pages that the step's sequences use go up into one travelling buffer, the pages that were written
come back. Either way the kernels see the same bytes, so the budget changes no bit of an answer. Keeping only the latest
tokens on the device was rejected: it changes the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cupyllm import graph
from cupyllm.backend.base import Backend, Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.backend.space import Space
from cupyllm.config import ModelConfig
from cupyllm.engine import WeightSource
from cupyllm.graph import Node
from cupyllm.kvcache.pool import DevicePool, Geometry, HostPool
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.engine import DeviceEngine
from cupyllm.model.names import EMBED, FINAL_NORM, HEAD
from cupyllm.ops import rope as rope_op
from cupyllm.serve.runner import StepBatch

KvSlot = tuple[Tensor, Tensor]  # keys and values of one layer, [num_pages,P,HK*D]


def generation_nodes(config: ModelConfig, layer: int, rows: int) -> list[Node]:
    """A layer's nodes with attention replaced by kv_append and paged_attention; reads the step's arrays by name."""
    nodes: list[Node] = []
    for node in layer_nodes(config, layer, 1, rows, False):
        if node.op != "attention":
            nodes.append(node)
            continue
        q, k, v = node.inputs[:3]
        attrs = {key: node.attrs[key] for key in ("num_heads", "num_kv_heads", "scale", "window")}
        paged = (q, "k_pages", "v_pages", "block_table", "q_starts", "kv_lengths")
        nodes.append(Node("kv_append", "kv_append", (k, v, "k_pages", "v_pages", "slots"), ()))
        nodes.append(Node("attention", "paged_attention", paged, node.outputs, (), attrs))
    return nodes


class DeviceRunner:
    """Runner (cupyllm/serve/runner.py) on a Backend."""

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        dtype: str = "float32",
        *,
        num_pages: int,
        max_pages: int,
        page_tokens: int = 64,
        max_rows: int = 512,
        max_sequences: int = 64,
        mode: str = "stream",
        kv_bytes: int | None = None,
        forced: dict[str, str] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`kv_bytes`: device bytes that pages may take (None: whatever they need); at least one layer's travels."""
        self.engine = DeviceEngine(source, backend, dtype, forced=forced, batch_invariant=batch_invariant)
        self.config, self.backend, self.dtype, self.mode = source.config, backend, dtype, mode
        self.backend_name, self.device_name = backend.name, backend.device_name
        self.page_tokens, self.num_pages, self.max_pages = page_tokens, num_pages, max_pages
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.geometry = Geometry.of(self.config, num_pages, dtype, page_tokens)
        self.space = Space(backend)
        self.pools: list[DevicePool | HostPool] = []
        try:
            self._allocate_pages(kv_bytes)
            self._allocate_rows()
        except BaseException:
            self.close()
            raise

    # -- memory -------------------------------------------------------------------------------------------------

    def _allocate_pages(self, kv_bytes: int | None) -> None:
        layers = stay = self.config.num_hidden_layers
        if kv_bytes is not None and kv_bytes < layers * self.geometry.layer_bytes:
            stay = max(0, kv_bytes // self.geometry.layer_bytes - 1)  # one more is the travelling buffer
        self.num_staying = stay
        self.kv = DevicePool(self.backend, replace(self.geometry, num_layers=stay))
        self.pools.append(self.kv)
        if stay < layers:
            self.travel_slot = DevicePool(self.backend, replace(self.geometry, num_layers=1))
            self.pools.append(self.travel_slot)
            self.travelling = HostPool(self.backend, replace(self.geometry, num_layers=layers - stay))
            self.pools.append(self.travelling)

    def _allocate_rows(self) -> None:
        rows, sequences = _padded(self.max_rows), _padded(self.max_sequences)
        config, half = self.config, self.config.head_dim // 2
        wide = (rows, config.hidden_size)
        self.x = [self.space.tensor(wide, self.dtype, f"residual {k}") for k in range(2)]
        self.positions = self.space.tensor((rows,), "int32", "positions")
        self.index = self.space.tensor((rows,), "int32", "embedding index")
        self.slots = self.space.tensor((rows,), "int32", "slots")
        self.table = self.space.tensor(wide, self.engine.source.spec(EMBED)[0], "embedding rows")
        self.cos = self.space.tensor((rows, half), "float32", "cos")
        self.sin = self.space.tensor((rows, half), "float32", "sin")
        self.block_table = self.space.tensor((sequences, self.max_pages), "int32", "block table")
        self.q_starts = self.space.tensor((sequences + 1,), "int32", "q starts")
        self.kv_lengths = self.space.tensor((sequences,), "int32", "kv lengths")
        self.chosen = self.space.tensor((sequences, config.hidden_size), self.dtype, "rows that choose")
        self.backend.fill(self.chosen.address, self.chosen.nbytes, 0)  # the head computes padded rows, too
        self.logits = self.space.tensor((sequences, config.vocab_size), "float32", "logits")
        frequencies, self.attention_factor = rope_op.inverse_frequencies(config.rope, config.head_dim)
        self.frequencies = self.space.put(frequencies, "inverse frequencies")

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> np.ndarray:
        rows, sequences = _padded(len(batch.ids)), _padded(len(batch.kv_lengths))
        assert rows <= self.x[0].shape[0] and sequences <= self.kv_lengths.shape[0], (rows, sequences)
        compute = self.engine.compute
        self.backend.synchronize()  # a step that failed has left launches behind, which read what is uploaded next
        self._upload(batch, rows, sequences)
        self.kv.copy(batch.copies, compute)
        if self.num_staying < len(self.engine.groups):
            self.travelling.copy(batch.copies)
        used, written = batch.block_table[batch.block_table >= 0].tolist(), (batch.slots // self.page_tokens).tolist()
        self.backend.run(self._entry_program(rows), compute)
        for index, parity, lay, address in self.engine.walk_layers(self.mode):
            travels = index - self.num_staying  # which of the travelling layers; below 0: it stays
            pages = self.kv.layer(index) if travels < 0 else self.travel_slot.layer(0)
            if travels >= 0:
                self.travelling.upload(travels, pages[0].address, used, compute)
            key = ("layer", rows, sequences, lay, self._window(index), address, parity, pages[0].address)
            if key not in self.space.programs:
                self.space.programs[key] = self._layer_program(
                    index, parity, rows, sequences, lay.tensors(address), pages
                )
            self.backend.run(self.space.programs[key], compute)
            if travels >= 0:
                self.travelling.download(travels, pages[0].address, written, compute)
        return self._head(batch, self.x[self.config.num_hidden_layers % 2])

    def _upload(self, batch: StepBatch, rows: int, sequences: int) -> None:
        count, given = len(batch.ids), len(batch.kv_lengths)
        unique, inverse = np.unique(batch.ids, return_inverse=True)
        table = self.engine.embedding_rows(unique)
        self.backend.upload(self.table.address, table)
        block_table = np.full((sequences, self.max_pages), -1, np.int32)
        block_table[:given] = batch.block_table
        for tensor, values, size, filler in (
            (self.index, inverse.reshape(-1), rows, 0),
            (self.positions, batch.positions, rows, 0),
            (self.slots, batch.slots, rows, -1),
            (self.q_starts, batch.q_starts, sequences + 1, count),
            (self.kv_lengths, batch.kv_lengths, sequences, 0),
        ):
            padded = np.full(size, filler, np.int32)
            padded[: len(values)] = values
            self.backend.upload(tensor.address, padded)
        self.backend.upload(self.block_table.address, block_table)

    def _window(self, layer: int) -> int | None:
        return self.config.layer_windows[layer] if self.config.layer_windows else None

    # -- programs -----------------------------------------------------------------------------------------------

    def _entry_program(self, rows: int) -> Any:
        """Embedding rows into x[0], and the rope table of the step's positions."""
        key = ("entry", rows)
        if key not in self.space.programs:
            rec = self._recorder()
            cos, sin = self.cos.rows(0, rows), self.sin.rows(0, rows)
            rope_op.rope_table(rec, self.positions.rows(0, rows), self.frequencies, self.attention_factor, cos, sin)
            node = Node("embed_tokens", "embedding", ("ids",), ("x",), ("table",), {"dtype": self.dtype})
            values, bind = {"ids": self.index.rows(0, rows)}, {"x": self.x[0].rows(0, rows)}
            graph.forward(rec, [node], values, {"table": self.table}, bind)
            self.space.programs[key] = self.space.load(rec)
        return self.space.programs[key]

    def _layer_program(
        self, layer: int, parity: int, rows: int, sequences: int, params: dict[str, Tensor], pages: KvSlot
    ) -> Any:
        rec = self._recorder()
        values = {
            "x": self.x[parity].rows(0, rows),
            "cos": self.cos.rows(0, rows),
            "sin": self.sin.rows(0, rows),
            "slots": self.slots.rows(0, rows),
            "block_table": self.block_table.rows(0, sequences),
            "q_starts": replace(self.q_starts, shape=(sequences + 1,)),
            "kv_lengths": self.kv_lengths.rows(0, sequences),
            "k_pages": pages[0],
            "v_pages": pages[1],
        }
        bind = {"y": self.x[1 - parity].rows(0, rows)}
        graph.forward(rec, generation_nodes(self.config, layer, rows), values, params, bind)
        return self.space.load(rec)

    def _head(self, batch: StepBatch, x: Tensor) -> np.ndarray:
        count = len(batch.logits_rows)
        logits = np.empty((count, self.config.vocab_size), np.float32)
        if count == 0:
            self.backend.synchronize()
            return logits
        self.engine.load_head()
        row_bytes = Spec((self.config.hidden_size,), self.dtype).nbytes
        for to, row in enumerate(batch.logits_rows.tolist()):
            source, target = x.address + row * row_bytes, self.chosen.address + to * row_bytes
            self.backend.copy(target, source, row_bytes, self.engine.compute)
        params = self.engine.head_params()
        key = ("head", _padded(count), params[HEAD].address)
        if key not in self.space.programs:
            rec, padded = self._recorder(), _padded(count)
            nodes = [
                Node("norm", "rmsnorm", ("x",), ("normed",), (FINAL_NORM,), {"eps": self.config.rms_norm_eps}),
                Node("lm_head", "linear", ("normed",), ("logits",), (HEAD,), {"out_dtype": "float32"}),
            ]
            values, bind = {"x": self.chosen.rows(0, padded)}, {"logits": self.logits.rows(0, padded)}
            graph.forward(rec, nodes, values, params, bind)
            self.space.programs[key] = self.space.load(rec)
        self.backend.run(self.space.programs[key], self.engine.compute)
        self.backend.synchronize()
        self.backend.download(logits, self.logits.address)
        return logits

    def _recorder(self) -> Recorder:
        return self.engine.recorder()

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self.engine.close()
        self.space.close()
        for pool in self.pools:
            pool.close()
        self.pools.clear()


def _padded(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()
