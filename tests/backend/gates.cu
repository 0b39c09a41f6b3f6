// Kernels that a compile gate must stop, and their sound neighbours. Each macro makes one cubin; none is ever launched.

typedef unsigned long long u64;

#ifdef SPILL
// 128 values of each of 1024 threads are alive at once; such a block can have 64 registers a thread.
extern "C" __global__ void __launch_bounds__(1024) spilled(float* x, int n) {
    float v[128];
#pragma unroll
    for (int i = 0; i < 128; i++) v[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < n; k++) {
#pragma unroll
        for (int i = 0; i < 128; i++) v[i] = v[i] * v[(i + 1) % 128] + 1.f;
    }
#pragma unroll
    for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = v[i];
}
#endif

#ifdef FRAME
// Registers have no index: an array indexed by a value lives in local memory.
extern "C" __global__ void framed(float* x, const int* at) {
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; i++) v[i] = x[i];
    v[at[0]] += 1.f;
    x[0] = v[at[1]];
}
#endif

#ifdef CALL
// The kernel has neither frame nor spills; the function that it calls has both.
__device__ __noinline__ int fib(int n, const int* p) { return n <= 0 ? p[0] : fib(n - 1, p) + fib(n - 2, p) * p[n]; }
extern "C" __global__ void calling(int* p) { p[0] = fib(p[1], p); }
#endif

#ifdef BOUNDS
// Without a least number of blocks ptxas does not know the registers at entry, and ignores setmaxnreg: C7508.
extern "C" __global__ void __launch_bounds__(BOUNDS) adjusting(float* x) {
    if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    x[threadIdx.x] = 1;
}
#endif

#ifdef WGMMA
// wgmma runs beside other instructions only when no call is near: assert serialises it, C7510.
__device__ __forceinline__ void product(float* y, u64 a, u64 b) {
    float d[4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 0, 1, 1, 0, 0;"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
extern "C" __global__ void __launch_bounds__(128) overlapped(float* y, u64 a, u64 b) { product(y, a, b); }
extern "C" __global__ void __launch_bounds__(128) serialised(float* y, u64 a, u64 b, int n) {
    assert(n > 3);
    product(y, a, b);
}
#endif

#ifdef HUNGRY
// 128 threads can have this; a launch with 1024 would fail.
extern "C" __global__ void __launch_bounds__(128) hungry(float* x, int n) {
    float v[100];
#pragma unroll
    for (int i = 0; i < 100; i++) v[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < n; k++) {
#pragma unroll
        for (int i = 0; i < 100; i++) v[i] = v[i] * v[(i + 1) % 100] + 1.f;
    }
#pragma unroll
    for (int i = 0; i < 100; i++) x[i * 1024 + threadIdx.x] = v[i];
}
#endif

#ifdef ILL_FORMED
// A predicate is no operand of stmatrix. NVRTC 12.9 dies of it.
extern "C" __global__ void storing(int at) {
    asm volatile("{ .reg .pred p; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {p}; }" ::"r"(at));
}
#endif
