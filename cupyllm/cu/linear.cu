// Linear: y = x weight^T + bias, and its gradients d_x = d_y weight, d_weight = d_y^T x, d_bias = column sums of d_y.
//
// Shapes: N rows, K in, M out; x [N,K], weight [M,K], bias [M], y [N,M], all row-major; any N, M, K from 1.
// Macros: X_T x and d_x, Y_T y and d_y (float or bf16), W_T parameters (float, bf16 or f16). d_weight and d_bias float.
//
// The three products are one kernel, C[r,c] = sum_k A[r,k] B[c,k], that differ in which axis of A and B is contiguous:
//   forward  C = y        A = x    (k contiguous)  B = weight (k contiguous)  k runs over K
//   dgrad    C = d_x      A = d_y  (k contiguous)  B = weight (c contiguous)  k runs over M
//   wgrad    C = d_weight A = d_y  (r contiguous)  B = x      (c contiguous)  k runs over N
// A block of 256 threads makes a 64 x 64 tile of C, each thread 4 x 4 of it, in steps of 16 along k: the next step's
// operands travel from memory to registers while this step's are read from shared memory. 8.5 KB of static shared memory.
//
// Numerics: fp32 products and sums on every dtype, no tensor cores. Each element of C is summed by one thread in order
// of k, and the partial sum is promoted (added to a total) every 128 terms, which keeps the error at 3.4e-7 instead of
// 2.4e-6 at K = 25600. The order depends on nothing but k, so a row's bits depend neither on the number of rows nor on
// its place among them. Deterministic; no atomics. Needs sm_80.
#include "common.cuh"

#define TILE 64
#define STEP 16
#define PROMOTE 128
#define THREADS 256
#define MICRO 4                                // rows and columns of C a thread makes; THREADS * MICRO^2 = TILE^2
#define PITCH (TILE + MICRO)                   // floats between two k of a shared tile: 16-byte aligned
#define LOADS (TILE * STEP / THREADS)          // elements of each operand a thread loads every step

struct alignas(16) Float4 { float v[MICRO]; };

// One operand's walk along k. Each thread loads LOADS elements a step; neighbours in a warp load neighbours in memory,
// whichever axis that is. Elements outside the matrix are zero and so add nothing.
template <typename T, bool K_CONTIGUOUS> struct Operand {
  const T* next;   // this thread's first element of the coming step
  i64 between;     // elements from one of its loads to the next
  i64 advance;     // elements from one step to the next
  i64 rows_left;   // matrix rows from this thread's first row on
  i64 k_left;      // matrix k from this thread's first k of the coming step on
  int row, k;      // its first element's place in the tile
  float value[LOADS];

  DEVICE Operand(const T* matrix, i64 first_row, i64 rows, i64 depth) {
    int t = threadIdx.x;
    row = K_CONTIGUOUS ? t / STEP : t % TILE;
    k = K_CONTIGUOUS ? t % STEP : t / TILE;
    rows_left = rows - first_row - row;
    k_left = depth - k;
    next = matrix + (K_CONTIGUOUS ? (first_row + row) * depth + k : k * rows + first_row + row);
    between = K_CONTIGUOUS ? (THREADS / STEP) * depth : (THREADS / TILE) * rows;
    advance = K_CONTIGUOUS ? STEP : STEP * rows;
  }

  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      bool inside = K_CONTIGUOUS ? i * (THREADS / STEP) < rows_left && k_left > 0
                                 : rows_left > 0 && i * (THREADS / TILE) < k_left;
      value[i] = inside ? to_float(next[i * between]) : 0.0f;
    }
    next += advance;
    k_left -= STEP;
  }

  DEVICE void store(float (*tile)[PITCH]) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (K_CONTIGUOUS) tile[k][row + i * (THREADS / STEP)] = value[i];
      else tile[k + i * (THREADS / TILE)][row] = value[i];
    }
  }
};

