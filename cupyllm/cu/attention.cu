// Scaled dot-product attention, FlashAttention-2 style (Dao 2023, algorithms 1 and 2), forward and backward.
//
//   o_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = scale q_i . k_j,  lse_i = log sum_j exp(s_ij)
//   d_v = p^T d_o    d_p = d_o v^T    d_s = p (d_p - delta), delta_i = d_o_i . o_i    d_q = scale d_s k    d_k = scale d_s^T q
// over the keys visible to query i, which stands at position i + Tk - Tq (the last query sits at the last key):
//   same segment and not a negative one;  causal: j <= position;  window W: j > position - W.
// Query head h reads KV head h / (HQ / HK).
//
// Layout: q, o, d_o, d_q [B,Tq,HQ*D]; k, v, d_k, d_v [B,Tk,HK*D], X_T; lse, delta float [B,HQ,Tq]; segments int [B,T]
//   or null. Rows are multiples of 8 elements, so every load is a vector of four.
// Grid: one CTA of 128 threads per (tile, head, row of the batch), all folded into x; heavy causal tiles start first.
// Threads: 8 groups of 16 lanes. A group owns 4 rows of the tile; in products with the other tile's rows its lanes
//   share those rows out, in products over the head size they share the columns out, four at a time.
// Shared: at most 47 KiB (HEAD_DIM 128), all fp32. Tile rows are padded by 16 bytes: an odd number of quads a row lets
//   eight lanes read eight rows without bank conflicts.
// Numerics: fp32. Sums have two levels: dot products of at most 128, partial sums of one tile, then the sum of tiles.
// Determinism: no atomics, fixed order. Key tiles start at fixed multiples from key 0 and a tile that a row cannot see
//   changes no bit of that row, so a query's bits depend on neither its tile, its chunk nor its neighbours.
// Masked is not the same as zero: 0 * NaN is NaN, so hidden pairs are marked MASKED in the tile of probabilities and
//   skipped, not multiplied. An inf or NaN in a visible pair surfaces. Queries that see nothing get exact zeros.
// Aliasing: outputs must not overlap inputs. Every output element is written once (=).
// Capability: any. One variant for all shapes; D a multiple of 8 up to 128.
#include "attention.cuh"

#if HEAD_DIM > 96
#define OTHER 16                       // rows of the tile that the backward kernels stream past their own
#else
#define OTHER 32
#endif

// Grid: query tiles * HQ * B. window: a number larger than any position when there is none. Writes out and lse (=).
KERNEL(attention_forward)(const X_T* q, const X_T* k, const X_T* v, const int* q_segments, const int* k_segments,
                          X_T* out, float* lse, i64 batch, i64 num_queries, i64 num_keys, i64 num_heads,
                          i64 num_kv_heads, float scale, i64 causal, i64 window) {
  i64 heads = batch * num_heads, tiles = (num_queries + ROWS - 1) / ROWS;
  i64 tile = tiles - 1 - blockIdx.x / heads, b = blockIdx.x % heads / num_heads, head = blockIdx.x % num_heads;
  i64 q_stride = num_heads * HEAD_DIM, kv_stride = num_kv_heads * HEAD_DIM;
  i64 kv_start = b * num_keys * kv_stride + head / (num_heads / num_kv_heads) * HEAD_DIM;
  i64 q_start = b * num_queries * q_stride + head * HEAD_DIM;
  Contiguous keys = {k + kv_start, v + kv_start, num_keys, kv_stride};
  attend(q + q_start, keys, q_segments ? q_segments + b * num_queries : nullptr,
         k_segments ? k_segments + b * num_keys : nullptr, out + q_start, lse + (b * num_heads + head) * num_queries,
         tile * ROWS, num_queries, num_keys, q_stride, scale, causal, window);
}

// delta = rowsum(d_out * out), one warp a row. Grid: ceil(B * Tq * HQ / 4). Rows in the order of out: [B,Tq,HQ].
KERNEL(attention_delta)(const X_T* out, const X_T* d_out, float* delta, i64 batch, i64 num_queries, i64 num_heads) {
  i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  bool exists = row < batch * num_queries * num_heads;
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32)
    if (exists) sum = fmaf(to_float(out[row * HEAD_DIM + d]), to_float(d_out[row * HEAD_DIM + d]), sum);
  sum = warp_sum(sum);
  if (exists && threadIdx.x % 32 == 0) {
    i64 head = row % num_heads, query = row / num_heads % num_queries, b = row / num_heads / num_queries;
    delta[(b * num_heads + head) * num_queries + query] = sum;
  }
}

