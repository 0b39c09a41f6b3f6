// Planted faults of cp.async: groups, waits, and what happens between them. See __init__.py for the notation.
#include "common.cuh"

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
DEVICE void copy_4(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void copy_16(float* shared, const float* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void copy_16(float* shared, const float* global, int nbytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(nbytes)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

//@ grid 2, block 64: in 64, out 128
KERNEL(no_wait)(const float* x, float* y) {
  __shared__ float tile[64];
  copy_4(tile + threadIdx.x, x + threadIdx.x);
  copy_commit();
  FIX(copy_wait<0>();)
  __syncthreads();
  y[(i64)blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x];  // <- cp-async
}

// Its own copy, so that no barrier is missed.
//@ grid 1, block 64: in 64, out 64
KERNEL(no_commit)(const float* x, float* y) {
  __shared__ float tile[64];
  copy_4(tile + threadIdx.x, x + threadIdx.x);
  FIX(copy_commit();)
  copy_wait<0>();
  y[threadIdx.x] = tile[threadIdx.x];  // <- cp-async
}

//@ grid 1, block 32: in 2x32, out 32
KERNEL(wait_off_by_one)(const float* x, float* y) {
  __shared__ float tile[2][32];
  for (int stage = 0; stage < 2; stage++) {
    copy_4(&tile[stage][threadIdx.x], x + stage * 32 + threadIdx.x);
    copy_commit();
  }
  copy_wait<PICK(1, 0)>();
  __syncthreads();
  float sum = tile[0][31 - threadIdx.x];
  y[threadIdx.x] = sum + tile[1][31 - threadIdx.x];  // <- cp-async
}

// The last steps commit no group, so that the wait for all but one no longer counts steps.
//@ grid 1, block 32: in 6x32, out 32
KERNEL(last_step_waits_too_little)(const float* x, float* y) {
  __shared__ float tile[2][32];
  float sum = 0.0f;
  copy_4(&tile[0][threadIdx.x], x + threadIdx.x);
  copy_commit();
  for (int step = 0; step < 6; step++) {
    if (step + 1 < 6) {
      copy_4(&tile[(step + 1) % 2][threadIdx.x], x + (step + 1) * 32 + threadIdx.x);
      PICK(copy_commit(), (void)0);
    }
    FIX(copy_commit();)
    copy_wait<1>();
    __syncthreads();
    sum += tile[step % 2][31 - threadIdx.x];  // <- cp-async
    __syncthreads();
  }
  y[threadIdx.x] = sum;
}

//@ grid 1, block 32: in 32, out 32
KERNEL(store_into_flight)(const float* x, float* y) {
  __shared__ float tile[32];
  copy_4(tile + threadIdx.x, x + threadIdx.x);
  copy_commit();
  FIX(copy_wait_all();)
  tile[threadIdx.x] = 1.0f;  // <- cp-async
  copy_wait_all();
  y[threadIdx.x] = tile[threadIdx.x];
}

//@ grid 1, block 32: in 64, out 32
KERNEL(two_copies_one_target)(const float* x, float* y) {
  __shared__ float tile[64];
  copy_4(tile + threadIdx.x, x + threadIdx.x);
  copy_4(tile + threadIdx.x + PICK(0, 32), x + 32 + threadIdx.x);  // <- cp-async
  copy_wait_all();
  y[threadIdx.x] = tile[threadIdx.x];
}

//@ grid 1, block 64: in 64, out 64
KERNEL(wait_without_barrier)(const float* x, float* y) {
  __shared__ float tile[64];
  copy_4(tile + threadIdx.x, x + threadIdx.x);  // <- race
  copy_wait_all();
  FIX(__syncthreads();)
  y[threadIdx.x] = tile[(threadIdx.x + 32) % 64];  // <- race
}

//@ grid 1, block 64: in 2x64, out 64
KERNEL(copy_over_what_is_read)(const float* x, float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float first = tile[63 - threadIdx.x];  // <- race
  FIX(__syncthreads();)
  copy_4(tile + threadIdx.x, x + 64 + threadIdx.x);  // <- race
  copy_wait_all();
  __syncthreads();
  y[threadIdx.x] = first + tile[63 - threadIdx.x];
}

// Waiting covers one's own copies only.
//@ grid 1, block 64: in 64, out 64
KERNEL(only_one_warp_waits)(const float* x, float* y) {
  __shared__ float tile[64];
  copy_4(tile + threadIdx.x, x + threadIdx.x);
  copy_commit();
  if (PICK(threadIdx.x < 32, true)) copy_wait<0>();
  __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];  // <- cp-async
}

//@ grid 1, block 32: in 126, out 128
KERNEL(source_behind_the_end)(const float* x, float* y) {
  __shared__ __align__(16) float tile[128];
  int i = threadIdx.x * 4;
  copy_16(tile + i, x + i, PICK(16, i + 4 > 126 ? 4 * (126 - i) : 16));  // <- out-of-bounds
  copy_wait_all();
  for (int e = 0; e < 4; e++) y[i + e] = tile[i + e];
}

//@ grid 1, block 32: hole 128 from 120, out 128
KERNEL(source_never_written)(const float* x, float* y) {
  __shared__ __align__(16) float tile[128];
  int i = threadIdx.x * 4;
  copy_16(tile + i, x + i, PICK(16, i < 120 ? 16 : 0));  // <- uninitialised-read
  copy_wait_all();
  for (int e = 0; e < 4; e++) y[i + e] = tile[i + e];
}

//@ grid 1, block 16: in 80, out 16
KERNEL(source_misaligned)(const float* x, float* y) {
  __shared__ __align__(16) float tile[64];
  copy_16(tile + threadIdx.x * 4, x + threadIdx.x * PICK(5, 4));  // <- misaligned
  copy_wait_all();
  y[threadIdx.x] = tile[threadIdx.x * 4];
}

//@ grid 1, block 16: in 64, out 16
KERNEL(target_misaligned)(const float* x, float* y) {
  __shared__ __align__(16) float tile[80];
  copy_16(tile + threadIdx.x * PICK(5, 4), x + threadIdx.x * 4);  // <- misaligned
  copy_wait_all();
  y[threadIdx.x] = tile[threadIdx.x * PICK(5, 4)];
}

//@ grid 1, block 17: in 68, out 17
KERNEL(target_behind_the_end)(const float* x, float* y) {
  __shared__ __align__(16) float tile[64];
  if (threadIdx.x < PICK(17, 16)) copy_16(tile + threadIdx.x * 4, x + threadIdx.x * 4);  // <- out-of-bounds
  copy_wait_all();
  y[threadIdx.x] = threadIdx.x < 16 ? tile[threadIdx.x * 4] : 0.0f;
}
