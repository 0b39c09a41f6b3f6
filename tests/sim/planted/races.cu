// Planted races: in shared memory, within a warp, in global memory, between CTAs. See __init__.py for the notation.
#include "common.cuh"

// ---- shared memory: a read before the write has happened ----

//@ grid 2, block 64: in 128, out 128
KERNEL(read_neighbour)(const float* x, float* y) {
  __shared__ float tile[64];
  i64 i = (i64)blockIdx.x * 64 + threadIdx.x;
  tile[threadIdx.x] = x[i];           // <- race
  FIX(__syncthreads();)
  y[i] = tile[(threadIdx.x + 32) % 64];  // <- race
}

//@ grid 1, block 128: in 128, out 1
KERNEL(tree_without_barriers)(const float* x, float* y) {
  __shared__ float sums[128];
  sums[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];  // <- race
    FIX(__syncthreads();)
  }
  if (threadIdx.x == 0) y[0] = sums[0];
}

//@ grid 1, block 96: in 96, out 96
KERNEL(broadcast)(const float* x, float* y) {
  __shared__ float scale;
  if (threadIdx.x == 0) scale = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) scale = x[0] * 2.0f;  // <- race
  FIX(__syncthreads();)
  y[threadIdx.x] = x[threadIdx.x] * scale;  // <- race
}

//@ grid 1, block 64: in 64, out 64
KERNEL(half_a_barrier)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];  // <- race
  PICK(__syncwarp(), __syncthreads());
  y[threadIdx.x] = tile[63 - threadIdx.x];  // <- race
}

// ---- shared memory: a write before the read has happened ----

//@ grid 1, block 64: in 64, out 64
KERNEL(shift_in_place)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float next = tile[(threadIdx.x + 1) % 64];  // <- race
  FIX(__syncthreads();)
  tile[threadIdx.x] = next;  // <- race
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];
}

//@ grid 2, block 32: in 4x32, out 64
KERNEL(tile_used_again)(const float* x, float* y) {
  __shared__ float tile[32];
  float sum = 0.0f;
  for (int step = 0; step < 4; step++) {
    tile[threadIdx.x] = x[step * 32 + threadIdx.x];  // <- race
    __syncthreads();
    sum += tile[31 - threadIdx.x];  // <- race
    FIX(__syncthreads();)
  }
  y[(i64)blockIdx.x * 32 + threadIdx.x] = sum;
}

//@ grid 1, block 64: in 64, out 64
KERNEL(two_reductions)(const float* x, float* y) {
  __shared__ float sums[2];
  float first = warp_sum(x[threadIdx.x]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = first;
  __syncthreads();
  float mean = (sums[0] + sums[1]) / 64.0f;  // <- race
  FIX(__syncthreads();)
  float second = warp_sum((x[threadIdx.x] - mean) * (x[threadIdx.x] - mean));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = second;  // <- race
  __syncthreads();
  y[threadIdx.x] = sums[0] + sums[1];
}

// ---- shared memory: two writes ----

//@ grid 1, block 64: in 64, out 1
KERNEL(last_one_wins)(const float* x, float* y) {
  __shared__ float best;
  if (threadIdx.x == 0) best = 0.0f;
  __syncthreads();
  if (PICK(true, threadIdx.x == 5)) best = x[threadIdx.x];  // <- race
  __syncthreads();
  if (threadIdx.x == 0) y[0] = best;
}

//@ grid 1, block 32: in 68, out 64
KERNEL(runs_overlap)(const float* x, float* y) {
  __shared__ float tile[68];
  for (int i = 0; i < PICK(3, 2); i++) tile[2 * threadIdx.x + i] = x[2 * threadIdx.x + i] + threadIdx.x;  // <- race
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];
}

//@ grid 3, block 64: in 64, out 192
KERNEL(cleared_while_filled)(const float* x, float* y) {
  __shared__ float tile[64];
  if (threadIdx.x < 2)
    for (int i = threadIdx.x; i < 64; i += 2) tile[i] = 0.0f;  // <- race
  FIX(__syncthreads();)
  if (threadIdx.x % 2) tile[threadIdx.x] = x[threadIdx.x];  // <- race
  __syncthreads();
  y[(i64)blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x];
}

//@ grid 1, block 64: in 64, counts 1
KERNEL(atomic_and_plain)(const float* x, int* counts) {
  __shared__ int seen;
  if (threadIdx.x == 0) seen = 0;
  __syncthreads();
  if (x[threadIdx.x] > 0.0f) atomicAdd(&seen, 1);  // <- race
  FIX(__syncthreads();)
  if (threadIdx.x == 40) counts[0] = seen;  // <- race
}

