// A layer of experts for few rows in one kernel: out = experts(norm(x)) + residual. Weights are streamed
// once from memory, straight into registers.
//
//   H, INNER   hidden size, and an expert's; EXPERTS, TOP_K of them a row, SHARED that each row has
//   ROWS       of the step; a row's bits do not depend on the others
//   CTAS       of the grid, at most as many as run at once: they wait for each other
//   PHASES     1: norm and router's logits, 2: choice, first linear layers and activation, 4: second linear
//              layers; 7 is all in one launch, and three launches, in order, do the same
//   CENTER     1: LayerNorm, 0: RMSNorm;  GATE 1: a sigmoid weighs the shared experts
//   SIGMOID, PRE_SOFTMAX, NORMALIZE, GROUPS, KEPT, SUMMED   see RouterSettings
//   GATED, FUNCTION, HAS_LIMIT   see ExpertActivation; FUNCTION is in moe_activation.cuh
//   TILE       columns of the output that a partial statistic covers
//   THREADS, LOADS   of a CTA, and of a thread in a step: two steps' are on their way
//   CLAIMED    sixteenths of the first linear layers' rows that go to the CTAs that come first
//   W8         1: the experts' weights are e4m3, with fp32 scales for UP_COLUMNS and DOWN_COLUMNS of a row, of
//              the shared experts' for SHARED_UP_COLUMNS and SHARED_DOWN_COLUMNS
//   W4         1: they are MXFP4, packed, with a byte for the scale of 32 of a row; else bfloat16
//   SUMS       1: `out` is summed over RANKS ranks, each of which has a share of every expert; see peer_sum.cu
//   MIN_SHARED bytes of shared memory to take at least: more than half keeps two CTAs off one SM
//
// With SUMS each CTA sends what it has of a tile to the other ranks, and waits for theirs, at the end.
//
// There is no barrier of the grid. Each logit, and then each activation, is published in a word together
// with the number of the launch, and who needs it reads the word until the number is right (as NCCL's
// LL protocol). A CTA counts its launches itself, so graphs may replay in any order on one stream.
//
// x, residual and out may be one tensor, and the statistics another: a CTA writes them when it has all
// activations, so every CTA whose logits or activations count has read its input.

#include "moe_row.cuh"
#if SUMS
#include "peer_words.cuh"
#endif
#if W8
#include "e4m3.cuh"
#include "moe_row_e4m3.cuh"
#elif W4
#include "mxfp4.cuh"
#include "moe_row_mxfp4.cuh"
#else
#include "moe_row_bf16.cuh"
#endif
#include "moe_row_products.cuh"
#include "moe_row_router.cuh"
#include "moe_row_choice.cuh"
#include "moe_activation.cuh"
#include "moe_row_up.cuh"
#include "moe_row_down.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_row(const u16* x, const float2* stats_in, int stats_tiles, float eps, const u16* norm_weight,
            const u16* norm_bias, const u16* router, const u16* router_bias, const float* expert_bias,
            const u16* gate, const i64* live, int first_live, float scaling, const Weight* w1, const u16* b1,
            const Weight* shared_w1, const Weight* w2, const u16* b2, const Weight* shared_w2, float limit,
            float offset, u32* launches, u32* logits, u32* activated, u32* claims, u32* ids, float* weights,
            u32* found, const u16* residual, u16* out, float2* stats_out, const u16* next_weight,
            u16* scaled SCALING SUMMING) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RouterWeights own;
  if (ROUTES || GOES_UP) own.load(norm_weight, norm_bias, router, gate);
  if (expert_bias && warp < ROWS)
    for (int i = lane; i < EXPERTS; i += 32) touch(expert_bias + i);
  if (next_weight && threadIdx.x == 0 && blockIdx.x < TILES) touch(next_weight + blockIdx.x * TILE);
  wait_for_predecessor();
  release_successor();

  const u32 launch = load_l2(launches + blockIdx.x) + 1;
#if SUMS
  const u32 number = next_launch(rank_launches + blockIdx.x);
#endif
  // The launch before is over, and the next has not begun.
  if (GOES_UP && CLAIMED && blockIdx.x == 0 && threadIdx.x == 0) publish(claims + (launch + 1) % 2, 0u);
  i64 own_live = first_live;
  if (live && lane < ROWS) own_live = load_l2(live + lane);
  if (ROUTES || GOES_UP)
    norm_and_route(own, x, stats_in, stats_tiles, eps, norm_bias != nullptr, router_bias, (u64*)logits,
                   launch);
  if (PHASES == 1) return;

  const u32 live_mask = __ballot_sync(~0u, lane < ROWS && own_live >= first_live);
  const int rows = __popc(live_mask);
  await_logits((const u64*)logits, launch);
  __syncthreads();
  const int row = warp / ROW_WARPS, place = __popc(live_mask & ((1u << row) - 1));
  const bool is_live = row < ROWS && (live_mask >> row & 1), is_first = warp % ROW_WARPS == 0;
  if (is_live) {
    choose(row, place, warp % ROW_WARPS, expert_bias, w1, w2);
    if (SHARED && is_first) add_shared_experts(place, shared_w1, shared_w2);
    if (is_first && lane == 0) live_rows()[place] = row;
  }
  __syncthreads();

  Loaded a, b;
  UpPlace at_a, at_b;
  Up up{b1, limit, offset, activated, claims + launch % 2, launch};
#if W8 || W4
  up.scales.of_routed = w1_scale, up.scales.of_shared = shared_w1_scale;
#endif
  if (GOES_UP) up.begin(rows, at_a, a, at_b, b);
  if (row < ROWS && is_first) {
    const float weight = is_live ? weigh(row, place, scaling) : 0.f;
    if (is_live && lane < SLOTS) slots()[place * SLOTS + lane].weight = weight;
    if (blockIdx.x == 0 && lane < SLOTS && GOES_UP) {
      ids[row * SLOTS + lane] = is_live ? (u32)slots()[place * SLOTS + lane].expert : ~0u;
      weights[row * SLOTS + lane] = weight;
    }
  }
  __syncthreads();

  if (GOES_UP) {
    if (blockIdx.x == 0 && warp == WARPS - 1) {
      u32 experts = 0;  // that no slot in front has
      for (int i = lane; i < rows * SLOTS; i += 32) {
        bool is_new = true;
        for (int j = 0; j < i; j++) is_new &= slots()[j].expert != slots()[i].expert;
        experts += is_new;
      }
      experts = __reduce_add_sync(~0u, experts);
      if (lane == 0) *found = experts;
    }
    up.finish(at_a, a, at_b, b);
    publish_dead_rows(activated, live_mask, launch);
  }
  if (GOES_DOWN) {
#if SUMS
    Down down{RankSum{own_rank, number, received, ALL_PEERS}, b2, residual, next_weight, out, scaled, stats_out, rows};
#else
    Down down{b2, residual, next_weight, out, scaled, stats_out, rows};
#endif
#if W8 || W4
    down.scales = DownScales{w2_scale, shared_w2_scale};
#endif
    down.run(activated, launch);
    if (threadIdx.x == 0) launches[blockIdx.x] = launch;
#if SUMS
    count_launch(rank_launches, number);
#endif
  }
}
