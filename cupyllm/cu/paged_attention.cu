// Attention over a paged KV cache: decode (one query a sequence) and chunked prefill (a tail of queries over longer keys).
//
//   o_i = sum_j softmax_j(scale q_i . k_j) v_j  over keys j of its own sequence with j <= position, j > position - window
// A sequence's query r of n stands at position kv_length - n + r: the last query sits at the last key. Key j lies in row
// j % P of page block_table[sequence][j / P].
//
// Layout: q, out [N,HQ*D], the rows of all sequences one after another; k_pages, v_pages [num_pages,P,HK*D], X_T;
//   block_table int [S,M], q_starts int [S+1] (rows of sequence s: q_starts[s] to q_starts[s+1]), kv_lengths int [S].
// Grid: (an upper bound of the query tiles) * HQ, folded into x. How many tiles there are is known on the device only; a
//   CTA finds its sequence by walking q_starts, and those left over return. Rows behind q_starts[S] are written as zeros.
// Threads, shared memory, numerics, masking: attend() of attention.cuh, which attention.cu runs too. P is a multiple of
//   the key tile, so that no tile lies in two pages and all arithmetic is that of attention_forward: the same bits,
//   whatever the pages, their order, the chunks and the neighbours.
// Never read: rows at or behind kv_length, and table entries of pages that no query of the tile sees. A visible page that
//   is no page of the pool (the host's mistake) reads as NaN, which surfaces, and not as foreign memory.
// Aliasing: out must not overlap an input. Written once (=). Deterministic. Capability: any; D a multiple of 8 up to 128.
#include "attention.cuh"

struct Paged {
  const X_T* k;  // element 0 of slot 0 of the KV head
  const X_T* v;
  const int* table;  // the sequence's row of the block table
  i64 num_entries, num_pages, page_tokens, num_keys, stride;

  DEVICE void load(Quad (*tile)[STRIDE], const X_T* slots, i64 start) const {
    i64 entry = start / page_tokens, page = entry < num_entries ? table[entry] : -1;
    if (page >= 0 && page < num_pages) {
      const X_T* rows = slots + (page * page_tokens + start % page_tokens) * stride;
      load_tile<FORWARD_KEYS>(tile, rows, 0, num_keys - start, stride);
      return;
    }
    float nan = __uint_as_float(0x7fffffffu);
    for (int index = threadIdx.x; index < FORWARD_KEYS * QUADS; index += THREADS)
      tile[index / QUADS][index % QUADS] = {{nan, nan, nan, nan}};
  }
  DEVICE void load_keys(Quad (*tile)[STRIDE], i64 start) const { load(tile, k, start); }
  DEVICE void load_values(Quad (*tile)[STRIDE], i64 start) const { load(tile, v, start); }
};

// window: a number larger than any position when there is none.
KERNEL(paged_attention_forward)(const X_T* q, const X_T* k_pages, const X_T* v_pages, const int* block_table,
                                const int* q_starts, const int* kv_lengths, X_T* out, i64 num_rows, i64 num_sequences,
                                i64 num_entries, i64 num_pages, i64 page_tokens, i64 num_heads, i64 num_kv_heads,
                                float scale, i64 window) {
  i64 head = blockIdx.x % num_heads, tile = blockIdx.x / num_heads, sequence = 0, start, end;
  for (;; sequence++) {  // the rows behind the last sequence count as one more, without keys
    start = q_starts[sequence];
    end = sequence < num_sequences ? q_starts[sequence + 1] : num_rows;
    i64 tiles = (end - start + ROWS - 1) / ROWS;
    if (tile < tiles) break;
    if (sequence == num_sequences) return;
    tile -= tiles;
  }
  i64 num_keys = sequence < num_sequences ? kv_lengths[sequence] : 0;
  i64 q_stride = num_heads * HEAD_DIM, kv_stride = num_kv_heads * HEAD_DIM;
  i64 kv_column = head / (num_heads / num_kv_heads) * HEAD_DIM, q_start = start * q_stride + head * HEAD_DIM;
  Paged keys = {k_pages + kv_column,     v_pages + kv_column, block_table + sequence * num_entries,
                num_entries,             num_pages,           page_tokens,
                num_keys,                kv_stride};
  attend(q + q_start, keys, nullptr, nullptr, out + q_start, nullptr, tile * ROWS, end - start, num_keys, q_stride,
         scale, 1, window);
}
