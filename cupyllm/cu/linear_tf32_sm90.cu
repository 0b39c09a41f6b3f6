// Linear in fp32 on Hopper's tensor cores: what linear_tf32.cu computes, bit for bit, by wgmma. C[r,c] = (or +=)
// sum_k A[r,k] B[c,k] + bias[c] of fp32 A and C.
//
// Forms and letters: linear_tf32.cu. Macros: A_MN B_MN B_T, the tile BM BN, STAGES, CTAS (that share an SM), VECTOR
//   (see Needs).
// Method: 3xTF32: a b = lo hi + hi lo + hi hi, hi the nearest of 11 bits, lo the rest; a B of 16 bits is its own hi.
//   BM / 64 consumer warpgroups multiply 64 rows each by wgmma m64nBNk8. A is raw in shared memory: each consumer
//   splits its fragments into registers, from where wgmma takes them. It takes B from shared memory only, and tf32 only
//   with k contiguous: the producer warpgroup loads B into registers a step ahead and stores hi and lo as planes, so
//   that B_MN needs nothing more. A goes by cp.async. STAGES tiles of 32 k are a ring between them.
// Rejected: chains of 16 k, 1.07 to 1.1 times as fast: positive sums are then off by more than linear.cu's, 8.9e-8
//   (8.3e-8) at K = 4096. Partial sums of 512 k: no faster.
// Layout: A, k contiguous: row r's chunk c of 16 bytes at 128 r + 16 (c ^ r % 8); A_MN: k's chunk c at
//   4 BM k + 16 (c ^ 2 (k % 4)): what a warp reads at once lies in 32 banks. B's planes: 128 r + 16 (c ^ r % 8), the
//   descriptor's swizzle of 128 bytes.
// Launch: block 128 (BM / 64 + 1); grid ceil(rows / BM) ceil(cols / BN); dynamic shared bytes STAGES * STAGE_BYTES.
//   group: rows of tiles that are taken together, at least 1; any gives the same bits.
// Needs: VECTOR 1: A's contiguous axis, and B's k where it is contiguous, are multiples of 4, A and B aligned to 16
//   bytes; VECTOR 0: any. C aligned to 8 bytes. Rows and columns from 1, depth from 0, all below 2^30.
// Numerics: linear_tf32.cu's. A chain of 8 k starts from 0 and is added in fp32 to a partial sum, and that to the total
//   every PROMOTE k; wgmma cuts as mma.sync does. All tiles and VECTORs, of linear_tf32.cu, too, gave the same bits
//   (H200), so a row's bits depend neither on the number of rows nor on its place among them. Deterministic; no
//   atomics; no CTA waits for another.
// Range: linear_tf32.cu's; sums that are not finite are summed again by fp32 FMA, in linear.cu's order.
// Measured: H200, 2026-11-30, TFLOP/s of 4096^3, forward, dgrad, wgrad: 128x128 103, 83, 84; 128x64 84, 77, 77; 64x64
//   81, 70, 70; linear_tf32.cu 64, 62, 64; torch in fp32 50, 50, 51. With a bf16 weight forward and dgrad 92, 83
//   (linear_tf32.cu 84, 82).
// Aliasing: C must not overlap A, B or bias. Capability: 9.0 only (sm_90a).
#include "common.cuh"

#define BK 32                     // k of a step
#define PROMOTE 256               // k of a partial sum
#define RUN 128                   // the same of linear.cu's order
#define CONSUMERS (BM / 64)       // warpgroups that multiply
#define THREADS (128 * (CONSUMERS + 1))
#define REGS (BN / 2)             // sums that a thread holds
#define SPLIT_B (sizeof(B_T) == 4)
#define A_BYTES (BM * BK * 4)
#define PLANE_BYTES (BN * BK * 4)
#define STAGE_BYTES (A_BYTES + PLANE_BYTES * (SPLIT_B ? 2 : 1))

// setmaxnreg: multiples of 8 that add up to what the CTA starts with, or it would wait for ever. 128x64 needs none.
#if BM == 128 && BN == 128
#define CONSUMER_REGISTERS 216
#define PRODUCER_REGISTERS 72
#elif BM == 64
#define CONSUMER_REGISTERS 160
#define PRODUCER_REGISTERS 96
#else
#define CONSUMER_REGISTERS 0
#endif

