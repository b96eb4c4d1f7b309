// What the skinny GEMM kernels share: out = epilogue(norm(x) W^T) for few rows of x, with the weight
// streamed once from memory.
//
//   x         [M, K] bf16, M <= 8 * MT             W  [N, K] bf16, row major
//   NORM      0 none, 1 RMSNorm, 2 LayerNorm of x over K, from the partial statistics of its producer;
//             of RMSNorm x is multiplied by the weight already, and 1 / rms scales the result
//   EPILOGUE  0 store, 1 add to the residual stream and emit its partial statistics,
//             2 SiLU(gate) * up, 3 GELU (tanh), 4 GELU (erf), 5 square of ReLU
//   ROUNDED   1: of EPILOGUE 2, both halves are rounded as a product that is stored, and SiLU has the bits
//             of norm/swiglu.py
//   STATS     of EPILOGUE 1: 1 for RMSNorm, where the stream times the next norm's weight is stored too,
//             2 for LayerNorm
//   SPLIT_K   CTAs that share K. Partial sums are added in a fixed order: with WORKSPACE 0 by a cluster,
//             in which each CTA owns OWN fragments (16 rows of W by 8 of x) and is sent its peers' sums
//             of them; with WORKSPACE 1 through global memory, by whichever CTA comes last
//   SENDS     1: of EPILOGUE 0, the output is a rank's partial sums, and goes to all RANKS ranks' memory,
//             its own too, for peer_sum.cu with SENT; `out` is not written. CAPACITY, LAUNCHES as there
//   SUMS      1: of EPILOGUE 1, the product is a rank's partial sums: each CTA sends those of its tile to all
//             RANKS ranks, waits for theirs of the same tile, and adds up in the order of ranks, with the bits
//             of peer_sum.cu. All CTAs of the grid run at once, on each rank. Words are those of peer_sum.cu,
//             or with BARE those of peer_rows.cu, which are half as many bytes
//   OWN       fragments that a CTA of a cluster finishes, if it finishes any
//   W8        1: W is e4m3, a byte each, and weight_scale fp32 [N, K / SCALE_COLUMNS]; the product is that
//             of each row and of each SCALE_COLUMNS columns, in fp32, times its scale. K of them: a scale
//             for each row (of skinny_gemm_wgmma.cu always), and K may be 64 more than a multiple of 128
//   X8        1: x is e4m3 too, with a scale fp32 [M] for each row, input_scale; of W8, NORM 0 and a scale
//             for each row of W. Sums are multiplied by x's scale, and then by W's
//   MIN_SHARED  bytes of shared memory to take at least: more than half keeps two CTAs of one GEMM off
//             one SM while other SMs have none
//
// A kernel defines, before it includes this file: WARPS, WARP_TILES (16-row tiles of W that a warp
// accumulates), TILES (of a CTA), INTERLEAVED (1: a warp's tiles are WARPS apart, and those of some lie
// behind the CTA's), WK (warps that share K), RING_BYTES, MAINLOOP_BYTES (shared memory of its main
// loop), LATE_RESIDUAL (1: the residual is read only after the workspace reduction) and `shared`. Where a
// warp has sums of some rows of x alone (skinny_gemm_many.cu), also WARP_GROUPS, GROUP, HAS_SUMS (of this
// warp), GATHERED (1: it reduces the workspace itself), FIRST_PEER (the cluster's CTA that has the same tile
// and the first part of K), and SENT_AT 0 where partial sums take the ring's place.
//
// Its body includes, in this order, skinny_gemm_{begin,prefetch,send,input,finish,finish_tile,reduce}.cuh,
// and some of these skinny_gemm_{scale,sum}.cuh, which use its variables by name. They are text, not
// functions: as functions, or with other captures of the lambdas, the same code gets other registers and
// another order of instructions, which cost 1.2 % of a step of Qwen3-0.6B at 32 rows (H200).
//
//   g, t      lane / 4, lane % 4
//   wr, wk    the warp's number among those next to each other in N, and among those that share K
//   rank      the CTA's number among the SPLIT_K
//   tile      the CTA's rows of W, in 16 * TILES
//   base      of shared memory; ring: of what the warp may overwrite after the main loop
//   take(r, mt, v)  accumulators of the warp's tile r and rows 8 * mt .. of x: row g of x, columns 2t,
//             2t + 1 of the tile's upper, then of its lower half

#ifndef ROUNDED
#define ROUNDED 0
#endif
#ifndef SENDS
#define SENDS 0
#endif
#ifndef SUMS
#define SUMS 0
#endif
#ifndef BARE
#define BARE 0
#endif
#if SENDS || SUMS
#define SENDING , int place, const u64 *received, u32 *launches, PEERS
#else
#define SENDING
#endif

#ifndef X8
#define X8 0
#endif
#if W8
#if X8
#define SCALING , const float* weight_scale, const float* input_scale
#else
#define SCALING , const float* weight_scale
#endif
#define STAGE_K 128                     // columns of K in a stage
#define SCALES_ROWS (SCALE_COLUMNS == K)  // what the epilogue scales
#else
#define SCALING
#define STAGE_K 64
#define SCALES_ROWS 0
#endif

