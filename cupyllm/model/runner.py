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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyllm import graph
from cupyllm.backend.base import ITEMSIZE, Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, align, arena_layout, place
from cupyllm.config import ModelConfig
from cupyllm.engine import WeightSource
from cupyllm.graph import Node
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.engine import EMBEDDING, HEAD, NORM, DeviceEngine
from cupyllm.ops import rope as rope_op
from cupyllm.serve.runner import StepBatch

KvSlot = tuple[Tensor, Tensor]  # keys and values of one layer, [num_pages,P,HK*D]


def page_bytes(config: ModelConfig, page_tokens: int, dtype: str) -> int:
    """Bytes of one page of one layer, keys and values."""
    return 2 * page_tokens * config.num_key_value_heads * config.head_dim * ITEMSIZE[dtype]


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


@dataclass
class _Travel:
    """A layer's pages in pinned host memory, uint8 [num_pages, page bytes] for keys and values."""

    keys: np.ndarray
    values: np.ndarray


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
    ) -> None:
        """`kv_bytes`: device bytes that pages may take (None: whatever they need); at least one layer's travels."""
        self.engine = DeviceEngine(source, backend, dtype, forced=forced)
        self.config, self.backend, self.dtype, self.mode = source.config, backend, dtype, mode
        self.backend_name, self.device_name = backend.name, backend.device_name
        self.page_tokens, self.num_pages, self.max_pages = page_tokens, num_pages, max_pages
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.buffers: list[Buffer] = []
        self.programs: dict[object, Any] = {}
        self.arena: Buffer | None = None
        self.kv: list[KvSlot] = []  # of the layers that stay
        self.travels: list[_Travel] = []  # of the layers behind them
        self.travel_slot: KvSlot | None = None
        try:
            self._allocate_pages(kv_bytes)
            self._allocate_rows()
        except BaseException:
            self.close()
            raise

    # -- memory -------------------------------------------------------------------------------------------------

    def _tensor(self, shape: tuple[int, ...], dtype: str, name: str) -> Tensor:
        spec = Spec(shape, dtype)
        self.buffers.append(self.backend.allocate(max(spec.nbytes, 1), name))
        return fixed(self.buffers[-1].address, shape, dtype, name)

    def _pages(self, name: str) -> KvSlot:
        shape = (self.num_pages, self.page_tokens, self.config.num_key_value_heads * self.config.head_dim)
        return self._tensor(shape, self.dtype, f"keys of {name}"), self._tensor(shape, self.dtype, f"values of {name}")

    def _allocate_pages(self, kv_bytes: int | None) -> None:
        layers = self.config.num_hidden_layers
        layer_bytes = self.num_pages * page_bytes(self.config, self.page_tokens, self.dtype)
        stay = layers
        if kv_bytes is not None and kv_bytes < layers * layer_bytes:
            stay = max(0, kv_bytes // layer_bytes - 1)  # one more is the travelling buffer
        self.kv = [self._pages(f"layer {i}") for i in range(stay)]
        if stay < layers:
            self.travel_slot = self._pages("a travelling layer")
            half = layer_bytes // 2
            for _ in range(stay, layers):
                host = [self.backend.allocate_host(half).reshape(self.num_pages, -1) for _ in range(2)]
                self.travels.append(_Travel(*host))

    def _allocate_rows(self) -> None:
        rows, sequences = _padded(self.max_rows), _padded(self.max_sequences)
        config, half = self.config, self.config.head_dim // 2
        wide = (rows, config.hidden_size)
        self.x = [self._tensor(wide, self.dtype, f"residual {k}") for k in range(2)]
        self.positions = self._tensor((rows,), "int32", "positions")
        self.index = self._tensor((rows,), "int32", "embedding index")
        self.slots = self._tensor((rows,), "int32", "slots")
        self.table = self._tensor(wide, self.engine.source.spec(EMBEDDING)[0], "embedding rows")
        self.cos = self._tensor((rows, half), "float32", "cos")
        self.sin = self._tensor((rows, half), "float32", "sin")
        self.block_table = self._tensor((sequences, self.max_pages), "int32", "block table")
        self.q_starts = self._tensor((sequences + 1,), "int32", "q starts")
        self.kv_lengths = self._tensor((sequences,), "int32", "kv lengths")
        self.chosen = self._tensor((sequences, config.hidden_size), self.dtype, "rows that choose")
        self.logits = self._tensor((sequences, config.vocab_size), "float32", "logits")
        frequencies, self.attention_factor = rope_op.inverse_frequencies(config.rope, config.head_dim)
        self.frequencies = self._tensor(frequencies.shape, "float32", "inverse frequencies")
        self.backend.upload(self.frequencies.address, frequencies)

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> np.ndarray:
        rows, sequences = _padded(len(batch.ids)), _padded(len(batch.kv_lengths))
        assert rows <= self.x[0].shape[0] and sequences <= self.kv_lengths.shape[0], (rows, sequences)
        compute = self.engine.compute
        self._upload(batch, rows, sequences)
        self._copy_pages(batch)
        used, written = self._used_pages(batch)
        self.backend.run(self._entry_program(rows), compute)
        for index, parity, lay, address in self.engine.walk_layers(self.mode):
            pages, travel = self._pages_of(index)
            if travel is not None:
                self._move(travel, pages, used, up=True)
            key = ("layer", rows, sequences, lay, self._window(index), address, parity, pages[0].address)
            if key not in self.programs:
                self.programs[key] = self._layer_program(index, parity, rows, sequences, lay.tensors(address), pages)
            self.backend.run(self.programs[key], compute)
            if travel is not None:
                self._move(travel, pages, written, up=False)
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

    def _copy_pages(self, batch: StepBatch) -> None:
        nbytes = page_bytes(self.config, self.page_tokens, self.dtype) // 2
        for copy in batch.copies:
            for layer in self.kv:
                for tensor in layer:
                    target, source = tensor.address + copy.target * nbytes, tensor.address + copy.source * nbytes
                    self.backend.copy(target, source, nbytes, self.engine.compute)
            for travel in self.travels:
                for host in (travel.keys, travel.values):
                    host[copy.target] = host[copy.source]

    def _used_pages(self, batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
        """Pages that the step reads, and pages that it writes; sorted, each once."""
        return np.unique(batch.block_table[batch.block_table >= 0]), np.unique(batch.slots // self.page_tokens)

    def _pages_of(self, layer: int) -> tuple[KvSlot, _Travel | None]:
        if layer < len(self.kv):
            return self.kv[layer], None
        assert self.travel_slot is not None
        return self.travel_slot, self.travels[layer - len(self.kv)]

    def _move(self, travel: _Travel, pages: KvSlot, which: np.ndarray, *, up: bool) -> None:
        """Copy runs of neighbouring pages between the host and the travelling buffer, in the compute stream's order."""
        for tensor, host in zip(pages, (travel.keys, travel.values), strict=True):
            for first, last in _runs(which):
                address, part = tensor.address + first * host.shape[1], host[first:last].reshape(-1)
                if up:
                    self.backend.upload(address, part, self.engine.compute)
                else:
                    self.backend.download(part, address, self.engine.compute)

    def _window(self, layer: int) -> int | None:
        return self.config.layer_windows[layer] if self.config.layer_windows else None

    # -- programs -----------------------------------------------------------------------------------------------

    def _entry_program(self, rows: int) -> Any:
        """Embedding rows into x[0], and the rope table of the step's positions."""
        key = ("entry", rows)
        if key not in self.programs:
            rec = self._recorder()
            cos, sin = self.cos.rows(0, rows), self.sin.rows(0, rows)
            rope_op.rope_table(rec, self.positions.rows(0, rows), self.frequencies, self.attention_factor, cos, sin)
            node = Node("embed_tokens", "embedding", ("ids",), ("x",), ("table",), {"dtype": self.dtype})
            values, bind = {"ids": self.index.rows(0, rows)}, {"x": self.x[0].rows(0, rows)}
            graph.forward(rec, [node], values, {"table": self.table}, bind)
            self.programs[key] = self._load(rec)
        return self.programs[key]

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
        return self._load(rec)

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
        if key not in self.programs:
            rec, padded = self._recorder(), _padded(count)
            nodes = [
                Node("norm", "rmsnorm", ("x",), ("normed",), (NORM,), {"eps": self.config.rms_norm_eps}),
                Node("lm_head", "linear", ("normed",), ("logits",), (HEAD,), {"out_dtype": "float32"}),
            ]
            values, bind = {"x": self.chosen.rows(0, padded)}, {"logits": self.logits.rows(0, padded)}
            graph.forward(rec, nodes, values, params, bind)
            self.programs[key] = self._load(rec)
        self.backend.run(self.programs[key], self.engine.compute)
        self.backend.synchronize()
        self.backend.download(logits, self.logits.address)
        return logits

    def _recorder(self) -> Recorder:
        return Recorder(self.backend.capability, self.engine.forced)

    def _load(self, rec: Recorder) -> Any:
        offsets, total = arena_layout(rec.launches)
        if self.arena is None or self.arena.nbytes < total:
            self.backend.synchronize()
            if self.arena is not None:
                self.arena.free()
            self.programs.clear()  # they point into the old arena
            self.arena = self.backend.allocate(align(max(total, 1)), "arena")
        return self.backend.load(place(rec.launches, offsets, self.arena.address))

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self.engine.close()
        self.backend.synchronize()
        for buffer in (*self.buffers, *([] if self.arena is None else [self.arena])):
            buffer.free()
        self.buffers, self.arena, self.kv, self.travels = [], None, [], []
        self.programs.clear()


def _padded(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def _runs(sorted_pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each run of neighbouring numbers."""
    if sorted_pages.size == 0:
        return
    for run in np.split(sorted_pages, np.flatnonzero(np.diff(sorted_pages) != 1) + 1):
        yield int(run[0]), int(run[-1]) + 1
