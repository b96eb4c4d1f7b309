// A skinny GEMM (skinny_gemm.cuh) whose four warps multiply together, straight from shared memory, by
// wgmma m64nMk16. A stage is two TMA tiles, the weight's and that of x, of 64 columns each. The main
// loop has no barrier of the CTA: a stage's bytes report to an mbarrier, and all four warps' wgmmas end
// together.
//
//   RT   16-row tiles of W in a CTA, MT groups of eight rows of x, ST stages of the ring
//   x, w, norm_weight, norm_bias   not read; without them ptxas is given another order of instructions
//   w_map, x_map   W in tiles of RT * 16 rows (gated: eight rows of gate and eight of up in turn), x in
//                  tiles of all its rows
//
// wgmma multiplies 64 rows of W at a time: those behind the last tile are whatever lies behind it in
// shared memory, and nobody looks at their sums.
//
// Of W8, with a scale for each row, a stage has 128 columns, as many bytes of W, and two TMA tiles of x.
// W goes through registers (skinny_gemm_wgmma_fp8.cuh). Of X8 x has as many bytes, in one tile, and both
// are multiplied straight from shared memory, by wgmma m64nMk32 (skinny_gemm_wgmma_e4m3.cuh).

#define WARPS 4
#define WK 1
#define TILES RT
#define WARP_TILES ((RT + 3) / 4)
#define INTERLEAVED 1
#define LATE_RESIDUAL 0
#if W8 && !X8
#define X_HALF (MT * 8 * 128)
#define X_STAGE (2 * X_HALF)
#else
#define X_STAGE (MT * 8 * 128)
#endif
#define STAGE_BYTES (WEIGHT_BYTES + X_STAGE)
#define RING_BYTES (ST * STAGE_BYTES)
#define BEYOND ((WARP_TILES * 4 - RT) * 2048)  // what wgmma reads behind the last tile
#define ARRIVED_AT (RING_BYTES + (BEYOND > X_STAGE ? BEYOND - X_STAGE : 0))  // the stages' barriers
#define MAINLOOP_BYTES (ARRIVED_AT + ST * 8)

extern __shared__ __align__(1024) char shared[];

#include "skinny_gemm.cuh"
#if W8
#include "e4m3.cuh"

static_assert(SCALES_ROWS, "a scale for each row");
#endif

static_assert(NORM != 2 && RT <= 16, "x goes into the product as it is");

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    skinny_gemm_wgmma(const u16* x, const char* w, const u16* bias, const u16* norm_weight,
                      const u16* norm_bias, const float2* stats_in, int stats_tiles, float eps,
                      const u16* residual, u16* out, const u16* next_weight, u16* scaled,
                      float2* stats_out, int M, int out_row, float4* workspace, u32* arrivals SCALING,
                      const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map SENDING) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wr = warp % 1, wk = 0;  // computed, not 0: a constant would not be captured
  const int rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0;
  const int cta_count = gridDim.x / SPLIT_K;
  int tile = blockIdx.x / SPLIT_K;
  const int row_blocks = (N + 16 * TILES - 1) / (16 * TILES);
  const int my_tiles = PERSISTENT ? (row_blocks - tile + cta_count - 1) / cta_count : 1;
  const int first_stage = K_STAGES * rank / SPLIT_K;
  const int count = K_STAGES * (rank + 1) / SPLIT_K - first_stage;
  const int total = count * my_tiles;
  const u32 base = shared_address(shared);
  const u32 ring = base;

