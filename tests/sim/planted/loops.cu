// Planted loops that never end: every one must end with the budget. See __init__.py for the notation.
#include "common.cuh"

//@ grid 1, block 32: counts 1
KERNEL(waits_for_a_flag)(volatile int* flag) {
  if (PICK(true, false))
    while (flag[0] == 0) {  // <- budget
    }
  if (threadIdx.x == 0) flag[0] = 2;
}

// CTAs run in order, in batches: the first waits for one that has not begun.
//@ grid 300, block 256: counts 1
KERNEL(waits_for_another_cta)(int* flag) {
  if (threadIdx.x) return;
  if (blockIdx.x == PICK(299, 0)) atomicExch(flag, 1);
  while (atomicAdd(flag, 0) == 0) {  // <- budget
  }
}

//@ grid 1, block 32: counts 2
KERNEL(lock_never_released)(int* lock) {
  if (PICK(true, threadIdx.x == 0)) {
    while (atomicCAS(lock, 0, 1) != 0) {  // <- budget
    }
    atomicAdd(lock + 1, 1);
    FIX(atomicExch(lock, 0);)
  }
}

//@ grid 1, block 32: out 32, int 5
KERNEL(counts_the_wrong_way)(float* y, i64 n) {
  float sum = 0.0f;
  for (i64 i = 0; i < n; i += PICK(n - 5, 1)) sum += sqrtf(sum + i);  // <- budget
  y[threadIdx.x] = sum;
}

//@ grid 4, block 64: in 64, out 256
KERNEL(never_converges)(const float* x, float* y) {
  float value = x[threadIdx.x], last;
  do {
    last = value;
    value = PICK(1.0f - value, 0.5f * value);
  } while (PICK(value != last, fabsf(value - last) > 1e-3f));  // <- budget
  y[(i64)blockIdx.x * 64 + threadIdx.x] = value;
}

// Every turn passes a barrier.
//@ grid 1, block 64: in 64, out 64
KERNEL(barrier_for_ever)(const float* x, float* y) {
  float value = x[threadIdx.x];
  for (int turn = 0; turn < PICK(turn + 1, 3); turn += PICK(0, 1)) {
    value = 0.5f * value;
    __syncthreads();  // <- budget
  }
  y[threadIdx.x] = value;
}
