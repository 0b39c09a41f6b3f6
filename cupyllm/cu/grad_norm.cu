// Sum of squares of a tensor in float64, and scaling in place: what clipping by the global norm needs.
//
// float64 because an fp32 sum of squares overflows at a norm of 1.8e19, where a gradient can still be clipped. The sum
// of a tensor with an inf or NaN is inf or NaN, so the same number is the non-finite test.
//
// Layout: g G_T [n]; partial double [ceil(n / 8192)]; out double [S], one slot a tensor; factor float [1].
// Grid: partial: one CTA of 256 threads per 8192 elements; total: one CTA; scale: ceil(n / 256). Shared: 2 KiB.
// Determinism: which thread adds what depends on n alone; threads are combined in a fixed tree. Outputs are written (=),
// scale updates g in place. Capability: any.
#include "common.cuh"

#ifndef G_T
#define G_T float
#endif

#define THREADS 256
#define PER_THREAD 32

// shared[0] = sum over the block, for thread 0 to read: the others have no barrier behind the last addition.
DEVICE void tree_sum(double x, double* shared) {
  shared[threadIdx.x] = x;
  for (int half = THREADS / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
}

KERNEL(sum_of_squares_partial)(const G_T* g, double* partial, i64 n) {
  __shared__ double shared[THREADS];
  double sum = 0.0;
  i64 start = (i64)blockIdx.x * THREADS * PER_THREAD + threadIdx.x;
  for (int i = 0; i < PER_THREAD; i++) {
    i64 index = start + i * THREADS;
    double x = index < n ? (double)to_float(g[index]) : 0.0;
    sum = fma(x, x, sum);
  }
  tree_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = shared[0];
}

KERNEL(sum_of_squares_total)(const double* partial, double* out, i64 count, i64 slot) {
  __shared__ double shared[THREADS];
  double sum = 0.0;
  for (i64 index = threadIdx.x; index < count; index += THREADS) sum += partial[index];
  tree_sum(sum, shared);
  if (threadIdx.x == 0) out[slot] = shared[0];
}

KERNEL(scale)(G_T* g, const float* factor, i64 n) {
  i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < n) g[index] = from_float<G_T>(to_float(g[index]) * factor[0]);
}