#include "skinny_gemm_begin.cuh"

  // --- weights, as far as the ring holds them, before anything is known of x ------------------
  const u32 arrived = base + ARRIVED_AT;
  const bool leads = threadIdx.x == 0;
  if (leads) {
    prefetch_tensor_map(w_map), prefetch_tensor_map(x_map);
    for (int s = 0; s < ST; s++) init_barrier(arrived + s * 8);
    publish_barriers();
  }
  int ahead_tile = tile, ahead_k = 0, ahead_stage = 0, issued = 0;
  auto load_x = [&](int k, int stage) {
    tma_load(base + stage * STAGE_BYTES + WEIGHT_BYTES, x_map, (first_stage + k) * STAGE_K, 0,
             arrived + stage * 8);
#if W8 && !X8
    tma_load(base + stage * STAGE_BYTES + WEIGHT_BYTES + X_HALF, x_map, (first_stage + k) * STAGE_K + 64,
             0, arrived + stage * 8);
#endif
  };
  auto load_weights = [&]() {
    if (leads) {
      const u32 into = base + ahead_stage * STAGE_BYTES, barrier = arrived + ahead_stage * 8;
      const int k = (first_stage + ahead_k) * STAGE_K;
      expect_bytes(barrier, WEIGHT_BYTES + X_STAGE);
#if GATED
      tma_load(into, w_map, k, 0, 0, ahead_tile * TILES, barrier);
#else
      tma_load(into, w_map, k, ahead_tile * TILES * 16, barrier);
#endif
      if (issued >= ST) load_x(ahead_k, ahead_stage);
    }
    ahead_stage = ahead_stage == ST - 1 ? 0 : ahead_stage + 1;
    issued++;
    if (++ahead_k == count) {
      ahead_k = 0;
      ahead_tile += cta_count;
    }
  };
  for (int s = 0; s < ST; s++)
    if (issued < total) load_weights();
  __syncthreads();  // the barriers are there
#include "skinny_gemm_prefetch.cuh"

  wait_for_predecessor();
#if !SENDS
  release_successor();
#endif
#if SENDS || SUMS
#include "skinny_gemm_send.cuh"
#endif

  // --- x ---------------------------------------------------------------------------------------
  if (leads)
    for (int s = 0; s < ST && s < total; s++) load_x(s % count, s);
#include "skinny_gemm_input.cuh"
  load_residual();
  if (NORM == 1) {
    load_statistics();
    __syncthreads();
  }
#if X8
  for (int m = threadIdx.x; m < MT * 8; m += THREADS)
    scale[m].y = __uint_as_float(load_l2((const u32*)input_scale + min(m, M - 1)));
  __syncthreads();
#endif

  // --- the main loop ---------------------------------------------------------------------------
  // Row g of a tile, 2t and 2t + 1 of eight rows of x; then row g + 8.
  float sums[WARP_TILES][MT * 4];
  auto clear = [&]() {
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int j = 0; j < MT * 4; j++) sums[r][j] = 0.f;
  };
  auto take = [&](int r, int mt, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int from = (2 * t + j % 2) * 4 + g / 2;
      const float even = __shfl_sync(~0u, sums[r][mt * 4 + j / 2 * 2], from);
      const float odd = __shfl_sync(~0u, sums[r][mt * 4 + j / 2 * 2 + 1], from);
      v[j] = g % 2 ? odd : even;
    }
  };
  clear();
#if X8
  float part[2][MT * 4];  // what 128 columns add up to in the tensor cores
#endif

#include "skinny_gemm_finish.cuh"

  int k_done = 0;
  int stage = 0;
  u32 passed = 0;  // rounds of the ring, by parity
  for (int i = 0; i < total; i++) {
    const u32 weights = base + stage * STAGE_BYTES;
    await_bytes(arrived + stage * 8, passed);
    __syncwarp();
#if X8
#include "skinny_gemm_wgmma_e4m3.cuh"
#elif W8
#include "skinny_gemm_wgmma_fp8.cuh"
#else
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
        wgmma<MT * 8>(sums[r], weights + r * 64 * 128 + k * 32,
                      weights + WEIGHT_BYTES + k * 32);
    end_wgmma();
#endif
#if !X8
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++) await_wgmma<MT * 8>(sums[r]);
#endif
#if W8 && !X8
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int k = 0; k < 8; k++) keep(a[r][k]);
#endif
    // WAR: the four warps' wgmmas end together, so nobody reads this stage any more.
    if (issued < total) load_weights();
    if (++stage == ST) stage = 0, passed ^= 1;
    k_done++;
    if (k_done == count && PERSISTENT) {
#include "skinny_gemm_finish_tile.cuh"
      clear();
      k_done = 0;
      tile += cta_count;
    }
  }
  if (PERSISTENT) return;

  if (SENDS) release_successor();  // who adds up would wait for words until here
#include "skinny_gemm_reduce.cuh"
}
