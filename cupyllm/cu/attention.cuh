// Attention's tiles, shared by attention.cu and paged_attention.cu: the same code, so the same bits, whether the keys of a
// sequence lie in one run or in pages. Layout, threads, numerics and masking: see attention.cu.
#pragma once
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

// The keys and values of one sequence and KV head in one run; k and v point at element 0 of row 0 of the head.
struct Contiguous {
  const X_T* k;
  const X_T* v;
  i64 num_keys, stride;  // stride: elements from one row to the next
  DEVICE void load_keys(Quad (*tile)[STRIDE], i64 start) const {
    load_tile<FORWARD_KEYS>(tile, k, start, num_keys, stride);
  }
  DEVICE void load_values(Quad (*tile)[STRIDE], i64 start) const {
    load_tile<FORWARD_KEYS>(tile, v, start, num_keys, stride);
  }
};

// One CTA's tile of queries [first, first + ROWS) of one sequence and head, over every key that they see. q and out point
// at element 0 of row 0 of the head, segments (or null) at row 0 of the sequence. Rows of out are written (=), and of
// lse where it is not null. Keys loads tiles of FORWARD_KEYS rows, zeros behind num_keys.
template <typename Keys>
DEVICE void attend(const X_T* q, const Keys& keys, const int* q_segments, const int* k_segments, X_T* out, float* lse,
                   i64 first, i64 num_queries, i64 num_keys, i64 q_stride, float scale, i64 causal, i64 window) {
  __shared__ Quad q_tile[ROWS][STRIDE];
  __shared__ Quad kv_tile[FORWARD_KEYS][STRIDE];  // keys, then values
  __shared__ Quad probs[FORWARD_KEYS][GROUPS + 1];  // [key][query]
  __shared__ int key_segment[FORWARD_KEYS];

  i64 offset = num_keys - num_queries;
  int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  i64 row = first + 4 * group;

  load_tile<ROWS>(q_tile, q, first, num_queries, q_stride);
  int segment[4], seen[4];
  float row_max[4], row_sum[4];
  Quad total[4][OWN], part[4][OWN];
  clear_quads(total);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    segment[r] = segment_of(q_segments, 0, row + r, num_queries);
    seen[r] = 0;
    row_max[r] = minus_infinity();
    row_sum[r] = 0.0f;
  }

  i64 low = clamp(first + offset - window + 1, 0, num_keys);
  i64 high = causal ? clamp(first + ROWS + offset, 0, num_keys) : num_keys;
  for (i64 start = low / FORWARD_KEYS * FORWARD_KEYS; start < high; start += FORWARD_KEYS) {
    __syncthreads();  // the last tile's values and probabilities have been read
    keys.load_keys(kv_tile, start);
    if (threadIdx.x < FORWARD_KEYS)
      key_segment[threadIdx.x] = segment_of(k_segments, 0, start + threadIdx.x, num_keys);
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
    keys.load_values(kv_tile, start);
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
    if (lse && lane == 0 && row + r < num_queries)
      lse[row + r] = any ? row_max[r] + logf(row_sum[r]) : minus_infinity();
  }
  store_rows(out, total, 1.0f, row, num_queries, q_stride, lane);
}
