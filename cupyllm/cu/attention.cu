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
#include "common.cuh"

#ifndef X_T
#define X_T float
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

#define THREADS 128
#define LANES 16
#define GROUPS (THREADS / LANES)
#define ROWS (4 * GROUPS)              // rows of a CTA's own tile: queries in forward and d_q, keys in d_k/d_v
#define QUADS (HEAD_DIM / 4)           // a quad: four neighbouring elements of a row
#define STRIDE (QUADS + 1)             // quads from one tile row to the next in shared memory
#define OWN ((QUADS + LANES - 1) / LANES)  // quads of a row that one lane owns: lane, lane + 16
#define FORWARD_KEYS 32
#if HEAD_DIM > 96
#define OTHER 16                       // rows of the tile that the backward kernels stream past their own
#else
#define OTHER 32
#endif
#define MASKED -1.0f                   // no probability is negative

struct alignas(16) Quad { float at[4]; };
template <typename T> struct alignas(4 * sizeof(T)) Packed { T at[4]; };

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

DEVICE Quad load_quad(const X_T* x) {
  Packed<X_T> packed = *(const Packed<X_T>*)x;
  Quad quad;
#pragma unroll
  for (int e = 0; e < 4; e++) quad.at[e] = to_float(packed.at[e]);
  return quad;
}

// Adding +0 turns -0 into +0: whether an underflow met an all-masked tile must not show in the sign bit.
DEVICE void store_quad(X_T* x, Quad quad, float factor) {
  Packed<X_T> packed;
#pragma unroll
  for (int e = 0; e < 4; e++) packed.at[e] = from_float<X_T>(quad.at[e] * factor + 0.0f);
  *(Packed<X_T>*)x = packed;
}

// tile[r] = x[first + r] for the rows that exist, else zeros. x points at element 0 of row 0 of the right head.
template <int COUNT> DEVICE void load_tile(Quad (*tile)[STRIDE], const X_T* x, i64 first, i64 end, i64 row_stride) {
  for (int index = threadIdx.x; index < COUNT * QUADS; index += THREADS) {
    int row = index / QUADS, quad = index % QUADS;
    Quad value = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (first + row < end) value = load_quad(x + (first + row) * row_stride + 4 * quad);
    tile[row][quad] = value;
  }
}

// dots[r][j] = own[group's row r] . other[lane + 16 j]
template <int COUNT>
DEVICE void tile_dots(float (&dots)[4][COUNT], Quad (*own)[STRIDE], Quad (*other)[STRIDE], int group, int lane) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int j = 0; j < COUNT; j++) dots[r][j] = 0.0f;
#pragma unroll 4
  for (int c = 0; c < QUADS; c++) {
    Quad b[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++) b[j] = other[lane + LANES * j][c];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      Quad a = own[4 * group + r][c];
#pragma unroll
      for (int j = 0; j < COUNT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) dots[r][j] = fmaf(a.at[e], b[j].at[e], dots[r][j]);
    }
  }
}

// sums[r][own quad] = sum over the tile's rows j of weights[j][r] tile[j], leaving out pairs that `marks` hides.
template <int COUNT>
DEVICE void weighted_rows(Quad (&sums)[4][OWN], Quad (*weights)[GROUPS + 1], Quad (*marks)[GROUPS + 1],
                          Quad (*tile)[STRIDE], int group, int lane) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[r][o].at[e] = 0.0f;
#pragma unroll 4
  for (int j = 0; j < COUNT; j++) {
    Quad weight = weights[j][group], mark = marks[j][group];
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      int quad = lane + LANES * o;
      if (QUADS % LANES != 0 && quad >= QUADS) continue;
      Quad x = tile[j][quad];
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (!(mark.at[r] < 0.0f)) {  // a NaN probability is a visible one
#pragma unroll
          for (int e = 0; e < 4; e++) sums[r][o].at[e] = fmaf(weight.at[r], x.at[e], sums[r][o].at[e]);
        }
    }
  }
}

DEVICE void add_quads(Quad (&total)[4][OWN], const Quad (&part)[4][OWN]) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[r][o].at[e] += part[r][o].at[e];
}

DEVICE void clear_quads(Quad (&total)[4][OWN]) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[r][o].at[e] = 0.0f;
}

// Writes 4 rows of a group, each lane its quads, times `factor`.
DEVICE void store_rows(X_T* x, const Quad (&total)[4][OWN], float factor, i64 first, i64 end, i64 row_stride, int lane) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      int quad = lane + LANES * o;
      if (quad < QUADS && first + r < end) store_quad(x + (first + r) * row_stride + 4 * quad, total[r][o], factor);
    }
}

// Sum or maximum over the 16 lanes of a group, the same value in each.
DEVICE float lanes_sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
  return x;
}
DEVICE float lanes_max(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
  return x;
}

// Whether the query at `position` sees key j. Segments are both 0 when there are none; -1 hides rows past the end.
DEVICE bool visible(i64 position, int q_segment, i64 key, int k_segment, i64 causal, i64 window) {
  return q_segment == k_segment && q_segment >= 0 && (!causal || key <= position) && key > position - window;
}

DEVICE int segment_of(const int* segments, i64 row_start, i64 row, i64 end) {
  if (row >= end) return -1;
  return segments ? segments[row_start + row] : 0;
}

