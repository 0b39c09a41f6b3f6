// Linear on Hopper's tensor cores: C[r,c] = (or +=) sum_k A[r,k] B[c,k] + bias[c]; bf16 in, bf16 or float out.
//
// The three products of a linear layer are this one kernel. It is compiled for each form, which says of either operand
// whether k is its contiguous axis (MN 0) or the other one is (MN 1); all matrices are row-major:
//   forward  C = y        A = x    A_MN 0  B = weight  B_MN 0  C_T bf16   k runs over K
//   dgrad    C = d_x      A = d_y  A_MN 0  B = weight  B_MN 1  C_T bf16   k runs over M
//   wgrad    C = d_weight A = d_y  A_MN 1  B = x       B_MN 1  C_T float  k runs over N
// Macros: A_MN B_MN C_T, the tile BM BN, CONSUMERS, the cluster CM CN CK, STAGES, EPILOGUE_BOXES.
// Method: one persistent CTA an SM. A producer warp fills STAGES shared tiles of BM x 64 and BN x 64 by TMA (128-byte
//   swizzle), CONSUMERS warpgroups multiply them with wgmma, BM / CONSUMERS rows each, and write C by way of shared
//   memory with TMA. A group of CM x CN CTAs makes neighbouring tiles and loads what they share once, by multicast.
//   For products of few tiles a cluster is CK such groups: each sums a range of k, then the CTAs of a tile hand each
//   other their sums, through distributed shared memory, so that each of them has BN / CK columns to write.
//   A weight does not depend on the launch before this one: its first stages are asked for before that has ended.
//   Products of few rows are bound by reading the weight, once: boxes of x have no more rows than there are (TMA takes
//   long over zeros: 16 rows in boxes of 64 took up to 1.55 times as long), and the L2 need not keep the weight (1.5%).
// Rejected: Stream-K, which won 3 of 77 products of Qwen3-32B; sums exchanged through the L2, which win 1.05x on the
//   smallest, but whose CTAs hang when not all of the grid is resident (H200, 2026-11). Of few rows (the same,
//   2026-11-30): letting the next launch start at another place (0 to 1% slower); prefetching the weight into the L2
//   before griddepcontrol.wait (4 to 6%); a second CTA an SM, with half the stages, for the next launch (11%, 169
//   times); pairs that share x by multicast (3%, 64 times).
// Launch: block (CONSUMERS + 1) * 128; grid a multiple of CM * CN * CK, at best one CTA an SM; dynamic shared bytes
//   STAGES * (A_BYTES + B_BYTES) + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + EXCHANGE_BYTES. ops/linear_sm90.py makes
//   tiles and maps. A and C may belong to the launch before this one, B of forward and dgrad may not (griddepcontrol).
// Needs: addresses and row pitches of A, B and C that are multiples of 16 bytes; any extents beside that, from 1; at
//   least CK blocks of 64 k.
// Numerics: bf16 products are exact; wgmma adds them to fp32 sums, 16 k at a time in order of k (its adders truncate: at
//   most 0.46 of 2^-20 sum |a||b| seen). CK > 1: the sums of the ranges are added in order of k. bias is added in fp32,
//   then C is rounded once. `accumulate` (float C) is TMA's reduction, one addition an element. Deterministic. Only CK
//   changes a sum's order; rows, columns, the tile and its place do not, so with one CK a row has the same bits in
//   every batch.
// Aliasing: C must not overlap A or B. Capability: 9.0 only (sm_90a).
// Measured against cuBLAS (H200, 2026-11-30), geometric means over projections of Qwen3-32B, 8B and 0.6B: 1.01 of its
//   speed at 512 to 8192 rows (181 products), from 0.90 (512 rows, 1024 columns, 5120 k: of a block of k shared memory
//   has 448 cycles to do and the tensor cores 256) to 1.21; 1.19 to 1.24 at 8 to 64 rows (12 products, worst 0.996),
//   where 5120 x 25600 reaches 0.91 of the bandwidth and 51200 x 5120 0.94; 1.06 to 1.12 with one CK (worst 0.885).
#include "common.cuh"