// ---- within a warp ----

//@ grid 1, block 32: in 32, out 32
KERNEL(warp_exchange)(const float* x, float* y) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];  // <- race
  FIX(__syncwarp();)
  y[threadIdx.x] = tile[31 - threadIdx.x];  // <- race
}

//@ grid 1, block 64: in 64, out 2
KERNEL(warp_tree)(const float* x, float* y) {
  __shared__ float sums[64];
  int lane = threadIdx.x % 32;
  float* mine = sums + threadIdx.x / 32 * 32;
  mine[lane] = x[threadIdx.x];
  __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    if (lane < half) mine[lane] += mine[lane + half];  // <- race
    PICK(asm volatile("" ::: "memory"), __syncwarp());
  }
  if (lane == 0) y[threadIdx.x / 32] = mine[0];
}

//@ grid 1, block 32: in 32, out 32
KERNEL(warp_overwrites)(const float* x, float* y) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  float next = tile[(threadIdx.x + 1) % 32];  // <- race
  FIX(__syncwarp();)
  tile[threadIdx.x] = next * 2.0f;  // <- race
  __syncwarp();
  y[threadIdx.x] = tile[threadIdx.x];
}

// ---- global memory, within a CTA ----

//@ grid 1, block 64: in 64, out 64, out 64
KERNEL(exchange_through_memory)(const float* x, float* scratch, float* y) {
  scratch[threadIdx.x] = x[threadIdx.x];  // <- race
  FIX(__syncthreads();)
  y[threadIdx.x] = scratch[threadIdx.x ^ 33];  // <- race
}

//@ grid 1, block 64: in 64
KERNEL(smooth_in_place)(float* x) {
  int i = threadIdx.x;
  float mean = 0.5f * (x[i] + x[i < 63 ? i + 1 : i]);  // <- race
  FIX(__syncthreads();)
  x[i] = mean;  // <- race
}

//@ grid 2, block 32: in 64, out 128
KERNEL(pairs_overlap)(const float* x, float* y) {
  i64 i = (i64)blockIdx.x * 32 + threadIdx.x, at = (i64)blockIdx.x * 64 + threadIdx.x * PICK(1, 2);
  y[at] = x[i];         // <- race
  y[at + 1] = -x[i];    // <- race
}

// ---- between CTAs ----

//@ grid 3, block 32: in 32, out 1
KERNEL(every_cta_writes)(const float* x, float* y) {
  if (threadIdx.x == 0 && PICK(true, blockIdx.x == 0)) y[0] = x[blockIdx.x];  // <- race-between-ctas
}

//@ grid 4, block 32: in 32x4, zeros 32
KERNEL(column_sums)(const float* x, float* y) {
  float value = x[(i64)blockIdx.x * 32 + threadIdx.x];
  PICK(y[threadIdx.x] += value, atomicAdd(y + threadIdx.x, value));  // <- race-between-ctas
}

//@ grid 4, block 32: in 128, out 128
KERNEL(halo_in_place)(float* x, float* y) {
  i64 i = (i64)blockIdx.x * 32 + threadIdx.x;
  float left = i > 0 ? x[i - 1] : 0.0f;  // <- race-between-ctas
  PICK(__syncthreads(), (void)0);
  PICK(x, y)[i] = left;  // <- race-between-ctas
}

//@ grid 2, block 32: in 64, out 64, out 64
KERNEL(reads_another_cta)(const float* x, float* scratch, float* y) {
  i64 i = (i64)blockIdx.x * 32 + threadIdx.x;
  scratch[i] = x[i];  // <- race-between-ctas
  __syncthreads();
  y[i] = scratch[PICK(63 - i, (i64)blockIdx.x * 32 + 31 - threadIdx.x)];  // <- race-between-ctas
}

// CTAs come in batches: these two are far apart.
//@ grid 300, block 256: in 256, out 300
KERNEL(first_and_last_cta)(const float* x, float* y) {
  i64 at = blockIdx.x == 299 ? PICK(0, 299) : (i64)blockIdx.x;
  if (threadIdx.x == 0) y[at] = x[blockIdx.x % 256];  // <- race-between-ctas
}

//@ grid 2, block 32: counts 2, out 32
KERNEL(counter_read_plainly)(int* counts, float* y) {
  if (threadIdx.x == 0) atomicAdd(counts, 1);  // <- race-between-ctas
  if (blockIdx.x == 1) y[threadIdx.x] = (float)PICK(counts[0], counts[1]);  // <- race-between-ctas
}
