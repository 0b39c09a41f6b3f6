// Linear with few rows of x: y[m,n] = sum_k x[m,k] weight[n,k] + bias[n]; bf16 in, bf16 or float out.
//
// Reading weight is nearly all there is to do, so the kernel is made to read it once, at the speed of the memory.
// Macros: C_T (of y), NT: groups of 8 rows of x, MI: blocks of 16 rows of weight in a pass, WK: warps, STAGES.
// Method: y^T = weight x^T by mma.sync m16n8k16, rows of weight as its 16 rows and rows of x as its 8 columns. The
//   order within k is free if both operands have the same one: slots 2t, 2t + 1, 2t + 8, 2t + 9, those of lanes with
//   t = lane % 4, hold k = 8t + 0, 1, 2, 3 in a first product and 8t + 4, 5, 6, 7 in a second. So what a lane gives to
//   them is 16 neighbouring bytes of a row, of weight and of x: no ldmatrix, no exchange. Each lane copies its own
//   operands by cp.async into places of its own in shared memory, weight into a ring of STAGES tiles, x for good while
//   the first rows of weight pass by: no warp waits for another one until the sums of 16 rows are complete.
// Shares: the CTAs are groups x slices. CTA b has the (b mod slices)-th range of k, in chunks of WK * 64, and the
//   (b / slices)-th range of rows of weight, as long as the others' but for one row, in as few passes of at most 16 MI
//   rows as that takes, as long as each other but for one row: what a pass has no row for costs no bytes. In a chunk,
//   warp w has k from 64 w on. Then the WK sums are added, in order of w. With more than one slice, the sums go to
//   parts [slices,M,N] float, which linear_sum.cu adds up, with the bias; bias and y are null here.
// Rejected: whole blocks of 16 rows for each CTA (5 % slower where some have 2, others 3), x in the ring (read again
//   in each pass: at 16 rows a fifth of the traffic between L2 and SMs), x by plain loads, weight by bulk copies or in
//   registers, the CTA that arrives last adding up the slices, clusters of two that exchange sums (no faster at
//   Qwen3-8B's and 32B's products, 3 to 15 % at two of 0.6B's).
// Launch: block 32 WK; grid groups * slices, groups <= N, slices <= ceil(K / (64 WK)); dynamic shared: RING_BYTES +
//   SUMS_BYTES + M * 2 * 64 WK * ceil(ceil(K / (64 WK)) / slices) bytes. May be launched programmatically (9.0 and
//   later; 2 to 11 % faster): it reads nothing but weight before it waits. To let the next kernel start is its first
//   act: with slices 2 to 5 % faster than later, with one no slower.
// Needs: x and weight aligned to 16 bytes, K a multiple of 8, M from 1 to 8 NT, N and K from 1, below 2^30.
// Numerics: products of bf16 are exact; mma.sync adds them to fp32 sums (its adders truncate): in a warp in order of
//   chunks, then over warps, then over slices. Then bias is added, and y rounded once. A row's bits depend on K, WK and
//   slices, on nothing else. Deterministic; no atomics; no CTA waits for another.
// Aliasing: y and parts must not overlap x, weight or bias. Capability: 8.0.
// Measured: share of 4545 GB/s at which weight was read, with 1 and 8 rows: gate+up 0.99 and 0.96 of Qwen3-32B, down
//   0.96 and 0.88, q+k+v 0.93 and 0.88, o 0.90 and 0.80; cuBLAS 0.90 and 0.89, 0.84 and 0.81, 0.84 and 0.83, 0.74 and
//   0.71 (H200, graphs of launches with weights of their own, 2026-11-30).
#include "common.cuh"