// Of sm90.cuh's order of tiles.
#define CM 1
#define CN 1
#include "sm90.cuh"

static_assert(BM % 64 == 0 && (BN == 64 || BN == 128), "whole warpgroups; INPUT_A below");

struct alignas(8) Float2 { float v[2]; };
struct alignas(4 * sizeof(B_T)) Four { B_T v[4]; };

// BYTES (16 or 4) from global to shared memory behind the thread's back; zeros, and nothing read, if not `inside`.
template <int BYTES> DEVICE void copy_async(u32 shared, const void* global, bool inside) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(inside ? 4 : 0)
                 : "memory");
}
DEVICE void store_shared(u32 to, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// The same once this thread's copies so far are there.
DEVICE void barrier_arrive_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

#if BN == 64
#define INPUT_A "{%32, %33, %34, %35}, %36, p, 1, 1"
#define ADD_A "%37"
#else
#define INPUT_A "{%64, %65, %66, %67}, %68, p, 1, 1"
#define ADD_A "%69"
#endif
// sums[64 x BN] = a[64 x 8] b + (add ? sums : 0). Lane 4 g + t's a[i]: row g + 8 (i % 2) of its warp's 16, k =
// t + 4 (i / 2). The low 13 bits are not looked at. The sums lie as in sm90.cuh's wgmma.
DEVICE void multiply(float* sums, const u32 (&a)[4], u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD_A ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" STRING(BN) "k8.f32.tf32.tf32 {" PLACES "}, " INPUT_A ";\n}"
               : SUMS(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// The nearest value of 11 bits, and the rest. Infinite where that leaves fp32; some NaN become 0, but not their rest.
DEVICE u32 high(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE u32 low(float x, u32 hi) { return __float_as_uint(x - __uint_as_float(hi)); }

// A producer's part of A's tile, copied raw. `rows_left`: rows inside the matrix from its first one on; k: its first.
struct CopyA {
  enum : int { WIDTH = A_MN ? BM / 4 : 8, PASS = 128 / WIDTH, COPIES = BM * BK / 4 / 128 };
  const float* next;
  i64 pitch;
  int rows_left, k;
  u32 target;

  DEVICE CopyA(const float* matrix, int first, i64 rows, i64 depth, int tid) {
    int row = tid / WIDTH, chunk = tid % WIDTH;
    pitch = A_MN ? rows : depth;
    next = matrix + (A_MN ? row * pitch + first + chunk * 4 : (first + row) * pitch + chunk * 4);
    i64 left = rows - first;
    rows_left = (int)(left < BM ? left : BM) - (A_MN ? chunk * 4 : row);
    k = A_MN ? row : chunk * 4;
    target = row * WIDTH * 16 + (chunk ^ (A_MN ? row % 4 * 2 : row % 8)) * 16;
  }

  // `left` k of the tile are inside the matrix. Elements outside become zeros and add nothing.
  DEVICE void copy(u32 tile, int left) {
    const float* source = next;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      u32 to = tile + target + i * PASS * WIDTH * 16;
#pragma unroll
      for (int e = 0; e < 4; e += VECTOR ? 4 : 1) {
        bool inside = A_MN ? k + i * PASS < left && e < rows_left : k + e < left && i * PASS < rows_left;
        copy_async<VECTOR ? 16 : 4>(to + e * 4, source + e, inside);
      }
      source += PASS * pitch;
    }
    next = A_MN ? source : next + BK;
  }
};

// And of B's, through registers: chunks of 4 k of one column of C, at k contiguous columns 16 apart, else 128 / BN
// chunks apart.
struct SplitB {
  enum : int { CHUNKS = BN * BK / 4 / 128, APART = 128 / BN };
  const B_T* next;
  i64 pitch;
  int rows_left, k;
  u32 target;
  B_T v[CHUNKS][4];

  DEVICE SplitB(const B_T* matrix, int first, i64 rows, i64 depth, int tid) {
    int row = B_MN ? tid % BN : tid / 8, chunk = B_MN ? tid / BN : tid % 8;
    pitch = B_MN ? rows : depth;
    next = matrix + (B_MN ? chunk * 4 * pitch + first + row : (first + row) * pitch + chunk * 4);
    i64 left = rows - first;
    rows_left = (int)(left < BN ? left : BN) - row;
    k = chunk * 4;
    target = row * 128 + (chunk ^ row % 8) * 16;
  }

  DEVICE void load(int left) {
    const B_T* source = next;
    const int inside = rows_left > 0 ? left - k : 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) v[i][e] = B_T{};
      if (B_MN) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (i * APART * 4 + e < inside) v[i][e] = *source;
          source += pitch;
        }
        source += (APART - 1) * 4 * pitch;
      } else {
        if (VECTOR) {
          if (i * 16 < rows_left && inside > 0) {
            Four x = *(const Four*)source;
#pragma unroll
            for (int e = 0; e < 4; e++) v[i][e] = x.v[e];
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (i * 16 < rows_left && e < inside) v[i][e] = source[e];
        }
        source += 16 * pitch;
      }
    }
    next += B_MN ? BK * pitch : BK;
  }

  DEVICE void store(u32 tile) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      u32 to = tile + (B_MN ? target ^ i * APART * 16 : target + i * 2048);
      u32 h[4], l[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x = to_float(v[i][e]);
        h[e] = SPLIT_B ? high(x) : __float_as_uint(x);
        l[e] = low(x, h[e]);
      }
      store_shared(to, h);
      if (SPLIT_B) store_shared(to + PLANE_BYTES, l);
    }
  }
};

