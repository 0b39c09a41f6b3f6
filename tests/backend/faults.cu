// One fault a kernel: what the simulator must report, and a GPU may let pass.
#include "common.cuh"

// The missing barrier of reverse_racy, found by name; see tests/hostcuda/selftest.cu for the kernels without a fault.
KERNEL(read_behind)(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }

KERNEL(sum_unwritten)(const float* x, float* y) {
  __shared__ float tile[64];
  if (threadIdx.x < 63) tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];
}

KERNEL(every_block_writes_the_first)(float* y) {
  if (threadIdx.x == 0) y[0] = (float)blockIdx.x;
}

KERNEL(spin)(volatile float* y) {
  while (y[0] == 0.0f) {
  }
  y[1] = 1.0f;
}

KERNEL(bounded)(float* y) {
  __shared__ float tile[1024];
  tile[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