#define BK 64
#define GROUP (CM * CN)     // CTAs that share operands: consecutive ranks of the cluster
#define CLUSTER (GROUP * CK)
#define THREADS (CONSUMERS * 128 + 128)
#define MI (BM / CONSUMERS / 64)  // blocks of 64 rows of a warpgroup
#define REGS (BN / 2)             // sums that a thread holds of 64 rows
#define B_BOXES ((BN + 63) / 64)
#define A_BYTES (BM * BK * 2)
#define B_BYTES ((B_MN ? B_BOXES * 64 : BN) * BK * 2)
#define OUT_COLS (BN / CK)        // columns of C that a CTA writes
// C leaves in boxes of 64 rows, 128 or (32 columns of bf16) 64 bytes wide and swizzled in as many. What is no multiple
// of 32 columns leaves whole, in one box that is not swizzled (unless it has 64 bytes).
#define WHOLE (OUT_COLS % 32 != 0)
#define BOX_COLS (WHOLE ? OUT_COLS : sizeof(C_T) == 4 || OUT_COLS % 64 ? 32 : 64)
#define BOX_PITCH (BOX_COLS * (int)sizeof(C_T))
#define BOX_BYTES (64 * BOX_PITCH)
#define SWIZZLE(row) (BOX_PITCH == 128 ? (row) & 7 : BOX_PITCH == 64 ? (row) >> 1 & 3 : 0)  // of 16 bytes
#define EXCHANGE_BYTES (CONSUMERS * (CK - 1) * OUT_COLS * 256)
#define EXCHANGE_BARRIERS (CK > 1 ? 2 * CONSUMERS : 0)
#define WEIGHT_IS_B (!A_MN)
// Rows of A that a tile loads, and of C that it writes: `height`, if that may be less than BM. What lies beyond them in
// a stage is anything, and nobody looks at its sums.
#define HEIGHT_VARIES (BM == 64 && CN == 1 && !A_MN)

// setmaxnreg: multiples of 8, and (CONSUMERS * consumer + producer) * 128 within the SM's 65536. One consumer has
// all that it may have from the start.
#if CONSUMERS == 3
#define CONSUMER_REGISTERS 160
#define PRODUCER_REGISTERS 32
#else
#define CONSUMER_REGISTERS 240
#define PRODUCER_REGISTERS 24
#endif

static_assert(BM % (CONSUMERS * 64) == 0 && CONSUMERS <= 3, "64 or 128 rows a warpgroup");
static_assert(OUT_COLS % BOX_COLS == 0 && OUT_COLS % 8 == 0, "whole boxes, and the exchange goes by eight columns");
static_assert(EPILOGUE_BOXES >= (WHOLE ? 1 : 2), "one is written while another is read");
static_assert(CK == 1 || CK == 2 || CK == 4, "see Exchange");
static_assert((A_MN || BM / CN % 8 == 0) && (B_MN || BN / CM % 8 == 0), "a part of a stage is whole swizzle atoms");

#include "sm90.cuh"

// One consumer warpgroup's way out: 64 rows of OUT_COLS sums leave as boxes, through EPILOGUE_BOXES places in turn.
struct Writer {
  const TensorMap* map;
  u32 boxes;  // this warpgroup's places
  int place, wg, tid;
  bool accumulate;