#define THREADS (32 * WK)
#define CHUNK (64 * WK)                      // k of a tile
#define PASS (16 * MI)                       // rows of weight that a warp has room for
#define WARP_TILE_BYTES (MI * 16 * 64 * 2)   // of weight
#define TILE_BYTES (WK * WARP_TILE_BYTES)
#define RING_BYTES (STAGES * TILE_BYTES)
#define SUM_PITCH 20                         // floats from a column of 16 sums to the next: stores hit all banks
#define SUM_FLOATS (8 * SUM_PITCH)           // of a warp
#define SUMS_BYTES (2 * WK * SUM_FLOATS * 4)  // two buffers: one barrier for each exchange
#define AHEAD (STAGES - 1)                   // tiles that are on their way while one is multiplied

static_assert(THREADS >= 128, "a thread for each of the 16 x 8 sums that are exchanged at a time");
static_assert(AHEAD >= 1, "one tile is multiplied while another is filled");

struct alignas(16) Quad { u32 v[4]; };  // eight elements that are neighbours in a row

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory behind the thread's back; zeros, and nothing read, if not `inside`.
DEVICE void copy_async(u32 shared, const bf16* global, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE Quad load_shared(u32 from) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "r"(from) : "memory");
  return q;
}
DEVICE void store_shared(u32 to, const Quad& q) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(q.v[0]), "r"(q.v[1]), "r"(q.v[2]), "r"(q.v[3])
               : "memory");
}

