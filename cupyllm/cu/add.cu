// Residual add: y = a + b, in fp32 and rounded once. Its gradient is d_y for both.
//
// n elements of X_T (float or bf16), one thread each. Grid: ceil(n / 256), block 256. Deterministic.
#include "common.cuh"

#define THREADS 256

// y =; may alias a or b.
KERNEL(add_forward)(const X_T* a, const X_T* b, X_T* y, i64 n) {
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) y[i] = from_float<X_T>(to_float(a[i]) + to_float(b[i]));
}

// d_a = d_y and d_b = d_y, copies; either may be null (not wanted). Neither may alias the other.
KERNEL(add_backward)(const X_T* d_y, X_T* d_a, X_T* d_b, i64 n) {
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  X_T d = d_y[i];
  if (d_a) d_a[i] = d;
  if (d_b) d_b[i] = d;
}
