// Planted faults of memory accesses: bounds, initialisation, alignment, pointers. See __init__.py for the notation.
#include "common.cuh"

struct alignas(8) Float2 { float x, y; };
struct alignas(16) Float4 { float x, y, z, w; };

// ---- global memory: out of bounds ----

//@ grid 1, block 64: in 64, out 64
KERNEL(one_behind)(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x + PICK(1, 0)];  // <- out-of-bounds
}

//@ grid 1, block 64: in 64, out 64
KERNEL(one_before)(const float* x, float* y) {
  int i = threadIdx.x;
  y[i] = x[i] - (PICK(true, i > 0) ? x[i - 1] : 0.0f);  // <- out-of-bounds
}

//@ grid 5, block 32: in 5x32, out 5x32
KERNEL(one_row_down)(const float* x, float* y) {
  i64 row = blockIdx.x;
  y[row * 32 + threadIdx.x] = x[(row + PICK(1, 0)) * 32 + threadIdx.x];  // <- out-of-bounds
}

//@ grid 3, block 64: in 5x32, out 5x32
KERNEL(one_row_too_many)(const float* x, float* y) {
  i64 row = (i64)blockIdx.x * 2 + threadIdx.x / 32, at = row * 32 + threadIdx.x % 32;
  float value = x[row < 5 ? at : 0];
  if (PICK(row <= 5, row < 5)) y[at] = value;  // <- out-of-bounds
}

//@ grid 1, block 32: in 7x9, out 7x9
KERNEL(one_column_too_many)(const float* x, float* y) {
  for (int row = 0; row < 7; row++)
    for (int c = threadIdx.x; PICK(c <= 9, c < 9); c += 32)
      if (PICK(true, row * 9 + c < 63)) y[row * 9 + c % 9] = x[row * 9 + c];  // <- out-of-bounds
}

//@ grid 1, block 32: in 126, out 126
KERNEL(vector_over_the_end)(const float* x, float* y) {
  int i = threadIdx.x * 4;
  if (PICK(i < 126, i + 3 < 126)) {
    Float4 four = *(const Float4*)(x + i);  // <- out-of-bounds
    y[i] = four.x + four.y + four.z + four.w;
  }
}

//@ grid 1, block 32: in 64, out 32
KERNEL(wrong_stride)(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x * PICK(3, 2)];  // <- out-of-bounds
}

//@ grid 1, block 32: ids 32 of 33, in 32, out 32
KERNEL(gathered_id)(const int* ids, const float* x, float* y) {
  int id = ids[threadIdx.x];
  y[threadIdx.x] = PICK(true, id < 32) ? x[id] : 0.0f;  // <- out-of-bounds
}

//@ grid 1, block 64: in 64, counts 8
KERNEL(atomic_outside)(const float* x, int* counts) {
  int bin = (int)threadIdx.x % PICK(9, 8);
  if (x[threadIdx.x] == x[threadIdx.x]) atomicAdd(counts + bin, 1);  // <- out-of-bounds
}

// ---- global memory: never written ----

//@ grid 2, block 64: in 128, out 128
KERNEL(adds_to_nothing)(const float* x, float* y) {
  i64 i = (i64)blockIdx.x * 64 + threadIdx.x;
  y[i] = x[i] + PICK(y[i], 0.0f);  // <- uninitialised-read
}

//@ grid 1, block 64: hole 64 from 48, out 64
KERNEL(reads_the_tail)(const float* x, float* y) {
  int i = threadIdx.x;
  if (i < PICK(64, 48)) y[i] = x[i];  // <- uninitialised-read
}

//@ grid 1, block 32: out 32, in 32, out 32
KERNEL(index_never_written)(const float* ids, const float* x, float* y) {
  int id = PICK(__float_as_int(ids[threadIdx.x]) & 31, threadIdx.x);  // <- uninitialised-read
  y[threadIdx.x] = x[id];
}

//@ grid 1, block 32: hole 128 from 126, out 32
KERNEL(vector_half_written)(const float* x, float* y) {
  int i = threadIdx.x * 4;
  if (PICK(true, i + 3 < 126)) {
    Float4 four = *(const Float4*)(x + i);  // <- uninitialised-read
    y[threadIdx.x] = four.x + four.w;
  }
}

//@ grid 1, block 32: in 32, out 32
KERNEL(reads_before_it_writes)(const float* x, float* y) {
  int i = threadIdx.x;
  volatile float* z = y;
  if (PICK(false, true)) z[i] = x[i];
  z[i] = z[i] * 2.0f;  // <- uninitialised-read
}

