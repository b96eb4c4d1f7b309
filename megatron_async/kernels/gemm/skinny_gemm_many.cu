// A skinny GEMM (skinny_gemm.cuh) of 64 rows of x and more, multiplied by wgmma m64nNk16 with N rows of W:
// x is the left operand. A warpgroup has 64 rows of x, or 128, and all of a CTA's rows of W, 16 to 256. A
// stage is two TMA tiles, the weight's and that of x, of 64 columns each. So many rows of x are half as
// many bytes as the weight, or more: CTAs next to each other, which have other rows of W, share them.
// Each loads a part, which goes to all of them.
//
// Of four warps more one brings the stages in. A stage's bytes report to a barrier, and so do the
// warpgroups of all CTAs that share x when they have read it. The other three add up the statistics of x,
// 64 KB of some, which nobody needs before the end.
//
//   RT   16-row tiles of W in a CTA, MT groups of eight rows of x, ST stages of the ring
//   MULTICAST   CTAs that share tiles of x
//   x, w, norm_weight, norm_bias   not read
//   w_map, x_map   W in tiles of RT * 16 rows (gated: eight rows of gate and eight of up in turn), x in
//                  tiles of a CTA's part of its rows

#define CONSUMERS (MT >= 16 ? 2 : 1)  // warpgroups
#define WARPS (4 * CONSUMERS + 4)
#define BLOCKS (MT / 8 / CONSUMERS)  // of 64 rows of x, in a warpgroup
#define WARP_GROUPS (2 * BLOCKS)
#define GROUP(i) ((warp / 4 * BLOCKS + (i) / 2) * 8 + warp % 4 * 2 + (i) % 2)
#define HAS_SUMS (warp < 4 * CONSUMERS)
#define FIRST_PEER (CLUSTER > 1 ? member * SPLIT_K : 0)
#define WK 1
#define TILES RT
#define WARP_TILES RT
#define INTERLEAVED 0
#define GATHERED 1        // partial sums in the workspace are added up here
#define EARLY_RESIDUAL (CLUSTER > 1 || BLOCKS * RT <= 8)  // there are registers for it
#define X_STAGE (MT * 8 * 128)
#define X_PART (X_STAGE / MULTICAST)
#define STAGE_BYTES (WEIGHT_BYTES + X_STAGE)
#define RING_BYTES (ST * STAGE_BYTES > SENT_BYTES ? ST * STAGE_BYTES : SENT_BYTES)
#define ARRIVED_AT RING_BYTES            // the stages' barriers: their bytes are there
#define FREED_AT (ARRIVED_AT + ST * 8)   // and have been read
#define NORMED_AT (FREED_AT + ST * 8)    // the barrier of the statistics
#define MAINLOOP_BYTES (NORMED_AT + 8)
#define SENT_AT 0                        // the ring, when all CTAs have read theirs
#define ADDERS 3                         // warps
#define BARE SUMS

extern __shared__ __align__(1024) char shared[];

#include "skinny_gemm.cuh"

static_assert(NORM != 2 && RT <= 16, "x goes into the product as it is");
static_assert(MT % 8 == 0 && MT <= 32 && MT / 8 != 3, "blocks of 64 rows");
static_assert(BLOCKS * RT <= 16, "sums of a thread");
static_assert(MULTICAST * CLUSTER <= 8 && MT % MULTICAST == 0, "a cluster");
static_assert(ST >= 2, "a stage is free when the next one has arrived");
static_assert(!SCALES_ROWS && !SENDS && !ROUNDED, "bfloat16, and sums over ranks where it ends");

extern "C" __global__ void __cluster_dims__(CLUSTER * MULTICAST, 1, 1) __launch_bounds__(THREADS)
    skinny_gemm_many(const u16* x, const char* w, const u16* bias, const u16* norm_weight,
                     const u16* norm_bias, const float2* stats_in, int stats_tiles, float eps,
                     const u16* residual, u16* out, const u16* next_weight, u16* scaled,
                     float2* stats_out, int M, int out_row, float4* workspace, u32* arrivals SCALING,
                     const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map SENDING) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wr = 0, wk = 0;
  const int block = blockIdx.x;
  // Neighbours share x, and a cluster's further ones K.
  const int rank = CLUSTER > 1 ? block % SPLIT_K : block / MULTICAST % SPLIT_K;
  const int first = CLUSTER > 1 ? block / SPLIT_K : block / (MULTICAST * SPLIT_K) * MULTICAST + block % MULTICAST;
  const int member = first % MULTICAST;
  const int tiles_at_once = gridDim.x / SPLIT_K;
  int tile = first;
  const int row_blocks = (N + 16 * TILES - 1) / (16 * TILES);
  const int last = (row_blocks + MULTICAST - 1) / MULTICAST * MULTICAST;
  const int my_tiles = PERSISTENT ? (last - tile + tiles_at_once - 1) / tiles_at_once : 1;
  const int first_stage = K_STAGES * rank / SPLIT_K;
  const int count = K_STAGES * (rank + 1) / SPLIT_K - first_stage;
  const int total = count * my_tiles;
  const u32 base = shared_address(shared);
  const u32 ring = base, arrived = base + ARRIVED_AT, freed = base + FREED_AT, normed = base + NORMED_AT;
  const bool leads = threadIdx.x == 128 * CONSUMERS;
  if (leads) {
    prefetch_tensor_map(w_map), prefetch_tensor_map(x_map);
    for (int s = 0; s < ST; s++) {
      init_barrier(arrived + s * 8);
      init_barrier(freed + s * 8, MULTICAST * CONSUMERS);
    }
    init_barrier(normed, ADDERS);
    publish_barriers();
  }
  __syncwarp();

