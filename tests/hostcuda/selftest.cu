// Small kernels that show what the emulator must get right, and what it must refuse.
#include "common.cuh"

KERNEL(index)(i64* out, i64 n) {
  i64 block = blockIdx.x + (i64)gridDim.x * (blockIdx.y + (i64)gridDim.y * blockIdx.z);
  i64 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  i64 i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
  if (i < n) out[i] = i;
}

// Reverses each block's 256 values through shared memory.
KERNEL(reverse)(const float* __restrict__ x, float* y) {
  __shared__ float tile[256];
  i64 base = (i64)blockIdx.x * 256;
  tile[threadIdx.x] = x[base + threadIdx.x];
  __syncthreads();
  y[base + threadIdx.x] = tile[255 - threadIdx.x];
}

// The same without the barrier: wrong, and ascending and descending thread order must disagree.
KERNEL(reverse_racy)(const float* __restrict__ x, float* y) {
  __shared__ float tile[256];
  i64 base = (i64)blockIdx.x * 256;
  tile[threadIdx.x] = x[base + threadIdx.x];
  y[base + threadIdx.x] = tile[255 - threadIdx.x];
}

KERNEL(sum_blocks)(const float* x, float* y) {
  __shared__ float shared[256 / 32];
  float total = block_sum<256>(x[(i64)blockIdx.x * 256 + threadIdx.x], shared);
  y[(i64)blockIdx.x * 256 + threadIdx.x] = total;
}

KERNEL(shuffles)(const float* x, float* y) {
  float value = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor_sync(FULL_MASK, value, 5);
  __syncwarp();
  y[64 + threadIdx.x] = __shfl_sync(FULL_MASK, value, 3);
  y[128 + threadIdx.x] = __shfl_up_sync(FULL_MASK, value, 1);
  y[192 + threadIdx.x] = __shfl_down_sync(FULL_MASK, value, 2);
  y[256 + threadIdx.x] = (float)__ballot_sync(FULL_MASK, value > 0.0f);
  y[320 + threadIdx.x] = __any_sync(FULL_MASK, value > 0.0f) + 2 * __all_sync(FULL_MASK, value > 0.0f);
}

// Threads that returned do not hold up a barrier.
KERNEL(early_exit)(float* y) {
  __shared__ float seen;
  if (threadIdx.x >= 40) return;
  if (threadIdx.x == 0) seen = 7.0f;
  __syncthreads();
  y[threadIdx.x] = seen;
}

KERNEL(divergent_barrier)(float* y) {
  if (threadIdx.x < 33) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  y[threadIdx.x] = 0.0f;
}

KERNEL(divergent_shuffle)(float* y) {
  float value = 0.0f;
  if (threadIdx.x != 7) value = __shfl_xor_sync(FULL_MASK, value, 1);
  y[threadIdx.x] = value;
}

KERNEL(barrier_against_shuffle)(float* y) {
  float value = 0.0f;
  if (threadIdx.x == 7)
    __syncthreads();
  else
    value = __shfl_xor_sync(FULL_MASK, value, 1);
  y[threadIdx.x] = value;
}

KERNEL(vector_loads)(const float* x, float* y, const double* d, u32* bits) {
  float4 v = ((const float4*)x)[threadIdx.x];
  ((float4*)y)[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
  double2 pair = ((const double2*)d)[threadIdx.x];
  uint2 word = make_uint2(__float_as_uint((float)pair.x), __float_as_uint((float)pair.y));
  ((uint2*)bits)[threadIdx.x] = word;
}

KERNEL(round_bf16)(const float* x, bf16* y, float* back, i64 n) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = from_float<bf16>(x[i]);
  back[i] = to_float(y[i]);
}

KERNEL(round_f16)(const float* x, f16* y, float* back, i64 n) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = from_float<f16>(x[i]);
  back[i] = to_float(y[i]);
}

KERNEL(maths)(const float* x, float* y, float a, double b) {
  float s, c;
  sincosf(x[0], &s, &c);
  float values[] = {fmaf(x[0], x[1], x[2]), x[0] * x[1] + x[2], fmaxf(x[3], 1.0f), fminf(1.0f, x[3]), expf(x[0]),
                    logf(x[0]), rsqrtf(x[0]), sqrtf(x[0]), s, c, powf(x[0], a), (float)b,
                    (float)isnan(x[3]), (float)isinf(x[4]), (float)isfinite(x[4]), (float)max(2, 3)};
  for (int i = 0; i < 16; i++) y[i] = values[i];
}

KERNEL(write_past)(float* y, i64 n) { y[n] = 1.0f; }
KERNEL(write_before)(float* y) { y[-1] = 1.0f; }
KERNEL(wrong_abi)(int n) {}
KERNEL(add_one)(float* y) { y[threadIdx.x] += 1.0f; }
