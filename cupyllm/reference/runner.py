"""Generation steps in NumPy: the layer of qwen3.py with attention over a paged cache.

Serves two purposes: it is what the device's runner is compared with, and it is how a machine with no GPU talks. In
"resident" mode every layer stays in memory in the working dtype after its first use, so a step costs one pass over the
weights; in "stream" mode each step converts the layers anew, one in memory at a time.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cupyllm.engine import WeightSource
from cupyllm.model.names import FINAL_NORM
from cupyllm.reference import kv_append, linear, paged_attention, qwen3, rmsnorm, rope
from cupyllm.reference.engine import Mode, ReferenceEngine
from cupyllm.serve.runner import StepBatch


class ReferenceRunner:
    """Runner (cupyllm/serve/runner.py). Pages are float arrays [num_pages,P,HK*D] a layer, for keys and values each."""

    def __init__(
        self,
        source: WeightSource,
        *,
        num_pages: int,
        page_tokens: int = 64,
        max_rows: int = 512,
        max_sequences: int = 64,
        max_pages: int,
        mode: Mode = "resident",
        dtype: Literal["float32", "float64"] = "float32",
    ) -> None:
        self.engine = ReferenceEngine(source, dtype)
        self.config, self.mode, self.dtype = source.config, mode, dtype
        self.backend_name, self.device_name = self.engine.backend_name, self.engine.device_name
        self.page_tokens, self.num_pages, self.max_pages = page_tokens, num_pages, max_pages
        self.max_rows, self.max_sequences = max_rows, max_sequences
        width = self.config.num_key_value_heads * self.config.head_dim
        shape = (num_pages, page_tokens, width)
        # Unwritten slots may hold anything; empty pages cost no memory until they are written.
        self.pages = [(np.empty(shape, dtype), np.empty(shape, dtype)) for _ in range(self.config.num_hidden_layers)]
        self.frequencies = rope.inverse_frequencies(self.config.rope, self.config.head_dim)

    def step(self, batch: StepBatch) -> np.ndarray:
        for copy in batch.copies:
            for pages in self.pages:
                for array in pages:
                    array[copy.target] = array[copy.source]
        x = self.engine.embedding_rows(batch.ids)
        cos, sin = rope.table(batch.positions, *self.frequencies, np.dtype(self.dtype))
        for index in range(self.config.num_hidden_layers):
            params = self.engine.load_layer(index, self.mode)
            x, _ = qwen3.layer_forward(
                x, params, self.config, batch=1, cos=cos, sin=sin, attend=self._attention(index, batch)
            )
        rows = x[batch.logits_rows]
        rows, _ = rmsnorm.forward(
            rows,
            self.engine.whole_tensor(FINAL_NORM, self.mode),
            eps=self.config.rms_norm_eps,
        )
        logits = np.empty((rows.shape[0], self.config.vocab_size), np.float32)
        for first, weight in self.engine.head_slices(rows, self.mode):
            logits[:, first : first + weight.shape[0]] = linear.forward(rows, weight)[0]
        return logits

    def _attention(self, layer: int, batch: StepBatch) -> qwen3.Attend:
        keys, values = self.pages[layer]
        config = self.config

        def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            kv_append.forward(k, v, keys, values, batch.slots)
            out, _ = paged_attention.forward(
                q,
                keys,
                values,
                batch.block_table,
                batch.q_starts,
                batch.kv_lengths,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                window=config.layer_windows[layer] if config.layer_windows else None,
            )
            return out

        return attend

    def close(self) -> None:
        self.engine.close()
        self.pages = []