#include "skinny_gemm_begin.cuh"
  if (CLUSTER == 1 && MULTICAST > 1) arrive_in_cluster();

  // --- weights, as far as the ring holds them, before anything is known of x ------------------
  int ahead_tile = tile, ahead_k = 0;
  auto load_x = [&](int k, int stage) {
    const u32 into = base + stage * STAGE_BYTES + WEIGHT_BYTES + member * X_PART;
    const int column = (first_stage + k) * STAGE_K, row = member * (MT * 8 / MULTICAST);
    if (MULTICAST == 1) {
      tma_load(into, x_map, column, row, arrived + stage * 8);
    } else {
      u32 mask = 0;
      for (int m = 0; m < MULTICAST; m++) mask |= 1u << (CLUSTER > 1 ? m * SPLIT_K + rank : m);
      tma_multicast(into, x_map, column, row, arrived + stage * 8, mask);
    }
  };
  auto load_weights = [&](int stage) {
    const u32 into = base + stage * STAGE_BYTES, barrier = arrived + stage * 8;
    const int k = (first_stage + ahead_k) * STAGE_K;
    expect_bytes(barrier, WEIGHT_BYTES + X_STAGE);
#if GATED
    tma_load(into, w_map, k, 0, 0, ahead_tile * TILES, barrier);
#else
    tma_load(into, w_map, k, ahead_tile * TILES * 16, barrier);
#endif
  };
  auto go_on = [&] {
    if (++ahead_k == count) ahead_k = 0, ahead_tile += tiles_at_once;
  };
  if (leads) {
    for (int s = 0; s < ST && s < total; s++) load_weights(s), go_on();
  }
  __syncthreads();  // the barriers are there
#include "skinny_gemm_prefetch.cuh"

  if (MULTICAST * CLUSTER > 1) await_cluster();
  wait_for_predecessor();
  release_successor();
#if SUMS
#include "skinny_gemm_send.cuh"
#endif

  // --- x ---------------------------------------------------------------------------------------
  if (leads)
    for (int s = 0; s < ST && s < total; s++) load_x(s % count, s);
#include "skinny_gemm_input.cuh"
  if (EARLY_RESIDUAL) load_residual();
  // 1 / deviation of every third row of x.
  auto load_deviations = [&](int begin) {
    constexpr int at_once = 12, deep = 2;  // loads of a lane: each is a trip to L2
    for (int first = begin; first < MT * 8; first += ADDERS * at_once) {
      float square[at_once];
#pragma unroll
      for (int j = 0; j < at_once; j++) square[j] = 0.f;
      for (int i = lane; i < stats_tiles; i += 32 * deep) {
        float2 v[at_once][deep];
#pragma unroll
        for (int j = 0; j < at_once; j++)
#pragma unroll
          for (int k = 0; k < deep; k++)
            v[j][k] = load_l2(stats_in + (size_t)min(first + j * ADDERS, M - 1) * stats_tiles +
                              min(i + 32 * k, stats_tiles - 1));
#pragma unroll
        for (int j = 0; j < at_once; j++)
#pragma unroll
          for (int k = 0; k < deep; k++) square[j] += i + 32 * k < stats_tiles ? v[j][k].y : 0.f;
      }
#pragma unroll
      for (int d = 16; d; d >>= 1)
#pragma unroll
        for (int j = 0; j < at_once; j++) square[j] += __shfl_xor_sync(~0u, square[j], d);
#pragma unroll
      for (int j = 0; j < at_once; j++) {
        const int row = first + j * ADDERS;
        if (lane == j && row < MT * 8) scale[row] = make_float2(0.f, rsqrtf(square[j] / K + eps));
      }
    }
    __syncwarp();
    if (lane == 0) arrive_at(normed);
  };

  // --- the main loop ---------------------------------------------------------------------------
  // Row g of eight of x, and row g + 8; 2t and 2t + 1 of eight rows of W.
  float sums[BLOCKS][TILES * 8];
  auto clear = [&]() {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int j = 0; j < TILES * 8; j++) sums[b][j] = 0.f;
  };
  auto take = [&](int r, int i, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = sums[i / 2][r * 8 + j / 2 * 4 + i % 2 * 2 + j % 2];
  };
  clear();

