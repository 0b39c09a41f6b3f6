// CUDA's device language on a host C++20 compiler, for tests: one thread block at a time, one fiber per thread.
//
// Threads of a block run one after another and hand over only at barriers and warp operations, so a block is
// deterministic. Running the same kernel in ascending and in descending thread order makes most missing barriers show.
// Barriers and warp operations that not every living thread reaches are reported, with their source lines.
// No C++ header is included: that would be most of the compile time.
#pragma once

extern "C" {
void* memset(void*, int, __SIZE_TYPE__);
void* mmap(void*, __SIZE_TYPE__, int, int, int, long);
int snprintf(char*, __SIZE_TYPE__, const char*, ...);
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float powf(float, float) noexcept;
float tanhf(float) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double pow(double, double) noexcept;
}

// ---- qualifiers ----

#ifndef HOSTCUDA_SCAN  // when scanning for kernels, __global__ stays as it is
#define __global__
#endif
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// ---- built-in types ----

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

#define HOSTCUDA_VECTOR2(T, name, align)             \
  struct alignas(align) name { T x, y; };            \
  inline name make_##name(T x, T y) { return {x, y}; }
#define HOSTCUDA_VECTOR4(T, name, align)             \
  struct alignas(align) name { T x, y, z, w; };      \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
HOSTCUDA_VECTOR2(float, float2, 8)
HOSTCUDA_VECTOR4(float, float4, 16)
HOSTCUDA_VECTOR2(double, double2, 16)
HOSTCUDA_VECTOR2(int, int2, 8)
HOSTCUDA_VECTOR4(int, int4, 16)
HOSTCUDA_VECTOR2(unsigned, uint2, 8)
HOSTCUDA_VECTOR4(unsigned, uint4, 16)
HOSTCUDA_VECTOR2(long long, longlong2, 16)
HOSTCUDA_VECTOR2(unsigned long long, ulonglong2, 16)
HOSTCUDA_VECTOR2(unsigned short, ushort2, 4)
HOSTCUDA_VECTOR4(unsigned short, ushort4, 8)
HOSTCUDA_VECTOR2(unsigned char, uchar2, 2)
HOSTCUDA_VECTOR4(unsigned char, uchar4, 4)

// ---- fibers ----

namespace hostcuda {

enum State { NEW, READY, BARRIER, WARP, DONE };
enum { MAX_THREADS = 1024, STACK_BYTES = 128 << 10, COLOUR_BYTES = 5 * 64, NO_LANE = -1 };

struct Fiber {
  void* sp;
  char* stack;
  State state;
  int line;             // where it waits
  unsigned mask;        // lanes of the warp operation it waits in
  unsigned parity;      // which of the two exchange rows its next warp operation uses
  int vote;             // its value in __syncthreads_or and the like
  uint3 index;
};

struct Exchange { unsigned long long value[2][32]; };

static Fiber fibers[MAX_THREADS];
static Exchange exchange[MAX_THREADS / 32];
static char* free_stacks[MAX_THREADS];
static int num_free = -1;
static int num_threads;
static int current;
static int votes;  // number of threads whose vote was true at the last barrier
static void* main_sp;
static char error[512];
static void (*call)(void**);  // runs the kernel once
static void** call_args;
static bool descending;  // thread and block order

}  // namespace hostcuda

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
#define warpSize 32

#if defined(__APPLE__)
#define HOSTCUDA_SYMBOL "_hostcuda_switch"
#else
#define HOSTCUDA_SYMBOL "hostcuda_switch"
#endif
// hostcuda_switch(save, load): store the callee-saved registers on this stack and its pointer at *save, then continue
// on the stack `load`. ucontext was rejected: swapcontext makes a system call each time.
extern "C" __attribute__((visibility("hidden"))) void hostcuda_switch(void** save, void* load);
#if defined(__x86_64__)
__asm__(".text\n.globl " HOSTCUDA_SYMBOL "\n.hidden " HOSTCUDA_SYMBOL "\n" HOSTCUDA_SYMBOL ":\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl " HOSTCUDA_SYMBOL "\n" HOSTCUDA_SYMBOL ":\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
        "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
        "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n  ret\n");