// Grid: key tiles * HK * B. d_k and d_v are written (=); either may be null. Loops over the group's query heads, then
// over query tiles, in order. One buffer takes d_out, q and d_out again: two would not fit in 48 KiB.
KERNEL(attention_backward_kv)(const X_T* q, const X_T* k, const X_T* v, const int* q_segments, const int* k_segments,
                              const X_T* d_out, const float* lse, const float* delta, X_T* d_k, X_T* d_v, i64 batch,
                              i64 num_queries, i64 num_keys, i64 num_heads, i64 num_kv_heads, float scale, i64 causal,
                              i64 window) {
  __shared__ Quad k_tile[ROWS][STRIDE];
  __shared__ Quad v_tile[ROWS][STRIDE];
  __shared__ Quad buffer[OTHER][STRIDE];
  __shared__ Quad probs[OTHER][GROUPS + 1];  // [query][key]
  __shared__ Quad d_scores[OTHER][GROUPS + 1];
  __shared__ float query_lse[OTHER], query_delta[OTHER];
  __shared__ int query_segment[OTHER];

  i64 heads = batch * num_kv_heads;
  i64 tile = blockIdx.x / heads, b = blockIdx.x % heads / num_kv_heads, kv_head = blockIdx.x % num_kv_heads;
  i64 first = tile * ROWS, offset = num_keys - num_queries, per_group = num_heads / num_kv_heads;
  i64 q_stride = num_heads * HEAD_DIM, kv_stride = num_kv_heads * HEAD_DIM;
  i64 kv_start = b * num_keys * kv_stride + kv_head * HEAD_DIM;
  int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  i64 row = first + 4 * group;

  load_tile<ROWS>(k_tile, k + kv_start, first, num_keys, kv_stride);
  load_tile<ROWS>(v_tile, v + kv_start, first, num_keys, kv_stride);
  int segment[4];
#pragma unroll
  for (int r = 0; r < 4; r++) segment[r] = segment_of(k_segments, b * num_keys, row + r, num_keys);
  Quad total_k[4][OWN], total_v[4][OWN], part[4][OWN];
  clear_quads(total_k);
  clear_quads(total_v);

  i64 last_key = first + ROWS < num_keys ? first + ROWS - 1 : num_keys - 1;
  i64 low = causal ? clamp(first - offset, 0, num_queries) : 0;
  i64 high = clamp(last_key + window - offset, 0, num_queries);
  for (i64 head = kv_head * per_group; head < (kv_head + 1) * per_group; head++) {
    i64 q_start = b * num_queries * q_stride + head * HEAD_DIM, lse_start = (b * num_heads + head) * num_queries;
    for (i64 start = low / OTHER * OTHER; start < high; start += OTHER) {
      __syncthreads();  // the last tile has been read
      load_tile<OTHER>(buffer, d_out + q_start, start, num_queries, q_stride);
      if (threadIdx.x < OTHER) {
        i64 query = start + threadIdx.x;
        query_segment[threadIdx.x] = segment_of(q_segments, b * num_queries, query, num_queries);
        query_lse[threadIdx.x] = query < num_queries ? lse[lse_start + query] : 0.0f;
        query_delta[threadIdx.x] = query < num_queries ? delta[lse_start + query] : 0.0f;
      }
      __syncthreads();
      float s[4][OTHER / LANES], d_p[4][OTHER / LANES];
      tile_dots(d_p, v_tile, buffer, group, lane);
      __syncthreads();  // d_out has been read
      load_tile<OTHER>(buffer, q + q_start, start, num_queries, q_stride);
      __syncthreads();
      tile_dots(s, k_tile, buffer, group, lane);
#pragma unroll
      for (int j = 0; j < OTHER / LANES; j++) {
        int query = lane + LANES * j;
        Quad p, d_s;
#pragma unroll
        for (int r = 0; r < 4; r++) {
          bool seen = visible(start + query + offset, query_segment[query], row + r, segment[r], causal, window);
          p.at[r] = seen ? expf(s[r][j] * scale - query_lse[query]) : MASKED;
          d_s.at[r] = seen ? p.at[r] * (d_p[r][j] - query_delta[query]) : 0.0f;
        }
        probs[query][group] = p;
        d_scores[query][group] = d_s;
      }
      __syncthreads();
      weighted_rows<OTHER>(part, d_scores, probs, buffer, group, lane);
      add_quads(total_k, part);
      __syncthreads();  // q has been read
      load_tile<OTHER>(buffer, d_out + q_start, start, num_queries, q_stride);
      __syncthreads();
      weighted_rows<OTHER>(part, probs, probs, buffer, group, lane);
      add_quads(total_v, part);
    }
  }
  if (d_k) store_rows(d_k + kv_start, total_k, scale, row, num_keys, kv_stride, lane);
  if (d_v) store_rows(d_v + kv_start, total_v, 1.0f, row, num_keys, kv_stride, lane);
}