#include "skinny_gemm_finish.cuh"

  int stage = 0;
  u32 passed = 0;  // rounds of the ring, by parity
  if (!HAS_SUMS) {
    if (leads)
      for (int i = ST; i < total; i++) {
        await_bytes(freed + stage * 8, passed);
        load_weights(stage);
        load_x(ahead_k, stage);
        go_on();
        if (++stage == ST) stage = 0, passed ^= 1;
      }
    if (NORM == 1 && warp > 4 * CONSUMERS) load_deviations(warp - 4 * CONSUMERS - 1);
    __syncwarp();
  } else {
    const u32 own_x = base + WEIGHT_BYTES + warp / 4 * BLOCKS * 8192;
    // All CTAs that share x may fill a stage again, if any does.
    auto free_stage = [&](int i, int which) {
      if (threadIdx.x % 128 || i + ST >= total) return;
#pragma unroll
      for (int m = 0; m < MULTICAST; m++)
        arrive_at(MULTICAST == 1 ? freed + which * 8
                                 : peer_address(freed + which * 8, CLUSTER > 1 ? m * SPLIT_K + rank : m));
    };
    for (int i = 0; i < total; tile += tiles_at_once) {
      for (int k_done = 0; k_done < count; k_done++, i++) {
        await_bytes(arrived + stage * 8, passed);
        __syncwarp();
        begin_wgmma();
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
          for (int b = 0; b < BLOCKS; b++)
            wgmma<TILES * 16>(sums[b], own_x + stage * STAGE_BYTES + b * 8192 + k * 32,
                              base + stage * STAGE_BYTES + k * 32);
        end_wgmma();
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) await_wgmma<TILES * 16, 1>(sums[b]);
        if (k_done) free_stage(i - 1, stage ? stage - 1 : ST - 1);
        if (++stage == ST) stage = 0, passed ^= 1;
      }
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) await_wgmma<TILES * 16>(sums[b]);
      free_stage(i - 1, stage ? stage - 1 : ST - 1);
      if (PERSISTENT) {
        if (NORM == 1) await_bytes(normed, 0);
        __syncwarp();
#include "skinny_gemm_finish_tile.cuh"
        clear();
      } else {
        break;
      }
    }
  }
  if (PERSISTENT) return;

  if (NORM == 1) {
    await_bytes(normed, 0);
    __syncwarp();
  }
  if (CLUSTER > 1) {
    arrive_in_cluster();
    await_cluster();
  }
  if (!EARLY_RESIDUAL) load_residual();
#if WORKSPACE
  float4* parts = workspace + (size_t)tile * SPLIT_K * FRAGMENTS * 32 + lane;
  auto part_of = [&](int c, int r, int i) { return parts + (c * FRAGMENTS + r * MT + GROUP(i)) * 32; };
  if (HAS_SUMS)
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; i++)
#pragma unroll
      for (int r = 0; r < TILES; r++) {
        float v[4];
        take(r, i, v);
        *part_of(rank, r, i) = make_float4(v[0], v[1], v[2], v[3]);
      }
  __shared__ u32 before;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = add_one_in_order(arrivals + tile);
    if (before == SPLIT_K - 1) arrivals[tile] = 0;  // for the next launch
  }
  __syncthreads();
#if SUMS
  if (before != SPLIT_K - 1) count_launch(launches, number);
#endif
  if (before != SPLIT_K - 1) return;
  // All are loaded before anything is stored.
  if (HAS_SUMS)
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; i++)
#pragma unroll
      for (int r = 0; r < TILES; r++) {
        float v[4], sum[4] = {0.f, 0.f, 0.f, 0.f};
        take(r, i, v);
#pragma unroll
        for (int c = 0; c < SPLIT_K; c++) {
          const float4 part = c == rank ? make_float4(v[0], v[1], v[2], v[3]) : load_l2(part_of(c, r, i));
          sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i / 2][r * 8 + j / 2 * 4 + i % 2 * 2 + j % 2] = sum[j];
      }
#endif
#include "skinny_gemm_reduce.cuh"
}
