// Products with quantised weights: y = x weight^T and d_x = d_y weight, weight [M,K] decoded on the way. Any shape.
//
// Shapes: N rows, K in, M out; x, d_x [N,K], y, d_y [N,M] row-major. codes, scales, nested: the device layout of
// cupyllm/quant/layout.py. There is no weight gradient: the weights are frozen.
// Macros: X_T of x and d_x, Y_T of y and d_y (float or bf16); FORMAT as in quantized.cuh.
// A block of 256 threads makes a 64 x 64 tile of the result, each thread 4 x 4 of it, in steps of 16 along the sum: the
// next step's operands travel from memory to registers while this step's are read from shared memory (linear.cu's way).
// 8.5 KB of static shared memory.
//
// Numerics: a weight is decoded to float32 (code times scale, rounded once; nf4's absmax rounded as bitsandbytes does);
// fp32 products and sums; each result is summed by one thread in order, promoted to a total every 128 terms. The order
// depends neither on the number of rows nor on a row's place. Deterministic; no atomics. Needs sm_80.
#include "quantized.cuh"

#define TILE 64
#define STEP 16
#define PROMOTE 128
#define THREADS 256
#define MICRO 4
#define PITCH (TILE + MICRO)
#define LOADS (TILE * STEP / THREADS)

struct alignas(16) Float4 { float v[MICRO]; };

// C[rows,cols] (=) sum over depth of a[row,i] * weight(col, i), with TRANSPOSED weight(i, col). a is row-major.
template <bool TRANSPOSED, typename A, typename C>
DEVICE void product(const A* a, const unsigned char* codes, const void* scales, const float* nested, C* c, i64 rows, i64 cols, i64 depth) {
  __shared__ __align__(16) float a_tile[STEP][PITCH];
  __shared__ __align__(16) float b_tile[STEP][PITCH];
  i64 M = TRANSPOSED ? depth : cols, K = TRANSPOSED ? cols : depth;
  i64 row_tiles = (rows + TILE - 1) / TILE;
  i64 first_row = blockIdx.x % row_tiles * TILE, first_col = blockIdx.x / row_tiles * TILE;
  int t = threadIdx.x;
  int thread_row = t / (TILE / MICRO) * MICRO, thread_col = t % (TILE / MICRO) * MICRO;
  // What this thread loads: one i and rows LOADS apart, but of the transposed weight one column and i LOADS apart.
  int load_row = t / STEP, load_i = t % STEP, load_col = t % TILE, load_j = t / TILE;
  float a_next[LOADS], b_next[LOADS], total[MICRO][MICRO] = {}, partial[MICRO][MICRO] = {};

  auto load = [&](i64 at) {
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      i64 row = first_row + load_row + l * (THREADS / STEP), i = at + load_i;
      a_next[l] = row < rows && i < depth ? to_float(a[row * depth + i]) : 0.0f;
      i64 col = first_col + (TRANSPOSED ? load_col : load_row + l * (THREADS / STEP));
      i64 j = at + (TRANSPOSED ? load_j + l * (THREADS / TILE) : load_i);
      b_next[l] = col < cols && j < depth ? weight_at(codes, scales, nested, TRANSPOSED ? j : col, TRANSPOSED ? col : j, M, K) : 0.0f;
    }
  };

  load(0);
  for (i64 i = 0; i < depth; i += STEP) {
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      a_tile[load_i][load_row + l * (THREADS / STEP)] = a_next[l];
      if (TRANSPOSED) b_tile[load_j + l * (THREADS / TILE)][load_col] = b_next[l];
      else b_tile[load_i][load_row + l * (THREADS / STEP)] = b_next[l];
    }
    __syncthreads();
    load(i + STEP);  // past the end, nothing is read
#pragma unroll
    for (int ii = 0; ii < STEP; ii++) {
      Float4 x = *(const Float4*)&a_tile[ii][thread_row];
      Float4 w = *(const Float4*)&b_tile[ii][thread_col];
#pragma unroll
      for (int r = 0; r < MICRO; r++)
#pragma unroll
        for (int s = 0; s < MICRO; s++) partial[r][s] = fmaf(x.v[r], w.v[s], partial[r][s]);
    }
    if ((i + STEP) % PROMOTE == 0 || i + STEP >= depth) {
#pragma unroll
      for (int r = 0; r < MICRO; r++)
#pragma unroll
        for (int s = 0; s < MICRO; s++) {
          total[r][s] += partial[r][s];
          partial[r][s] = 0.0f;
        }
    }
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < MICRO; r++)
#pragma unroll
    for (int s = 0; s < MICRO; s++) {
      i64 row = first_row + thread_row + r, col = first_col + thread_col + s;
      if (row < rows && col < cols) c[row * cols + col] = from_float<C>(total[r][s]);
    }
}

// Grid: tiles(N) * tiles(M). y =; must not alias x.
KERNEL(quantized_linear_forward)(const X_T* x, const unsigned char* codes, const void* scales, const float* nested, Y_T* y, i64 N, i64 M, i64 K) {
  product<false>(x, codes, scales, nested, y, N, M, K);
}

// Grid: tiles(N) * tiles(K). d_x =; must not alias d_y.
KERNEL(quantized_linear_dgrad)(const Y_T* d_y, const unsigned char* codes, const void* scales, const float* nested, X_T* d_x, i64 N, i64 M, i64 K) {
  product<true>(d_y, codes, scales, nested, d_x, N, K, M);
}