// ---- shared memory: never written ----

//@ grid 2, block 64: in 64, out 64x2
KERNEL(tile_tail)(const float* x, float* y) {
  __shared__ float tile[64];
  if (threadIdx.x < PICK(63, 64)) tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[(i64)blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x];  // <- uninitialised-read
}

//@ grid 1, block 32: in 32x8, out 32
KERNEL(tile_padding)(const float* x, float* y) {
  __shared__ float tile[8][33];
  for (int r = 0; r < 8; r++) tile[r][threadIdx.x] = x[r * 32 + threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
  for (int r = 0; r < 8; r++) sum += tile[r][threadIdx.x + PICK(1, 0)];  // <- uninitialised-read
  y[threadIdx.x] = sum;
}

//@ grid 1, block 64, shared 512: in 64, out 64
KERNEL(dynamic_never_written)(const float* x, float* y) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x + PICK(64, 0)];  // <- uninitialised-read
}

//@ grid 3, block 32: in 96, out 96
KERNEL(first_step_reads)(const float* x, float* y) {
  __shared__ float tile[2][32];
  float sum = 0.0f;
  for (int step = 0; step < 3; step++) {
    tile[step % 2][threadIdx.x] = x[step * 32 + threadIdx.x];
    __syncthreads();
    sum += PICK(true, step > 0) ? tile[(step + 1) % 2][31 - threadIdx.x] : 0.0f;  // <- uninitialised-read
    __syncthreads();
  }
  y[(i64)blockIdx.x * 32 + threadIdx.x] = sum;
}

//@ grid 1, block 64: counts 4
KERNEL(bins_not_cleared)(int* counts) {
  __shared__ int bins[4];
  if (PICK(threadIdx.x < 3, threadIdx.x < 4)) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[threadIdx.x % 4], 1);  // <- uninitialised-read
  __syncthreads();
  if (threadIdx.x < 4) counts[threadIdx.x] = threadIdx.x < PICK(3, 4) ? bins[threadIdx.x] : 0;
}

// The write of another thread, with no barrier between, is no value either.
//@ grid 1, block 96: in 96, out 96
KERNEL(broadcast_at_once)(const float* x, float* y) {
  __shared__ float scale;
  if (threadIdx.x == 0) scale = x[0] * 2.0f;
  FIX(__syncthreads();)
  y[threadIdx.x] = x[threadIdx.x] * scale;  // <- uninitialised-read
}

// ---- local memory: never written ----

//@ grid 1, block 32: in 32, out 32, int 8
KERNEL(local_one_short)(const float* x, float* y, i64 n) {
  float mine[8];
  for (int i = 0; i < n - PICK(1, 0); i++) mine[i] = x[threadIdx.x] + i;
  y[threadIdx.x] = mine[(threadIdx.x + n) % 8];  // <- uninitialised-read
}

//@ grid 2, block 32: in 64, out 64, int 3
KERNEL(local_stack)(const float* x, float* y, i64 n) {
  float stack[16];
  i64 at = (i64)blockIdx.x * 32 + threadIdx.x, top = 0;
  for (i64 i = 0; i <= n; i++) stack[top++] = x[at] * i;
  y[at] = stack[top - PICK(0, 1)];  // <- uninitialised-read
}

//@ grid 1, block 32: ids 32 of 4, out 32
KERNEL(local_unseen_id)(const int* ids, float* y) {
  float weights[4];
  for (int i = 0; i < 4; i++) weights[PICK(ids[i] & 2, ids[i])] = (float)i;
  y[threadIdx.x] = weights[ids[threadIdx.x]];  // <- uninitialised-read
}

// ---- alignment ----

//@ grid 1, block 16: in 68, out 16
KERNEL(four_floats_off_by_one)(const float* x, float* y) {
  Float4 four = *(const Float4*)(x + threadIdx.x * 4 + PICK(1, 0));  // <- misaligned
  y[threadIdx.x] = four.x + four.y + four.z + four.w;
}

//@ grid 1, block 32: in 7x10, out 7
KERNEL(odd_pitch)(const float* x, float* y) {
  if (threadIdx.x >= 7) return;
  Float2 two = *(const Float2*)(x + threadIdx.x * PICK(9, 10));  // <- misaligned
  y[threadIdx.x] = two.x + two.y;
}