#ifndef WARP_GROUPS  // groups of eight rows of x that a warp has sums of, and which ones these are
#define WARP_GROUPS MT
#define GROUP(i) (i)
#define HAS_SUMS true
#define GATHERED 0
#endif
#ifndef MULTICAST
#define MULTICAST 1
#define FIRST_PEER 0
#endif

#define THREADS (32 * WARPS)
#define K_STAGES ((K + STAGE_K - 1) / STAGE_K)
#define LAST_K (K % STAGE_K)            // columns of a last stage that has less; the others are zeros
#define WEIGHT_BYTES (2048 * RT)        // of RT tiles in a stage
#define SLICE ((K_STAGES + SPLIT_K - 1) / SPLIT_K * STAGE_K)
#define FRAGMENTS (MT * TILES)
#define CLUSTER (WORKSPACE ? 1 : SPLIT_K)
#define OWNERS (FRAGMENTS / OWN)        // CTAs of the cluster that finish some fragments
#define PER_WARP (WK * CLUSTER == 1 ? WARP_GROUPS * WARP_TILES : (OWN + WARPS - 1) / WARPS)
#define STAT_ROWS ((MT * 8 + WARPS - 1) / WARPS)
#define STAT_TILES (OWN < TILES ? OWN : TILES)
#define GATED (EPILOGUE == 2)
#define BIAS_LINES ((16 * TILES * 2 / (GATED ? 2 : 1) + 127) / 128)  // of 128 bytes
#define SCALE_LINES ((16 * TILES * 4 / (GATED ? 2 : 1) + 127) / 128)
#define SCALES (EPILOGUE == 1 && STATS == 1)
#define OWN_ROWS (WK * CLUSTER == 1 ? WARP_TILES : PER_WARP)  // 16 each, whose scales a warp reads early
#define SCALES_EARLY (SCALES_ROWS && !PERSISTENT && OWN_ROWS <= 4)
#if SCALES_EARLY
#define BY_ROW(i) , by_row[i]
#else
#define BY_ROW(i)
#endif

#define SCALE_AT MAINLOOP_BYTES         // mean and 1 / deviation of each row of x; X8: its scale
#define STATS_AT (SCALE_AT + MT * 8 * 8)
#define BEHIND_STATS ((STATS_AT + (EPILOGUE == 1 ? OWN * 64 : 0) + 15) / 16 * 16)
#ifndef SENT_AT
#define SENT_AT BEHIND_STATS
#endif
#define SENT_BYTES (CLUSTER > 1 ? OWN * CLUSTER * WK * 512 : 0)  // partial sums of own fragments
#define ALL_SENT_AT (BEHIND_STATS + (SENT_AT == 0 ? 0 : SENT_BYTES))  // their barrier
#define SHARED_BYTES (ALL_SENT_AT + (CLUSTER > 1 ? 8 : 0))

static_assert(K % 64 == 0 && K_STAGES >= SPLIT_K * WK, "shape");
static_assert(!LAST_K || SCALES_ROWS, "scales of whole rows");
static_assert(FRAGMENTS % OWN == 0 && OWNERS <= CLUSTER, "every fragment has an owner");
static_assert(TILES % STAT_TILES == 0 && OWN % STAT_TILES == 0, "statistics");
static_assert(!PERSISTENT || (WK * SPLIT_K == 1 && EPILOGUE != 1), "a persistent CTA keeps its ring busy");
static_assert(!ROUNDED || GATED, "what is rounded on its way");
static_assert(!SENDS || (EPILOGUE == 0 && N % 16 == 0), "what is sent");
static_assert(!SUMS || (EPILOGUE == 1 && NORM == 0 && N % 16 == 0), "what is summed over ranks");
static_assert(!X8 || (SCALES_ROWS && NORM == 0), "x is multiplied as it is, and sums are scaled");
static_assert(!WORKSPACE || WK == 1, "partial sums in the workspace are of whole CTAs");

extern "C" __device__ const int shared_bytes = SHARED_BYTES > MIN_SHARED ? SHARED_BYTES : MIN_SHARED;

__device__ __forceinline__ float activate(float v) {
#if EPILOGUE == 3
  float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + tanhf(inner));
#elif EPILOGUE == 4
  return 0.5f * v * (1.f + erff(v * 0.7071067811865476f));
#elif EPILOGUE == 5
  return v < 0.f ? 0.f : v * v;
#else
  return v;
#endif
}

#if SENDS || SUMS
#include "peer_words.cuh"
#if BARE
#include "bare_words.cuh"
#endif

static_assert(N * MT * 8 <= CAPACITY, "room for all words");
#endif

#if ROUNDED
__device__ __forceinline__ float as_stored(float v) { return low(pack(v, 0.f)); }
__device__ __forceinline__ float silu_as_triton(float v) {
  return quotient(v, __fadd_rn(1.f, power_of_two(__fmul_rn(-v, 1.4426950408889634f))));
}
#endif