#else
#error "hostcuda knows x86_64 and aarch64"
#endif

namespace hostcuda {

__attribute__((noinline)) static void leave(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  hostcuda_switch(&fiber.sp, main_sp);
}

static void entry() {
  call(call_args);
  free_stacks[num_free++] = fibers[current].stack;
  leave(DONE);
  __builtin_trap();
}

static void start(Fiber& fiber) {
  fiber.stack = free_stacks[--num_free];
  fiber.parity = 0;
  void** top = (void**)(fiber.stack + STACK_BYTES);  // a multiple of 16
#if defined(__x86_64__)
  top -= 8;  // six registers, the return address (entry), and the slot that aligns the stack as after a call
  memset(top, 0, 64);
  top[6] = (void*)entry;
#else
  top -= 20;
  memset(top, 0, 160);
  top[11] = (void*)entry;  // x30
#endif
  fiber.sp = top;
}

static void resume(int thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.state == NEW) start(fiber);
  fiber.state = READY;
  current = thread;
  threadIdx = fiber.index;
  hostcuda_switch(&main_sp, fiber.sp);
}

// Release every group of lanes that has wholly arrived at one warp operation. Returns whether there was one.
static bool release_lanes(int first, int count) {
  bool released = false;
  for (int lane = 0; lane < count; lane++) {
    Fiber& fiber = fibers[first + lane];
    if (fiber.state != WARP) continue;
    bool whole = true;
    for (int other = 0; other < count; other++) {
      if (!(fiber.mask >> other & 1)) continue;
      Fiber& peer = fibers[first + other];
      if (peer.state == WARP && peer.mask == fiber.mask && peer.line == fiber.line) continue;
      whole = false;
      if (peer.state == READY) continue;
      int n = snprintf(error, sizeof error, "thread %d waits for lane %d in a warp operation at line %d, but that lane ",
                       first + lane, other, fiber.line);
      if (peer.state == DONE)
        snprintf(error + n, sizeof error - n, "has returned");
      else
        snprintf(error + n, sizeof error - n, "waits at line %d", peer.line);
    }
    if (!whole) continue;
    unsigned mask = fiber.mask;
    for (int other = 0; other < count; other++)
      if (mask >> other & 1) fibers[first + other].state = READY;
    released = true;
  }
  if (released) error[0] = 0;
  return released;
}

// Run one warp until each of its threads waits at a barrier or has returned.
static bool run_warp(int first) {
  int count = num_threads - first < 32 ? num_threads - first : 32;
  for (;;) {
    bool waiting = false;
    for (int i = 0; i < count; i++) {
      int thread = first + (descending ? count - 1 - i : i);
      if (fibers[thread].state <= READY) resume(thread);
      waiting |= fibers[thread].state == WARP;
      if (error[0]) return false;
    }
    if (!waiting) return true;
    if (!release_lanes(first, count)) return false;
  }
}

static bool run_block() {
  for (int thread = 0; thread < num_threads; thread++) fibers[thread].state = NEW;
  int num_warps = (num_threads + 31) / 32;
  for (;;) {
    for (int i = 0; i < num_warps; i++)
      if (!run_warp(32 * (descending ? num_warps - 1 - i : i))) return false;
    int leader = NO_LANE;
    votes = 0;
    for (int thread = 0; thread < num_threads; thread++) {
      Fiber& fiber = fibers[thread];
      if (fiber.state == DONE) continue;
      if (leader == NO_LANE) leader = thread;
      if (fiber.line != fibers[leader].line) {
        snprintf(error, sizeof error, "divergent barrier: thread %d waits at line %d, thread %d at line %d", leader,
                 fibers[leader].line, thread, fiber.line);
        return false;
      }
      votes += fiber.vote != 0;
      fiber.state = READY;
    }
    if (leader == NO_LANE) return true;
  }
}