// C[row,col] as linear.cu sums it.
DEVICE float sum_by_fma(const float* a, const B_T* b, i64 row, i64 col, i64 M, i64 N, i64 K) {
  float total = 0.0f, partial = 0.0f;
#pragma unroll 1
  for (i64 k = 0; k < K; k++) {
    partial = fmaf(a[A_MN ? k * M + row : row * K + k], to_float(b[B_MN ? k * N + col : col * K + k]), partial);
    if (k % RUN == RUN - 1) {
      total += partial;
      partial = 0.0f;
    }
  }
  return total + partial;
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, CTAS) CONCAT(name, SUFFIX)
// Letters: C [M,N], a sum over K.
KERNEL(linear_tf32_sm90)(const float* a, const B_T* b, const B_T* bias, float* c, i64 M, i64 N, i64 K, i64 accumulate,
                         i64 group) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ int corner[2];  // of the CTA's tile
  const u32 tiles = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;
  int row_tile, col_tile;
  Order(M, N, group, 0).place(blockIdx.x, row_tile, col_tile);
  int first_row = row_tile * BM, first_col = col_tile * BN;
  int warp = __shfl_sync(FULL_MASK, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int steps = (int)((K + BK - 1) / BK);

  if (threadIdx.x == 0) {
    corner[0] = first_row;
    corner[1] = first_col;
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, 256);  // each producer twice: A copied, B stored
      barrier_init(empty + s * 8, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int stage = 0;
  u32 phase = 0;

  if (warp >= CONSUMERS * 4) {  // the producers
#if CONSUMER_REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#endif
    int tid = threadIdx.x - CONSUMERS * 128, left = (int)K;
    CopyA a_tile(a, first_row, M, K, tid);
    SplitB b_tile(b, first_col, N, K, tid);
    b_tile.load(left);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      u32 tile = tiles + stage * STAGE_BYTES, bar = full + stage * 8;
      barrier_wait(empty + stage * 8, phase ^ 1);
      a_tile.copy(tile, left);
      barrier_arrive_copied(bar);
      b_tile.store(tile + A_BYTES);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before wgmma reads it
      barrier_arrive(bar);
      left -= BK;
      b_tile.load(left);
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }

#if CONSUMER_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
#endif
  int g = lane / 4, t = lane % 4, warp_row = warp * 16;
  u32 lane_place = tiles + (A_MN ? t * BM * 4 + ((warp_row + g) / 4 ^ t * 2) * 16 + g % 4 * 4
                                 : (warp_row + g) * 128 + g * 16 + t * 4);
  const u64 b_first = descriptor(tiles + A_BYTES, 0);
  float total[REGS], partial[REGS], chain[REGS], raw[4];
  u32 hi[4], lo[4];
#pragma unroll
  for (int i = 0; i < REGS; i++) total[i] = partial[i] = chain[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 4; r++) raw[r] = 0.0f;

  auto fetch = [&](int from, int n) {  // A's fragment of the n-th 8 k of a stage
    u32 p = lane_place + from * STAGE_BYTES;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      u32 at = A_MN ? p ^ r % 2 * 32 : p ^ (n * 2 + r / 2) * 16;
      int offset = A_MN ? (n * 8 + r / 2 * 4) * BM * 4 : r % 2 * 1024;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(raw[r]) : "r"(at + offset));
    }
  };
  auto split = [&]() {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      hi[r] = high(raw[r]);
      lo[r] = low(raw[r], hi[r]);
    }
  };

  if (steps > 0) {
    barrier_wait(full, 0);
    fetch(0, 0);
  }
  split();
  int promoted_in = PROMOTE / BK;  // steps
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    u64 b_hi = b_first + stage * (STAGE_BYTES >> 4), b_lo = b_hi + (PLANE_BYTES >> 4);
    int done = stage;