DEVICE i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : (x > high ? high : x); }

// Grid: query tiles * HQ * B. window: a number larger than any position when there is none. Writes out and lse (=).
KERNEL(attention_forward)(const X_T* q, const X_T* k, const X_T* v, const int* q_segments, const int* k_segments,
                          X_T* out, float* lse, i64 batch, i64 num_queries, i64 num_keys, i64 num_heads,
                          i64 num_kv_heads, float scale, i64 causal, i64 window) {
  __shared__ Quad q_tile[ROWS][STRIDE];
  __shared__ Quad kv_tile[FORWARD_KEYS][STRIDE];  // keys, then values
  __shared__ Quad probs[FORWARD_KEYS][GROUPS + 1];  // [key][query]
  __shared__ int key_segment[FORWARD_KEYS];

  i64 heads = batch * num_heads, tiles = (num_queries + ROWS - 1) / ROWS;
  i64 tile = tiles - 1 - blockIdx.x / heads, b = blockIdx.x % heads / num_heads, head = blockIdx.x % num_heads;
  i64 first = tile * ROWS, offset = num_keys - num_queries;
  i64 q_stride = num_heads * HEAD_DIM, kv_stride = num_kv_heads * HEAD_DIM;
  i64 kv_start = b * num_keys * kv_stride + head / (num_heads / num_kv_heads) * HEAD_DIM;
  i64 q_start = b * num_queries * q_stride + head * HEAD_DIM;
  int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  i64 row = first + 4 * group;

  load_tile<ROWS>(q_tile, q + q_start, first, num_queries, q_stride);
  int segment[4], seen[4];
  float row_max[4], row_sum[4];
  Quad total[4][OWN], part[4][OWN];
  clear_quads(total);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    segment[r] = segment_of(q_segments, b * num_queries, row + r, num_queries);
    seen[r] = 0;
    row_max[r] = minus_infinity();
    row_sum[r] = 0.0f;
  }

  i64 low = clamp(first + offset - window + 1, 0, num_keys);
  i64 high = causal ? clamp(first + ROWS + offset, 0, num_keys) : num_keys;
  for (i64 start = low / FORWARD_KEYS * FORWARD_KEYS; start < high; start += FORWARD_KEYS) {
    __syncthreads();  // the last tile's values and probabilities have been read
    load_tile<FORWARD_KEYS>(kv_tile, k + kv_start, start, num_keys, kv_stride);
    if (threadIdx.x < FORWARD_KEYS)
      key_segment[threadIdx.x] = segment_of(k_segments, b * num_keys, start + threadIdx.x, num_keys);
    __syncthreads();
    float s[4][FORWARD_KEYS / LANES];
    tile_dots(s, q_tile, kv_tile, group, lane);
    float correction[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int mask[FORWARD_KEYS / LANES], any = 0;
      float tile_max = minus_infinity(), tile_sum = 0.0f;
#pragma unroll
      for (int j = 0; j < FORWARD_KEYS / LANES; j++) {
        int key = lane + LANES * j;
        mask[j] = visible(row + r + offset, segment[r], start + key, key_segment[key], causal, window);
        any |= mask[j];
        s[r][j] *= scale;
        if (mask[j]) tile_max = fmaxf(tile_max, s[r][j]);
      }
      seen[r] |= any;
      float new_max = fmaxf(row_max[r], lanes_max(tile_max));
      // While every visible score was -inf, subtract 0: exp(-inf) is 0, but exp(-inf + inf) would be NaN.
      float shift = new_max == minus_infinity() ? 0.0f : new_max;
#pragma unroll
      for (int j = 0; j < FORWARD_KEYS / LANES; j++) {
        float p = mask[j] ? expf(s[r][j] - shift) : 0.0f;
        tile_sum += p;
        s[r][j] = mask[j] ? p : MASKED;
      }
      correction[r] = expf(row_max[r] - shift);
      row_sum[r] = fmaf(row_sum[r], correction[r], lanes_sum(tile_sum));
      row_max[r] = new_max;
    }
#pragma unroll
    for (int j = 0; j < FORWARD_KEYS / LANES; j++) {
      Quad column;
#pragma unroll
      for (int r = 0; r < 4; r++) column.at[r] = s[r][j];
      probs[lane + LANES * j][group] = column;
    }
    __syncthreads();  // keys have been read
    load_tile<FORWARD_KEYS>(kv_tile, v + kv_start, start, num_keys, kv_stride);
    __syncthreads();
    weighted_rows<FORWARD_KEYS>(part, probs, probs, kv_tile, group, lane);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int o = 0; o < OWN; o++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          total[r][o].at[e] = fmaf(total[r][o].at[e], correction[r], part[r][o].at[e]);
  }

#pragma unroll
  for (int r = 0; r < 4; r++) {
    bool any = lanes_max((float)seen[r]) > 0.0f;
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[r][o].at[e] = any ? total[r][o].at[e] / row_sum[r] : 0.0f;
    if (lane == 0 && row + r < num_queries)
      lse[(b * num_heads + head) * num_queries + row + r] = any ? row_max[r] + logf(row_sum[r]) : minus_infinity();
  }
  store_rows(out + q_start, total, 1.0f, row, num_queries, q_stride, lane);
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