__attribute__((noinline)) static int barrier(int line, int vote) {
  Fiber& fiber = fibers[current];
  fiber.line = line;
  fiber.vote = vote;
  leave(BARRIER);
  return votes;
}

// Every lane of `mask` gives `value`; returns the row of values.
__attribute__((noinline)) static const unsigned long long* gather(int line, unsigned mask, unsigned long long value) {
  Fiber& fiber = fibers[current];
  int lane = current % 32;
  auto* row = exchange[current / 32].value[fiber.parity];
  fiber.parity ^= 1;  // a lane that runs ahead to its next operation must not overwrite what others still read
  if (!(mask >> lane & 1)) {
    snprintf(error, sizeof error, "thread %d at line %d is not in the mask 0x%x of its own warp operation", current, line, mask);
  }
  row[lane] = value;
  fiber.line = line;
  fiber.mask = mask;
  leave(WARP);
  return row;
}

template <typename T> inline T shuffle(int line, unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  int warp = current / 32 * 32;
  const unsigned long long* row = gather(line, mask, bits);
  bits = source >= 0 && source < 32 && (mask >> source & 1) && warp + source < num_threads ? row[source] : ~0ull;
  T result;
  __builtin_memcpy(&result, &bits, sizeof(T));
  return result;
}

inline unsigned ballot(int line, unsigned mask, int predicate) {
  int warp = current / 32 * 32;
  const unsigned long long* row = gather(line, mask, predicate != 0);
  unsigned result = 0;
  for (int lane = 0; lane < 32 && warp + lane < num_threads; lane++)
    if (mask >> lane & 1) result |= (unsigned)row[lane] << lane;
  return result;
}

inline int up_source(int delta) { return current % 32 < delta ? current % 32 : current % 32 - delta; }
inline int down_source(int delta) { return current % 32 + delta > 31 ? current % 32 : current % 32 + delta; }
inline unsigned mask_or_all(unsigned mask = 0xffffffffu) { return mask; }

// Calls a kernel from an array of pointers to its arguments, as cuLaunchKernel does. (A constructor, because only braces
// promise to evaluate the arguments from left to right.)
struct Apply {
  template <typename... A> Apply(void (*kernel)(A...), A... args) { kernel(args...); }
};
template <typename... A> inline void apply(void (*kernel)(A...), void** args) {
  int i = 0;
  (void)i;
  Apply{kernel, *(A*)args[i++]...};
}

// One letter a parameter: p pointer, l 64-bit integer, f float, d double, ? anything else (which our ABI has not).
template <typename T> constexpr char kind = '?';
template <typename T> constexpr char kind<T*> = 'p';
template <> constexpr char kind<long long> = 'l';
template <> constexpr char kind<float> = 'f';
template <> constexpr char kind<double> = 'd';
template <typename... A> inline const char* signature(void (*)(A...)) {
  static const char text[] = {kind<A>..., 0};
  return text;
}

// Returns null, or what went wrong.
static const char* launch(void (*entry_call)(void**), void** args, const long long* shape, int order) {
  if (num_free < 0) {  // private, writable, anonymous
    const int flags = 0x02 |
#ifdef __APPLE__
                      0x1000;
#else
                      0x20;
#endif
    __SIZE_TYPE__ spacing = STACK_BYTES + COLOUR_BYTES;  // stacks of equal alignment would fight for the same cache sets
    char* base = (char*)mmap(nullptr, MAX_THREADS * spacing, 0x1 | 0x2, flags, -1, 0);
    if (base == (char*)-1) return "no memory for fiber stacks";
    for (int i = 0; i < MAX_THREADS; i++) free_stacks[i] = base + (MAX_THREADS - 1 - i) * spacing;
    num_free = MAX_THREADS;
  }
  gridDim = {(unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2]};
  blockDim = {(unsigned)shape[3], (unsigned)shape[4], (unsigned)shape[5]};
  num_threads = blockDim.x * blockDim.y * blockDim.z;
  call = entry_call;
  call_args = args;
  descending = order != 0;
  error[0] = 0;
  for (int i = 0; i < num_threads; i++)
    fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  long long num_blocks = shape[0] * shape[1] * shape[2];
  for (long long i = 0; i < num_blocks; i++) {
    long long block = descending ? num_blocks - 1 - i : i;
    blockIdx = {(unsigned)(block % shape[0]), (unsigned)(block / shape[0] % shape[1]), (unsigned)(block / shape[0] / shape[1])};
    if (!run_block()) {
      for (int thread = 0; thread < num_threads; thread++)
        if (fibers[thread].state != NEW && fibers[thread].state != DONE) free_stacks[num_free++] = fibers[thread].stack;
      return error;
    }
  }
  return nullptr;
}

}  // namespace hostcuda