// c[16,8] += a[16,16] b[16,8]; a: rows g and g + 8 of the first 8 k, then of the others.
DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Programmatic dependent launch: let the next kernel start; wait until the one before has ended.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) CONCAT(name, SUFFIX)
KERNEL(linear_rows)(const bf16* x, const bf16* weight, const bf16* bias, C_T* y, float* parts, i64 M, i64 N, i64 K,
                    i64 slices) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, rows = (int)M;
  i64 slice = blockIdx.x % (u32)slices, group = blockIdx.x / (u32)slices, groups = gridDim.x / (u32)slices;
  i64 all_chunks = (K + CHUNK - 1) / CHUNK;
  i64 first_chunk = slice * all_chunks / slices;
  int chunks = (int)((slice + 1) * all_chunks / slices - first_chunk);
  int first_row = (int)(group * N / groups), count = (int)((group + 1) * N / groups) - first_row;  // of weight
  int passes = (count + PASS - 1) / PASS, each = count / passes, longer = count % passes;
  auto row_of = [&](int pass) { return first_row + pass * each + min(pass, longer); };  // a pass's first
  int k_lane = (int)first_chunk * CHUNK + warp * 64 + t * 8;  // the lane's first k: it has 8, and 8 from 32 on

  float* sums = (float*)shared;
  u32 ring = shared_address(shared) + SUMS_BYTES;
  u32 my_weight = ring + warp * WARP_TILE_BYTES + lane * 16;
  u32 x_chunk_bytes = (u32)rows * WK * 128;  // [warp][32 k][row][t]
  u32 my_x = ring + RING_BYTES + (u32)rows * warp * 128 + g * 64 + t * 16, x_half_bytes = (u32)rows * 64;

  // The tile that is asked for next.
  int coming_chunk = 0, coming_pass = 0;
  const bf16* coming_row;  // row g of the pass, at k_lane
  int coming_rows;         // of the pass, from there on
  auto enter_pass = [&] {
    int row = row_of(coming_pass) + g;
    coming_row = weight + row * K + k_lane;
    coming_rows = row_of(coming_pass + 1) - row;
  };
  auto ask_for_weight = [&](u32 stage) {
    int k = k_lane + coming_chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < 2 * MI; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        copy_async(my_weight + stage * TILE_BYTES + (i * 2 + h) * 512,
                   coming_row + i * 8 * K + coming_chunk * CHUNK + h * 32,
                   i * 8 < coming_rows && k + h * 32 < K);
  };
  auto ask_for_x = [&] {
    int k = k_lane + coming_chunk * CHUNK;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (nt * 8 + g < rows) {
#pragma unroll
        for (int h = 0; h < 2; h++)
          copy_async(my_x + coming_chunk * x_chunk_bytes + h * x_half_bytes + nt * 512,
                     x + (nt * 8 + g) * K + k + h * 32, k + h * 32 < K);
      }
  };
  auto advance = [&] {
    if (++coming_chunk < chunks) return;
    coming_chunk = 0;
    coming_pass++;
    enter_pass();
  };

  enter_pass();
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    if (coming_pass < passes) {
      ask_for_weight(s);
      advance();
    }
    copy_commit();
  }
  wait_for_previous();
  // x of those tiles, past the queue of copies, in which it would be behind all of their weight.
  {
    Quad early[AHEAD][NT][2];
#pragma unroll
    for (int s = 0; s < AHEAD; s++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int k = k_lane + s * CHUNK + h * 32;
          early[s][nt][h] = Quad{};
          if (nt * 8 + g < rows && s < chunks && k < K) early[s][nt][h] = *(const Quad*)(x + (nt * 8 + g) * K + k);
        }
#pragma unroll
    for (int s = 0; s < AHEAD; s++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (nt * 8 + g < rows && s < chunks)
            store_shared(my_x + s * x_chunk_bytes + h * x_half_bytes + nt * 512, early[s][nt][h]);
  }

  float sum[MI][NT][4] = {};
  int buffer = 0;
  // Adds the warps' sums of a pass, in order, and stores them; `sum` is zero behind it.
  auto finish = [&](int pass) {
    int first = row_of(pass), end = row_of(pass + 1);
#pragma unroll
    for (int mi = 0; mi < MI; mi++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        float(&c)[4] = sum[mi][nt];  // rows g, g + 8 of weight; rows 2 t, 2 t + 1 of x
        float* from = sums + buffer * WK * SUM_FLOATS;
        float* to = from + warp * SUM_FLOATS + 2 * t * SUM_PITCH + g;
        to[0] = c[0], to[SUM_PITCH] = c[1], to[8] = c[2], to[SUM_PITCH + 8] = c[3];
        c[0] = c[1] = c[2] = c[3] = 0.0f;
        __syncthreads();  // and who is behind it has read the other buffer
        buffer ^= 1;
        int r = threadIdx.x % 16, col = threadIdx.x / 16, m = nt * 8 + col, n = first + mi * 16 + r;
        if (col >= 8 || m >= rows || n >= end) continue;
        from += col * SUM_PITCH + r;
        float total = from[0];
#pragma unroll
        for (int w = 1; w < WK; w++) total += from[w * SUM_FLOATS];
        if (slices > 1) parts[(slice * M + m) * N + n] = total;
        else y[m * N + n] = from_float<C_T>(bias ? total + to_float(bias[n]) : total);
      }
  };

  u32 stage = 0, fresh = AHEAD;
  int chunk = 0, pass = 0;
#pragma unroll 1
  while (pass < passes) {
    copy_wait<AHEAD - 1>();
    if (coming_pass < passes) {  // into the tile that this lane read last time
      ask_for_weight(fresh);
      if (coming_pass == 0) ask_for_x();
      advance();
    }
    copy_commit();
    u32 tile = my_weight + stage * TILE_BYTES, x_tile = my_x + chunk * x_chunk_bytes;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Quad a[MI][2], b[NT];
#pragma unroll
      for (int i = 0; i < 2 * MI; i++) a[i / 2][i % 2] = load_shared(tile + (i * 2 + h) * 512);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        b[nt] = Quad{};
        if (nt * 8 + g < rows) b[nt] = load_shared(x_tile + h * x_half_bytes + nt * 512);
      }
#pragma unroll
      for (int half = 0; half < 4; half += 2)
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int nt = 0; nt < NT; nt++)
            multiply_add(sum[mi][nt], a[mi][0].v[half], a[mi][1].v[half], a[mi][0].v[half + 1], a[mi][1].v[half + 1],
                         b[nt].v[half], b[nt].v[half + 1]);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    fresh = fresh + 1 == STAGES ? 0 : fresh + 1;
    if (++chunk == chunks) {
      finish(pass++);
      chunk = 0;
    }
  }
}
