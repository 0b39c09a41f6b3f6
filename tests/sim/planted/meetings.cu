// Planted faults of threads that meet: barriers, shuffles, votes and their member masks. See __init__.py for the notation.
#include "common.cuh"

// ---- barriers in divergent code ----

//@ grid 1, block 64: in 64, out 64
KERNEL(barrier_in_a_branch)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (PICK(threadIdx.x < 32, true)) __syncthreads();  // <- divergent-barrier
  FIX(__syncthreads();)
  float other = threadIdx.x < 32 ? tile[threadIdx.x] : 0.0f;
  __syncthreads();  // <- divergent-barrier
  y[threadIdx.x] = other;
}

//@ grid 1, block 64: in 64, out 64
KERNEL(barrier_in_both_branches)(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (PICK(threadIdx.x % 2 == 0, true)) {
    __syncthreads();  // <- divergent-barrier
    value += 1.0f;
  } else {
    __syncthreads();  // <- divergent-barrier
    value -= 1.0f;
  }
  y[threadIdx.x] = value;
}

//@ grid 1, block 96: ids 96 of 4, out 96
KERNEL(barrier_in_a_loop)(const int* ids, float* y) {
  float sum = 0.0f;
  for (int i = 0; i < PICK(ids[threadIdx.x] + 1, 3); i++) {
    sum += i;
    __syncthreads();  // <- divergent-barrier
  }
  __syncthreads();  // <- divergent-barrier
  y[threadIdx.x] = sum;
}

//@ grid 2, block 64: in 64, out 128
KERNEL(barrier_or_shuffle)(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (PICK(threadIdx.x % 32 < 16, false)) {
    __syncthreads();  // <- divergent-barrier
  } else {
    value = __shfl_xor_sync(FULL_MASK, value, 1);
  }
  y[(i64)blockIdx.x * 64 + threadIdx.x] = value;
}

// ---- shuffles and votes in divergent code ----

//@ grid 1, block 32: in 32, out 32
KERNEL(shuffle_in_a_branch)(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (PICK(threadIdx.x < 16, true)) value += __shfl_xor_sync(FULL_MASK, value, 8);  // <- divergent-shuffle
  FIX(if (threadIdx.x >= 16) value = x[threadIdx.x];)
  __syncthreads();
  y[threadIdx.x] = value;
}

//@ grid 1, block 64: ids 64 of 4, out 64
KERNEL(shuffle_in_a_loop)(const int* ids, float* y) {
  float sum = 1.0f;
  for (int i = 0; i < PICK(ids[threadIdx.x], 4); i++) sum += __shfl_down_sync(FULL_MASK, sum, 1);  // <- divergent-shuffle
  __syncwarp();
  y[threadIdx.x] = sum;
}

//@ grid 1, block 64: in 64, out 64
KERNEL(vote_in_a_branch)(const float* x, float* y) {
  bool any = false;
  if (PICK(x[threadIdx.x] > 0.0f, true)) any = __any_sync(FULL_MASK, threadIdx.x == 3);  // <- divergent-shuffle
  __syncwarp();
  y[threadIdx.x] = any ? 1.0f : 0.0f;
}

//@ grid 1, block 32: in 32, out 32
KERNEL(warp_barrier_in_a_branch)(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (threadIdx.x % 2) {
    value += 1.0f;
    __syncwarp(PICK(FULL_MASK, 0xaaaaaaaau));  // <- divergent-shuffle
  }
  value += __shfl_xor_sync(FULL_MASK, value, 1);
  y[threadIdx.x] = value;
}

// ---- lanes that are not there ----

//@ grid 1, block 64: in 64, out 64
KERNEL(from_a_lane_that_left)(const float* x, float* y) {
  if (threadIdx.x >= 50) return;
  float value = x[threadIdx.x];
  y[threadIdx.x] = value + __shfl_down_sync(FULL_MASK, value, PICK(2, 0));  // <- divergent-shuffle
}

//@ grid 1, block 40: in 40, out 40
KERNEL(from_a_lane_that_never_was)(const float* x, float* y) {
  float value = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor_sync(FULL_MASK, value, PICK(16, 4));  // <- divergent-shuffle
}

//@ grid 1, block 32: in 32, out 32
KERNEL(sum_behind_a_return)(const float* x, float* y) {
  if (threadIdx.x > PICK(29, 31)) return;
  float sum = warp_sum(x[threadIdx.x]);  // <- divergent-shuffle
  if (threadIdx.x == 0) y[0] = sum;
}

// ---- member masks ----

//@ grid 1, block 32: in 32, out 32
KERNEL(not_a_member_itself)(const float* x, float* y) {
  float value = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor_sync(PICK(0x0000ffffu, FULL_MASK), value, 1);  // <- divergent-shuffle
}

//@ grid 1, block 32: in 32, out 32
KERNEL(source_is_no_member)(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (threadIdx.x < 16) value = __shfl_sync(0x0000ffffu, value, threadIdx.x + PICK(8, 0));  // <- divergent-shuffle
  y[threadIdx.x] = value;
}

//@ grid 1, block 64: in 64, out 64
KERNEL(mask_of_an_old_ballot)(const float* x, float* y) {
  float value = x[threadIdx.x];
  unsigned mask = __ballot_sync(FULL_MASK, threadIdx.x % 32 < 20);
  bool takes_part = threadIdx.x % 32 < PICK(24, 20);
  if (takes_part) value = __shfl_xor_sync(mask, value, 1);  // <- divergent-shuffle
  y[threadIdx.x] = value;
}