// C[rows,cols] = A B^T + bias (=), or C += A B^T with `accumulate`. Blocks of one column tile are neighbours, so that
// they read its part of B (the weight, in the forward) from memory once.
template <typename A, bool A_K_CONTIGUOUS, typename B, bool B_K_CONTIGUOUS, typename C, typename BIAS>
DEVICE void product(const A* a, const B* b, const BIAS* bias, C* c, i64 rows, i64 cols, i64 depth, bool accumulate) {
  __shared__ __align__(16) float a_tile[STEP][PITCH];
  __shared__ __align__(16) float b_tile[STEP][PITCH];
  i64 row_tiles = (rows + TILE - 1) / TILE;
  i64 first_row = blockIdx.x % row_tiles * TILE, first_col = blockIdx.x / row_tiles * TILE;
  int thread_row = threadIdx.x / (TILE / MICRO) * MICRO, thread_col = threadIdx.x % (TILE / MICRO) * MICRO;
  Operand<A, A_K_CONTIGUOUS> a_walk(a, first_row, rows, depth);
  Operand<B, B_K_CONTIGUOUS> b_walk(b, first_col, cols, depth);
  float total[MICRO][MICRO] = {}, partial[MICRO][MICRO] = {};

  a_walk.load();
  b_walk.load();
  for (i64 k = 0; k < depth; k += STEP) {
    a_walk.store(a_tile);
    b_walk.store(b_tile);
    __syncthreads();
    a_walk.load();  // past the end, nothing is read
    b_walk.load();
#pragma unroll
    for (int kk = 0; kk < STEP; kk++) {
      Float4 x = *(const Float4*)&a_tile[kk][thread_row];
      Float4 w = *(const Float4*)&b_tile[kk][thread_col];
#pragma unroll
      for (int i = 0; i < MICRO; i++)
#pragma unroll
        for (int j = 0; j < MICRO; j++) partial[i][j] = fmaf(x.v[i], w.v[j], partial[i][j]);
    }
    if ((k + STEP) % PROMOTE == 0 || k + STEP >= depth) {
#pragma unroll
      for (int i = 0; i < MICRO; i++)
#pragma unroll
        for (int j = 0; j < MICRO; j++) {
          total[i][j] += partial[i][j];
          partial[i][j] = 0.0f;
        }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < MICRO; i++)
#pragma unroll
    for (int j = 0; j < MICRO; j++) {
      i64 row = first_row + thread_row + i, col = first_col + thread_col + j;
      if (row >= rows || col >= cols) continue;
      C* target = c + row * cols + col;
      float sum = total[i][j];
      if (bias) sum += to_float(bias[col]);
      if (accumulate) sum += to_float(*target);
      *target = from_float<C>(sum);
    }
}

// Grid: tiles(N) * tiles(M). y =; must not alias x. `bias` may be null.
KERNEL(linear_forward)(const X_T* x, const W_T* weight, const W_T* bias, Y_T* y, i64 N, i64 M, i64 K) {
  product<X_T, true, W_T, true>(x, weight, bias, y, N, M, K, false);
}

// Grid: tiles(N) * tiles(K). d_x =; must not alias d_y.
KERNEL(linear_dgrad)(const Y_T* d_y, const W_T* weight, X_T* d_x, i64 N, i64 M, i64 K) {
  product<Y_T, true, W_T, false>(d_y, weight, (const W_T*)nullptr, d_x, N, K, M, false);
}

// Grid: tiles(M) * tiles(K). d_weight = or, with accumulate, +=. With N = 0 the sum is 0.
KERNEL(linear_wgrad)(const Y_T* d_y, const X_T* x, float* d_weight, i64 N, i64 M, i64 K, i64 accumulate) {
  product<Y_T, false, X_T, false>(d_y, x, (const float*)nullptr, d_weight, M, K, N, accumulate != 0);
}

// d_bias[m] = (or +=) sum of d_y[n,m] over n. Grid: ceil(M / 32), block 256: lane = column, warp w adds the rows w,
// w + 8, ..; 128 rows a partial sum; then the eight warps' totals are added in order.
KERNEL(linear_bgrad)(const Y_T* d_y, float* d_bias, i64 N, i64 M, i64 accumulate) {
  const int warps = THREADS / 32;
  __shared__ float totals[warps][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 m = (i64)blockIdx.x * 32 + lane;
  float total = 0.0f;
  if (m < M)
    for (i64 first = warp; first < N; first += warps * PROMOTE) {
      i64 last = first + warps * PROMOTE < N ? first + warps * PROMOTE : N;
      float partial = 0.0f;
      for (i64 n = first; n < last; n += warps) partial += to_float(d_y[n * M + m]);
      total += partial;
    }
  totals[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && m < M) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; w++) sum += totals[w][lane];
    d_bias[m] = accumulate ? d_bias[m] + sum : sum;
  }
}