  DEVICE void write(const float* sums, int row, int col) {
    int warp = tid / 32, lane = tid % 32;
#pragma unroll
    for (int x = 0; x < OUT_COLS; x += BOX_COLS) {
      u32 base = boxes + place * BOX_BYTES;
      if (EPILOGUE_BOXES == 1) {  // the only place must be free
        if (tid == 0) tma_store_wait<0>();
        group_sync(wg);
      }
      const float* v = sums + x / 2;
      if (sizeof(C_T) == 4) {
        int r = warp * 16 + lane / 4, swizzle = SWIZZLE(r);  // r and r + 8 are swizzled alike
#pragma unroll
        for (int i = 0; i < BOX_COLS / 2; i += 4) {
          u32 at = base + r * BOX_PITCH + (((i / 2 + lane % 4 / 2) ^ swizzle) << 4) + (lane & 1) * 8;
          u32 below = at + 8 * BOX_PITCH;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[i]), "f"(v[i + 1]) : "memory");
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(below), "f"(v[i + 2]), "f"(v[i + 3]) : "memory");
        }
      } else {
        int r = warp * 16 + lane % 16, swizzle = SWIZZLE(r);
#pragma unroll
        for (int i = 0; i < BOX_COLS / 16 * 8; i += 8) {
          u32 at = base + r * BOX_PITCH + (((i / 4 + lane / 16) ^ swizzle) << 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                       "r"(pack(v[i], v[i + 1])), "r"(pack(v[i + 2], v[i + 3])), "r"(pack(v[i + 4], v[i + 5])),
                       "r"(pack(v[i + 6], v[i + 7])) : "memory");
        }
        if (BOX_COLS % 16) {  // the last of an odd number of eights
          const int i = BOX_COLS / 16 * 8;
          asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(base + r * BOX_PITCH + i * 4),
                       "r"(pack(v[i], v[i + 1])), "r"(pack(v[i + 2], v[i + 3])) : "memory");
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      if (EPILOGUE_BOXES > 1 && tid == 0)
        tma_store_wait<(EPILOGUE_BOXES > 1 ? EPILOGUE_BOXES - 2 : 0)>();  // then the next place is free, too
      group_sync(wg);
      if (tid == 0) tma_store(map, base, col + x, row, accumulate);
      place = place + 1 == EPILOGUE_BOXES ? 0 : place + 1;
    }
  }
};

#if CK > 1
DEVICE void barrier_wait_cluster(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// The CK CTAs of a tile, GROUP ranks apart, turn CK times 64 x BN sums into CK times 64 x OUT_COLS of them, one a CTA,
// added in order of k.
struct Exchange {
  u32 buffer;  // this warpgroup's: from each of the others OUT_COLS / 8 vectors of 128 threads
  u32 arrived, freed;
  u32 parity;
  int tid, lane, rank_k, first, warps;  // first: the rank of the CTA with rank_k 0; warps that have rows of C

  // rank_k as a constant, since registers have no index. `more`: another round follows, for which the others wait.
  template <int MINE> DEVICE void as(const float* sums, float* total, bool more) {
    const int vectors = OUT_COLS / 8;
    if (tid == 0) barrier_expect(arrived, (CK - 1) * vectors * warps * 512);
    barrier_wait_cluster(freed, parity ^ 1);
#pragma unroll
    for (int other = 0; other < CK; other++) {
      if (other == MINE || tid / 32 >= warps) continue;
      u32 slot = MINE < other ? MINE : MINE - 1, rank = first + other * GROUP;
      u32 target = remote_address(buffer + slot * vectors * 2048 + tid * 16, rank), bar = remote_address(arrived, rank);
#pragma unroll
      for (int i = 0; i < vectors; i++) {
        const float* v = sums + (other * vectors + i) * 4;
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         target + i * 2048), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
      }
    }
    barrier_wait_cluster(arrived, parity);
#pragma unroll
    for (int i = 0; i < vectors; i++)
#pragma unroll
      for (int k = 0; k < CK; k++) {
        float loaded[4];
        const float* v = sums + (MINE * vectors + i) * 4;
        if (k != MINE) {
          u32 slot = k < MINE ? k : k - 1;
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(loaded[0]), "=f"(loaded[1]), "=f"(loaded[2]), "=f"(loaded[3])
                       : "r"(buffer + (slot * vectors + i) * 2048 + tid * 16) : "memory");
          v = loaded;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) total[i * 4 + j] = k ? total[i * 4 + j] + v[j] : v[j];
      }
    __syncwarp();
    if (more && lane < CK && lane != MINE)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                       remote_address(freed, first + lane * GROUP)) : "memory");
    parity ^= 1;
  }
  DEVICE void operator()(const float* sums, float* total, bool more) {
    if (rank_k == 0) as<0>(sums, total, more);
    else if (rank_k == 1) as<1>(sums, total, more);
#if CK == 4
    else if (rank_k == 2) as<2>(sums, total, more);
    else as<3>(sums, total, more);
#endif
  }
};
#endif

