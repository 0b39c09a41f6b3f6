// Test kernels for what the kernels of training and inference have not got yet: cp.async pipelines, ldmatrix and mma as an
// sm_80 kernel has them, dynamic shared memory, warps that meet at __syncwarp, atomics.
#include "common.cuh"

// ---- cp.async, ldmatrix and mma ----

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// 16 bytes from global to shared memory behind the thread's back; zeros where `inside` is false, and nothing is read.
DEVICE void copy_16(void* shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// 4 bytes, which may lie anywhere a float may.
DEVICE void copy_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Ends the group of copies issued since the last one; an empty group is done at once.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are not done.
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8.
DEVICE void load_matrices(u32 (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

DEVICE void load_matrices_transposed(u32 (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

// c[16,8] += a[16,16] b[16,8], fragments as PTX lays them out.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- matrix products ----
//
// C = A B^T and C = A B on tensor cores: a triple-buffered tile pipeline as an sm_80 kernel has it.
//
// Layout: a bf16 [M,K]; b bf16 [N,K] (gemm_nt) or [K,N] (gemm_nn); c float [M,N] (=); K and, for gemm_nn, N are
//   multiples of 8, so that rows start at 16 bytes. Any M, N, K beside that.
// Grid: (ceil(N / 64), ceil(M / 64)); 128 threads: 4 warps of 32 x 32 of C. Shared: 3 stages of 2 tiles, 30 KiB.
// Rows of shared tiles are padded by 16 bytes, so that ldmatrix's eight rows lie in different banks.
// Pipeline: two stages are under way while one is multiplied. One barrier a step is enough: behind it every thread has
//   waited for its part of this step's tiles, and has read the stage that is loaded next (the one of the step before).

#define TILE 64
#define STEP 32
#define STAGES 3
#define THREADS 128
#define K_PITCH (STEP + 8)  // elements from row to row of a tile with k along its rows
#define N_PITCH (TILE + 8)  // of a tile with n along its rows

// tile[r][..] = 64 rows of 32 elements of x [rows,cols] from (first, start) on; zeros outside.
DEVICE void load_rows(bf16 (*tile)[K_PITCH], const bf16* x, i64 rows, i64 cols, i64 first, i64 start) {
  for (int chunk = threadIdx.x; chunk < TILE * STEP / 8; chunk += THREADS) {
    int row = chunk / (STEP / 8), col = chunk % (STEP / 8) * 8;
    bool inside = first + row < rows && start + col < cols;
    copy_16(&tile[row][col], inside ? x + (first + row) * cols + start + col : x, inside);
  }
}

// tile[k][..] = 32 rows of 64 elements.
DEVICE void load_columns(bf16 (*tile)[N_PITCH], const bf16* x, i64 rows, i64 cols, i64 first, i64 start) {
  for (int chunk = threadIdx.x; chunk < STEP * TILE / 8; chunk += THREADS) {
    int row = chunk / (TILE / 8), col = chunk % (TILE / 8) * 8;
    bool inside = first + row < rows && start + col < cols;
    copy_16(&tile[row][col], inside ? x + (first + row) * cols + start + col : x, inside);
  }
}

DEVICE void store_tile(float* c, const float (&sum)[2][4][4], i64 first_row, i64 first_col, i64 M, i64 N) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        i64 row = first_row + 16 * i + lane / 4 + 8 * (e / 2), col = first_col + 8 * j + lane % 4 * 2 + e % 2;
        if (row < M && col < N) c[row * N + col] = sum[i][j][e];
      }
}

// c = a b^T.
KERNEL(gemm_nt)(const bf16* a, const bf16* b, float* c, i64 M, i64 N, i64 K) {
  __shared__ __align__(16) bf16 a_tiles[STAGES][TILE][K_PITCH];
  __shared__ __align__(16) bf16 b_tiles[STAGES][TILE][K_PITCH];
  i64 first_row = (i64)blockIdx.y * TILE, first_col = (i64)blockIdx.x * TILE;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;
  float sum[2][4][4] = {};

  for (int stage = 0; stage < STAGES - 1; stage++) {
    load_rows(a_tiles[stage], a, M, K, first_row, stage * STEP);
    load_rows(b_tiles[stage], b, N, K, first_col, stage * STEP);
    copy_commit();
  }
  int stage = 0, coming = STAGES - 1;
  for (i64 start = 0; start < K; start += STEP) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    i64 ahead = start + (STAGES - 1) * STEP;
    if (ahead < K) {
      load_rows(a_tiles[coming], a, M, K, first_row, ahead);
      load_rows(b_tiles[coming], b, N, K, first_col, ahead);
    }
    copy_commit();  // an empty group, too, so that the wait above counts steps
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 x[2][4], w[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++)
        load_matrices(x[i], &a_tiles[stage][warp_row + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; j++)
        load_matrices(w[j], &b_tiles[stage][warp_col + 16 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_add(sum[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    coming = coming + 1 == STAGES ? 0 : coming + 1;
  }
  store_tile(c, sum, first_row + warp_row, first_col + warp_col, M, N);
}

// c = a b. Two stages; the next one is loaded behind a second barrier, when this one has been read.
KERNEL(gemm_nn)(const bf16* a, const bf16* b, float* c, i64 M, i64 N, i64 K) {
  __shared__ __align__(16) bf16 a_tiles[2][TILE][K_PITCH];
  __shared__ __align__(16) bf16 b_tiles[2][STEP][N_PITCH];
  i64 first_row = (i64)blockIdx.y * TILE, first_col = (i64)blockIdx.x * TILE;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;
  float sum[2][4][4] = {};

  load_rows(a_tiles[0], a, M, K, first_row, 0);
  load_columns(b_tiles[0], b, K, N, 0, first_col);
  copy_commit();
  int stage = 0;
  for (i64 start = 0; start < K; start += STEP) {
    if (start + STEP < K) {
      load_rows(a_tiles[stage ^ 1], a, M, K, first_row, start + STEP);
      load_columns(b_tiles[stage ^ 1], b, K, N, start + STEP, first_col);
    }
    copy_commit();
    copy_wait<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 x[2][4], w[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++)
        load_matrices(x[i], &a_tiles[stage][warp_row + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; j++)
        load_matrices_transposed(w[j], &b_tiles[stage][k + lane % 16][warp_col + 16 * j + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_add(sum[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
    }
    __syncthreads();  // this stage has been read
    stage ^= 1;
  }
  store_tile(c, sum, first_row + warp_row, first_col + warp_col, M, N);
}

// ---- smaller pipelines ----

#define WIDTH 128

// y[i] = x[i - 1] + x[i] + x[i + 1] (=), zeros outside; CTA b does every gridDim.x-th run of 128. Block 128.
// Shared (dynamic): 2 x 130 floats.
KERNEL(stencil)(const float* x, float* y, i64 n) {
  extern __shared__ float tiles[];
  const int pitch = WIDTH + 2;
  int t = threadIdx.x, stage = 0;
  i64 stride = (i64)gridDim.x * WIDTH;

  auto load = [&](int into, i64 first) {
    float* tile = tiles + into * pitch;
    for (int j = t; j < pitch; j += WIDTH) {
      i64 i = first + j - 1;
      if (i >= 0 && i < n) copy_4(tile + j, x + i);
      else tile[j] = 0.0f;
    }
  };

  i64 first = (i64)blockIdx.x * WIDTH;
  load(0, first);
  copy_commit();
  for (; first < n; first += stride) {
    if (first + stride < n) load(stage ^ 1, first + stride);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    const float* tile = tiles + stage * pitch;
    if (first + t < n) y[first + t] = tile[t] + tile[t + 1] + tile[t + 2];
    __syncthreads();  // this stage has been read
    stage ^= 1;
  }
}

// y[b] = x[b] transposed, 32 x 32 (=), one warp a matrix, 4 a block; the last block's may not exist. Rows of the shared
// tile are read by other lanes of the same warp only. Block 128, grid ceil(n / 4).
KERNEL(warp_transpose)(const float* x, float* y, i64 n) {
  __shared__ float tiles[4][32][33];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 matrix = (i64)blockIdx.x * 4 + warp;
  if (matrix >= n) return;
  for (int row = 0; row < 32; row++) tiles[warp][row][lane] = x[(matrix * 32 + row) * 32 + lane];
  __syncwarp();
  for (int row = 0; row < 32; row++) y[(matrix * 32 + row) * 32 + lane] = tiles[warp][lane][row];
}

// Inclusive sums of runs of 256 (=) by doubling steps. Block 256, grid ceil(n / 256).
KERNEL(scan)(const float* x, float* y, i64 n) {
  __shared__ float sums[256];
  int t = threadIdx.x;
  i64 i = (i64)blockIdx.x * 256 + t;
  sums[t] = i < n ? x[i] : 0.0f;
  for (int step = 1; step < 256; step *= 2) {
    __syncthreads();
    float before = t >= step ? sums[t - step] : 0.0f;
    __syncthreads();
    sums[t] += before;
  }
  if (i < n) y[i] = sums[t];
}

// counts[v] += how often v occurs in ids [n], 64 values; ids outside are left out. Block 128, grid any.
KERNEL(histogram)(const int* ids, int* counts, i64 n) {
  __shared__ int bins[64];
  if (threadIdx.x < 64) bins[threadIdx.x] = 0;
  __syncthreads();
  for (i64 i = (i64)blockIdx.x * 128 + threadIdx.x; i < n; i += (i64)gridDim.x * 128) {
    int id = ids[i];
    if (id >= 0 && id < 64) atomicAdd(&bins[id], 1);
  }
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd(&counts[threadIdx.x], bins[threadIdx.x]);
}