// Grid: query tiles * HQ * B. d_q is written (=). One buffer takes the values, then the keys.
KERNEL(attention_backward_q)(const X_T* q, const X_T* k, const X_T* v, const int* q_segments, const int* k_segments,
                             const X_T* d_out, const float* lse, const float* delta, X_T* d_q, i64 batch,
                             i64 num_queries, i64 num_keys, i64 num_heads, i64 num_kv_heads, float scale, i64 causal,
                             i64 window) {
  __shared__ Quad q_tile[ROWS][STRIDE];
  __shared__ Quad d_out_tile[ROWS][STRIDE];
  __shared__ Quad buffer[OTHER][STRIDE];
  __shared__ Quad probs[OTHER][GROUPS + 1];  // [key][query]
  __shared__ Quad d_scores[OTHER][GROUPS + 1];
  __shared__ int key_segment[OTHER];

  i64 heads = batch * num_heads, tiles = (num_queries + ROWS - 1) / ROWS;
  i64 tile = tiles - 1 - blockIdx.x / heads, b = blockIdx.x % heads / num_heads, head = blockIdx.x % num_heads;
  i64 first = tile * ROWS, offset = num_keys - num_queries;
  i64 q_stride = num_heads * HEAD_DIM, kv_stride = num_kv_heads * HEAD_DIM;
  i64 kv_start = b * num_keys * kv_stride + head / (num_heads / num_kv_heads) * HEAD_DIM;
  i64 q_start = b * num_queries * q_stride + head * HEAD_DIM, lse_start = (b * num_heads + head) * num_queries;
  int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  i64 row = first + 4 * group;

  load_tile<ROWS>(q_tile, q + q_start, first, num_queries, q_stride);
  load_tile<ROWS>(d_out_tile, d_out + q_start, first, num_queries, q_stride);
  int segment[4];
  float row_lse[4], row_delta[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    segment[r] = segment_of(q_segments, b * num_queries, row + r, num_queries);
    row_lse[r] = row + r < num_queries ? lse[lse_start + row + r] : 0.0f;
    row_delta[r] = row + r < num_queries ? delta[lse_start + row + r] : 0.0f;
  }
  Quad total[4][OWN], part[4][OWN];
  clear_quads(total);

  i64 low = clamp(first + offset - window + 1, 0, num_keys);
  i64 high = causal ? clamp(first + ROWS + offset, 0, num_keys) : num_keys;
  for (i64 start = low / OTHER * OTHER; start < high; start += OTHER) {
    __syncthreads();  // the last tile has been read
    load_tile<OTHER>(buffer, v + kv_start, start, num_keys, kv_stride);
    if (threadIdx.x < OTHER)
      key_segment[threadIdx.x] = segment_of(k_segments, b * num_keys, start + threadIdx.x, num_keys);
    __syncthreads();
    float s[4][OTHER / LANES], d_p[4][OTHER / LANES];
    tile_dots(d_p, d_out_tile, buffer, group, lane);
    __syncthreads();  // values have been read
    load_tile<OTHER>(buffer, k + kv_start, start, num_keys, kv_stride);
    __syncthreads();
    tile_dots(s, q_tile, buffer, group, lane);
#pragma unroll
    for (int j = 0; j < OTHER / LANES; j++) {
      int key = lane + LANES * j;
      Quad p, d_s;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        bool seen = visible(row + r + offset, segment[r], start + key, key_segment[key], causal, window);
        p.at[r] = seen ? expf(s[r][j] * scale - row_lse[r]) : MASKED;
        d_s.at[r] = seen ? p.at[r] * (d_p[r][j] - row_delta[r]) : 0.0f;
      }
      probs[key][group] = p;
      d_scores[key][group] = d_s;
    }
    __syncthreads();
    weighted_rows<OTHER>(part, d_scores, probs, buffer, group, lane);
    add_quads(total, part);
  }
  store_rows(d_q + q_start, total, scale, row, num_queries, q_stride, lane);
}