#pragma unroll
    for (int n = 0; n < BK / 8; n++) {
      wgmma_fence();
      multiply(chain, lo, b_hi + n * K_STEP(0), 0);
      if (SPLIT_B) multiply(chain, hi, b_lo + n * K_STEP(0), 1);
      multiply(chain, hi, b_hi + n * K_STEP(0), 1);
      wgmma_commit();
      if (n == BK / 8 - 1) {
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
        if (step + 1 < steps) barrier_wait(full + stage * 8, phase);
      }
      fetch(stage, (n + 1) % (BK / 8));  // past the end: of a stage that nobody fills, unused
      wgmma_wait<0>();
      if (n == BK / 8 - 1) barrier_release<1>(empty + done * 8, lane);
      split();
#pragma unroll
      for (int i = 0; i < REGS; i++) partial[i] += chain[i];
    }
    if (--promoted_in == 0) {
#pragma unroll
      for (int i = 0; i < REGS; i++) {
        total[i] += partial[i];
        partial[i] = 0.0f;
      }
      promoted_in = PROMOTE / BK;
    }
  }

  bool finite = true;
#pragma unroll
  for (int i = 0; i < REGS; i++) {
    total[i] += partial[i];
    finite &= is_finite(total[i]);
  }
  // total[4 j + 2 h + e]: row g + 8 h, column 8 j + 2 t + e. Made again: the loop has no register for these.
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  int row = *(volatile int*)corner + tid / 32 * 16 + tid % 32 / 4, col = ((volatile int*)corner)[1] + tid % 4 * 2;
  if (!finite) {
#pragma unroll 1
    for (int n = 0; n < REGS; n++) {
      int r = row + n / 2 % 2 * 8, s = col + n / 4 * 8 + n % 2;
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < REGS; other++) sum = other == n ? total[other] : sum;
      if (is_finite(sum) || r >= M || s >= N) continue;
      sum = sum_by_fma(a, b, r, s, M, N, K);
#pragma unroll
      for (int other = 0; other < REGS; other++) total[other] = other == n ? sum : total[other];
    }
  }

#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
    int n = col + j * 8;
    float add[2];
#pragma unroll
    for (int e = 0; e < 2; e++) add[e] = bias && n + e < N ? to_float(bias[n + e]) : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int m = row + h * 8;
      if (m >= M || n >= N) continue;
      float* line = c + (i64)m * N + n;
      Float2 out;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        out.v[e] = total[4 * j + 2 * h + e];
        if (bias) out.v[e] += add[e];
      }
      if (N % 2 == 0) {
        if (accumulate) {
          Float2 old = *(const Float2*)line;
          out.v[0] += old.v[0];
          out.v[1] += old.v[1];
        }
        *(Float2*)line = out;
      } else {
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (n + e < N) line[e] = accumulate ? out.v[e] + line[e] : out.v[e];
      }
    }
  }
}