//@ grid 1, block 32: in 32, out 32
KERNEL(shared_pair)(const float* x, float* y) {
  __shared__ __align__(16) float tile[68];
  tile[2 * threadIdx.x] = tile[2 * threadIdx.x + 1] = x[threadIdx.x];
  if (threadIdx.x < 4) tile[64 + threadIdx.x] = 0.0f;
  __syncthreads();
  Float2 two = *(const Float2*)&tile[2 * threadIdx.x + PICK(1, 0)];  // <- misaligned
  y[threadIdx.x] = two.x + two.y;
}

//@ grid 1, block 16: in 64, out 66
KERNEL(store_off_by_half)(const float* x, float* y) {
  Float4 four = *(const Float4*)(x + threadIdx.x * 4);
  *(Float4*)(y + threadIdx.x * 4 + PICK(2, 0)) = four;  // <- misaligned
}

// ---- shared memory: out of bounds ----

//@ grid 1, block 64: in 64, out 64
KERNEL(tile_one_behind)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x + PICK(1, 0)] = x[threadIdx.x];  // <- out-of-bounds
  if (threadIdx.x == 0 && PICK(true, false)) tile[0] = 0.0f;
  __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}

//@ grid 1, block 64: in 64, out 64
KERNEL(into_the_next_array)(const float* x, float* y) {
  __shared__ float first[64];
  __shared__ float second[64];
  first[threadIdx.x] = x[threadIdx.x];
  second[threadIdx.x] = -x[threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
  for (int i = threadIdx.x; i < PICK(68, 64); i++) sum += first[i];  // <- out-of-bounds
  y[threadIdx.x] = sum + second[63 - threadIdx.x];
}

//@ grid 1, block 64: in 64, out 64
KERNEL(tile_before_the_start)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[(int)threadIdx.x - PICK(1, 0)];  // <- out-of-bounds
}

//@ grid 1, block 64, shared 256: in 64, out 64
KERNEL(dynamic_too_small)(const float* x, float* y) {
  extern __shared__ float tile[];
  tile[threadIdx.x + PICK(4, 0)] = x[threadIdx.x];  // <- out-of-bounds
  __syncthreads();
  y[threadIdx.x] = threadIdx.x < 4 ? 0.0f : tile[threadIdx.x];
}

//@ grid 1, block 32: in 32x32, out 32x32
KERNEL(transposed_rows_for_columns)(const float* x, float* y) {
  __shared__ float tile[16][33];
  for (int r = 0; r < PICK(32, 16); r++) tile[r][threadIdx.x] = x[r * 32 + threadIdx.x];  // <- out-of-bounds
  __syncthreads();
  for (int r = 0; r < 16; r++) y[r * 32 + threadIdx.x] = tile[15 - r][31 - threadIdx.x];
}

// ---- null pointers and freed memory ----

//@ grid 1, block 32: null, out 32
KERNEL(null_load)(const float* bias, float* y) {
  float sum = 1.0f;
  if (PICK(true, bias != nullptr)) sum += bias[threadIdx.x];  // <- out-of-bounds
  y[threadIdx.x] = sum;
}

//@ grid 2, block 32: in 64, null
KERNEL(null_store)(const float* x, float* y) {
  i64 i = (i64)blockIdx.x * 32 + threadIdx.x;
  if (PICK(true, y != nullptr)) y[i] = x[i];  // <- out-of-bounds
}

//@ grid 1, block 32: null, out 32
KERNEL(null_row)(const Float4* x, float* y) {
  Float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
  if (PICK(true, x != nullptr)) four = x[threadIdx.x + 100];  // <- out-of-bounds
  y[threadIdx.x] = four.x + four.y + four.z + four.w;
}

//@ grid 1, block 32: freed 32, in 32, out 32
KERNEL(freed_load)(const float* gone, const float* there, float* y) {
  y[threadIdx.x] = PICK(gone, there)[threadIdx.x];  // <- out-of-bounds
}

//@ grid 1, block 32: freed 32, in 32, out 32
KERNEL(freed_store)(float* gone, const float* x, float* there) {
  PICK(gone, there)[threadIdx.x] = x[threadIdx.x];  // <- out-of-bounds
}

//@ grid 1, block 32: freed 32, counts 32
KERNEL(freed_update)(int* gone, int* there) {
  atomicAdd(PICK(gone, there) + threadIdx.x % 4, 1);  // <- out-of-bounds
}