#define HOSTCUDA_PUBLIC extern "C" __attribute__((visibility("default")))
#define HOSTCUDA_EXPORT(symbol)                                                                              \
  HOSTCUDA_PUBLIC const char* symbol##__signature() { return hostcuda::signature(symbol); }                       \
  HOSTCUDA_PUBLIC const char* symbol##__launch(void** args, const long long* shape, int order) {                  \
    return hostcuda::launch([](void** a) { hostcuda::apply(symbol, a); }, args, shape, order);               \
  }

// ---- synchronisation ----

#define __syncthreads() ((void)hostcuda::barrier(__LINE__, 0))
#define __syncthreads_count(predicate) hostcuda::barrier(__LINE__, (predicate))
#define __syncthreads_or(predicate) (hostcuda::barrier(__LINE__, (predicate)) != 0)
#define __syncwarp(...) ((void)hostcuda::gather(__LINE__, hostcuda::mask_or_all(__VA_ARGS__), 0))
#define __shfl_sync(mask, value, source) hostcuda::shuffle(__LINE__, mask, value, (source) & 31)
#define __shfl_xor_sync(mask, value, lane_mask) hostcuda::shuffle(__LINE__, mask, value, hostcuda::current % 32 ^ (lane_mask))
#define __shfl_up_sync(mask, value, delta) hostcuda::shuffle(__LINE__, mask, value, hostcuda::up_source(delta))
#define __shfl_down_sync(mask, value, delta) hostcuda::shuffle(__LINE__, mask, value, hostcuda::down_source(delta))
#define __ballot_sync(mask, predicate) hostcuda::ballot(__LINE__, mask, predicate)
#define __any_sync(mask, predicate) (hostcuda::ballot(__LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (hostcuda::ballot(__LINE__, mask, !(predicate)) == 0)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)

// ---- arithmetic ----

inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return (float)(1.0 / __builtin_sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline double fabs(double x) { return __builtin_fabs(x); }
inline float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline float truncf(float x) { return __builtin_truncf(x); }
// A NaN loses against a number, as in IEEE 754-2008's maxNum and in CUDA.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline double fmax(double a, double b) { return a > b || b != b ? a : b; }
inline double fmin(double a, double b) { return a < b || b != b ? a : b; }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
inline bool isinf(double x) { return __builtin_fabs(x) == __builtin_inf(); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
inline bool isfinite(double x) { return __builtin_fabs(x) < __builtin_inf(); }

#define HOSTCUDA_MINMAX(T)                               \
  inline T min(T a, T b) { return b < a ? b : a; }       \
  inline T max(T a, T b) { return a < b ? b : a; }
HOSTCUDA_MINMAX(int)
HOSTCUDA_MINMAX(unsigned)
HOSTCUDA_MINMAX(long)
HOSTCUDA_MINMAX(unsigned long)
HOSTCUDA_MINMAX(long long)
HOSTCUDA_MINMAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long long llabs(long long x) { return x < 0 ? -x : x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T> inline T __ldg(const T* p) { return *p; }