// Grid: clusters * CLUSTER. `group` and `by_columns`: the order of the tiles. `bias` [N] may be null; `accumulate` with
// float C only. `height`: BM, or the rows of the boxes of A and C, a multiple of 8, which are all of M then.
#undef KERNEL
#define KERNEL(name) \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) CONCAT(name, SUFFIX)
KERNEL(linear_sm90)(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                    const __grid_constant__ TensorMap c_map, const bf16* bias, i64 M, i64 N, i64 K, i64 accumulate,
                    i64 group, i64 by_columns, i64 height) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + EXCHANGE_BARRIERS];
  const u32 a_tiles = shared_address(shared), b_tiles = a_tiles + STAGES * A_BYTES;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  int warp = __shfl_sync(FULL_MASK, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int rank = blockIdx.x % CLUSTER, rank_k = rank / GROUP, rank_m = rank % CM, rank_n = rank % GROUP / CM;
  int group_rank = rank_k * GROUP;  // the cluster's rank of the first CTA of this group

  // The producer makes the barriers, so its first loads need not wait for anyone (but with multicast for the group).
  const bool consumer = warp < CONSUMERS * 4;
  if (threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&c_map) : "memory");
  if (threadIdx.x == CONSUMERS * 128) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b_map) : "memory");
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, CONSUMERS * 4 * GROUP);
    }
    for (int i = 0; i < EXCHANGE_BARRIERS; i++)
      barrier_init(empty + (STAGES + i) * 8, i < CONSUMERS ? 1 : 4 * (CK - 1));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before this thread's own loads
  }
  __syncwarp();
  if (CLUSTER > 1) {
    cluster_arrive();
    if (consumer || GROUP > 1) cluster_wait();
  } else {
    if (consumer) asm volatile("bar.sync 15, %0;" ::"n"(THREADS) : "memory");
    else asm volatile("bar.arrive 15, %0;" ::"n"(THREADS) : "memory");
  }

  Order order(M, N, group, by_columns);
  int tiles = order.tiles(), clusters = gridDim.x / CLUSTER, k_blocks = (int)((K + BK - 1) / BK);
  int k_first = k_blocks * rank_k / CK, k_count = k_blocks * (rank_k + 1) / CK - k_first;
  int stage = 0;
  u32 phase = 0;

  if (!consumer) {  // the producer
#if CONSUMERS > 1
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#endif
    if (warp == CONSUMERS * 4 && lane == 0) {
      unsigned short a_mask = 0, b_mask = 0;  // who shares this CTA's rows, and its columns
      for (int i = 0; i < CN; i++) a_mask |= 1 << (group_rank + rank_m + i * CM);
      for (int i = 0; i < CM; i++) b_mask |= 1 << (group_rank + i + rank_n * CM);
      const u32 a_bytes = HEIGHT_VARIES ? (u32)height * BK * 2 : A_BYTES;
      // A weight that one row of tiles reads need not stay in the L2.
      const u64 b_policy = WEIGHT_IS_B && M <= BM * CM ? EVICT_FIRST : EVICT_NORMAL;
      int tile = blockIdx.x / CLUSTER, ahead = 0;  // stages whose part of B has been asked for
      if (WEIGHT_IS_B && tile < tiles) {
        int m, n;
        order.place(tile, m, n);
        int col = (n * CN + rank_n) * BN;
        for (ahead = 0; ahead < min(STAGES, k_count); ahead++) {
          u32 bar = full + ahead * 8;
          barrier_expect(bar, a_bytes + B_BYTES);
          load_tile<B_MN, BN, CM>(b_tiles + ahead * B_BYTES, &b_map, bar, col, (k_first + ahead) * BK, rank_m, b_mask,
                                  b_policy);
        }
      }
      // The launch before this one has ended, for the whole CTA: nobody else goes on before A arrives.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      // Not sooner: the next launch reads its weight at once, which one before this one may have written.
      asm volatile("griddepcontrol.launch_dependents;");
      for (; tile < tiles; tile += clusters) {
        int m, n;
        order.place(tile, m, n);
        int row = (m * CM + rank_m) * BM, col = (n * CN + rank_n) * BN;
        for (int k = k_first; k < k_first + k_count; k++) {
          u32 bar = full + stage * 8;
          if (ahead == 0) {
            barrier_wait(empty + stage * 8, phase ^ 1);
            barrier_expect(bar, a_bytes + B_BYTES);
          }
          load_tile<A_MN, BM, CN>(a_tiles + stage * A_BYTES, &a_map, bar, row, k * BK, rank_n, a_mask, EVICT_NORMAL);
          if (ahead > 0) ahead--;
          else load_tile<B_MN, BN, CM>(b_tiles + stage * B_BYTES, &b_map, bar, col, k * BK, rank_m, b_mask, b_policy);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
      // A CTA leaves once nobody can reach into its shared memory any more: its peers have released all of its stages,
      // and its own consumers have waited for everything else.
      if (GROUP > 1)
        for (int s = 0; s < STAGES; s++) {
          barrier_wait(empty + stage * 8, phase ^ 1);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
    }
    __syncwarp();
    if (CLUSTER > 1 && GROUP == 1) cluster_wait();  // of the start
  } else {  // the consumers
#if CONSUMERS > 1
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
#endif
    int wg = warp / 4;
    // Whichever axis is contiguous, 64 rows of A take 8192 bytes.
    const u64 a_first = descriptor(a_tiles + wg * MI * 8192, A_MN), b_first = descriptor(b_tiles, B_MN);
    int tid = threadIdx.x % 128;
    u32 boxes = b_tiles + STAGES * B_BYTES;
    Writer writer = {&c_map, boxes + wg * EPILOGUE_BOXES * BOX_BYTES, 0, wg, tid, accumulate != 0};
#if CK > 1
    u32 bars = empty + STAGES * 8;
    u32 buffer = boxes + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + wg * (EXCHANGE_BYTES / CONSUMERS);
    const int warps = HEIGHT_VARIES ? ((int)height + 15) / 16 : 4;
    Exchange exchange = {buffer, bars + wg * 8, bars + (CONSUMERS + wg) * 8, 0, tid, lane, rank_k, rank % GROUP, warps};
#endif
    float sums[MI][REGS];
#pragma unroll
    for (int m = 0; m < MI; m++)
#pragma unroll
      for (int i = 0; i < REGS; i++) sums[m][i] = 0.0f;

    for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
      int m_tile, n_tile;
      order.place(tile, m_tile, n_tile);
      int row = (m_tile * CM + rank_m) * BM + wg * MI * 64, col = (n_tile * CN + rank_n) * BN;
      int done = stage;  // the stage that the wgmmas in flight read
#pragma unroll 1
      for (int k = 0; k < k_count; k++) {
        barrier_wait(full + stage * 8, phase);
        u64 a = a_first + stage * (A_BYTES >> 4), b = b_first + stage * (B_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; i++)
#pragma unroll
          for (int m = 0; m < MI; m++)
            wgmma(sums[m], a + i * K_STEP(A_MN) + m * (8192 >> 4), b + i * K_STEP(B_MN), i > 0 || k > 0);
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          barrier_release<GROUP>(empty + done * 8, lane, group_rank);
          done = stage;
        }
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
      wgmma_wait<0>();
      barrier_release<GROUP>(empty + done * 8, lane, group_rank);
#pragma unroll
      for (int m = 0; m < MI; m++)
#pragma unroll
        for (int i = 0; i < REGS; i++) asm volatile("" : "+f"(sums[m][i])::"memory");  // nothing reads them sooner

#pragma unroll
      for (int m = 0; m < MI; m++) {
#if CK > 1
        float total[OUT_COLS / 2];
        exchange(sums[m], total, m + 1 < MI || tile + clusters < tiles);
#else
        float* total = sums[m];
#endif
        int out_col = col + rank_k * OUT_COLS;
        if (!B_MN && bias)  // of the forward
#pragma unroll
          for (int i = 0; i < OUT_COLS / 2; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++) {
              i64 x = out_col + i * 2 + lane % 4 * 2 + j;
              float add = x < N ? to_float(bias[x]) : 0.0f;
              total[i + j] += add;
              total[i + j + 2] += add;
            }
        writer.write(total, row + m * 64, out_col);
      }
    }
    if (tid == 0) tma_store_wait<0>();
  }
}
