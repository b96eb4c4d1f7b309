// What both skinny GEMM kernels share: out = epilogue(norm(x) W^T) for few rows of x, with the weight
// streamed once from memory.
//
//   x         [M, K] bf16, M <= 8 * MT             W  [N, K] bf16, row major
//   NORM      0 none, 1 RMSNorm, 2 LayerNorm of x over K, from the partial statistics of its producer;
//             of RMSNorm x is multiplied by the weight already, and 1 / rms scales the result
//   EPILOGUE  0 store, 1 add to the residual stream and emit its partial statistics,
//             2 SiLU(gate) * up, 3 GELU (tanh), 4 GELU (erf)
//   STATS     of EPILOGUE 1: 1 for RMSNorm, where the stream times the next norm's weight is stored too,
//             2 for LayerNorm
//   SPLIT_K   CTAs that share K. Partial sums are added in a fixed order: with WORKSPACE 0 by a cluster,
//             in which each CTA owns OWN fragments (16 rows of W by 8 of x) and is sent its peers' sums
//             of them; with WORKSPACE 1 through global memory, by whichever CTA comes last
//   OWN       fragments that a CTA of a cluster finishes, if it finishes any
//   MIN_SHARED  bytes of shared memory to take at least: more than half keeps two CTAs of one GEMM off
//             one SM while other SMs have none
//
// A kernel defines, before it includes this file: WARPS, WARP_TILES (16-row tiles of W that a warp
// accumulates), TILES (of a CTA), WK (warps that share K), RING_BYTES, MAINLOOP_BYTES (shared memory of
// its main loop), LATE_RESIDUAL (1: the residual is read only after the workspace reduction), `shared`,
// warp_tile(warp, r), which of the CTA's tiles a warp's tile r is, and is_in_cta(warp, r), whether it is
// one. Its accumulators come as take(r, mt, v): of the warp's tile r and rows 8 * mt .. of x, row g of x,
// columns 2t, 2t + 1 of the tile's upper, then of its lower half (g = lane / 4, t = lane % 4).

#define THREADS (32 * WARPS)
#define K_STAGES (K / 64)               // 64 columns of K each
#define WEIGHT_BYTES (2048 * RT)        // of RT tiles in a stage
#define SLICE ((K_STAGES + SPLIT_K - 1) / SPLIT_K * 64)
#define FRAGMENTS (MT * TILES)
#define CLUSTER (WORKSPACE ? 1 : SPLIT_K)
#define OWNERS (FRAGMENTS / OWN)        // CTAs of the cluster that finish some fragments
#define PER_WARP (WK * CLUSTER == 1 ? MT * WARP_TILES : (OWN + WARPS - 1) / WARPS)
#define STAT_ROWS ((MT * 8 + WARPS - 1) / WARPS)
#define STAT_TILES (OWN < TILES ? OWN : TILES)
#define GATED (EPILOGUE == 2)
#define SCALES (EPILOGUE == 1 && STATS == 1)

#define SCALE_AT MAINLOOP_BYTES         // mean and 1 / deviation of each row of x
#define STATS_AT (SCALE_AT + MT * 8 * 8)
#define SENT_AT ((STATS_AT + (EPILOGUE == 1 ? OWN * 64 : 0) + 15) / 16 * 16)
#define SENT_BYTES (CLUSTER > 1 ? OWN * CLUSTER * WK * 512 : 0)  // partial sums of own fragments
#define ALL_SENT_AT (SENT_AT + SENT_BYTES)  // their barrier
#define SHARED_BYTES (ALL_SENT_AT + (CLUSTER > 1 ? 8 : 0))

static_assert(K % 64 == 0 && K_STAGES >= SPLIT_K * WK, "shape");
static_assert(FRAGMENTS % OWN == 0 && OWNERS <= CLUSTER, "every fragment has an owner");
static_assert(TILES % STAT_TILES == 0 && OWN % STAT_TILES == 0, "statistics");
static_assert(!PERSISTENT || (WK * SPLIT_K == 1 && EPILOGUE != 1), "a persistent CTA keeps its ring busy");
static_assert(!WORKSPACE || WK == 1, "partial sums in the workspace are of whole CTAs");

extern "C" __device__ const int shared_bytes = SHARED_BYTES > MIN_SHARED ? SHARED_BYTES : MIN_SHARED;

__device__ __forceinline__ float activate(float v) {
#if EPILOGUE == 3
  float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + tanhf(inner));
#elif EPILOGUE == 4
  return 0.5f * v * (1.f + erff(v * 0.7071067811865476f));
#else
  return v;
#endif
}

// A thread's part of the residual stream: pairs of columns of the upper and the lower half of a tile.
using Residual = u32[PER_WARP][2];

// A thread's view of the epilogue: the kernel's arguments, and what this CTA computes.
struct Epilogue {
  const u16 *bias, *residual, *next_weight;
  u16 *out, *scaled;
  float2* stats_out;
  int M, out_row;
  int warp, lane, g, t, rank, tile;  // rank: among the CTAs that share K; tile: the CTA's rows of W
  u32 base;       // of shared memory

  // Peers may send once all CTAs of the cluster have come here.
  __device__ __forceinline__ void join_cluster() const {
    if (CLUSTER > 1) {
      if (threadIdx.x == 0) {
        init_barrier(base + ALL_SENT_AT);
        publish_barriers();
        if (rank < OWNERS) expect_bytes(base + ALL_SENT_AT, SENT_BYTES);
      }
      __syncwarp();
      arrive_in_cluster();
    }
  }

  // What is read once a GEMM would else come from memory while all wait for it.
  __device__ __forceinline__ void prefetch(const u16* norm_weight, const u16* norm_bias,
                                           int slice_stage) const {
    const int lines = (16 * TILES * 2 / (GATED ? 2 : 1) + 127) / 128;
    if (bias != nullptr && threadIdx.x < (GATED ? 2 : 1) * lines) {
      const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % lines * 64;
      touch(bias + (min(n, (GATED ? N / 2 : N) - 2) & ~1) + threadIdx.x / lines * (N / 2));
    }
    if (SCALES && threadIdx.x < (16 * TILES * 2 + 127) / 128)
      touch(next_weight + min(tile * 16 * TILES + threadIdx.x * 64, N - 2u));
    if (NORM == 2) {
      for (int i = threadIdx.x; i < SLICE / 64; i += THREADS) {
        touch(norm_weight + slice_stage * 64 + i * 64);
        touch(norm_bias + slice_stage * 64 + i * 64);
      }
    }
  }

  __device__ __forceinline__ void load_residual(Residual& kept) const {
#pragma unroll
    for (int i = 0; i < PER_WARP && EPILOGUE == 1; i++) {
      int f = rank * OWN + i * WARPS + warp, mt = f / TILES, rt = f % TILES;
      if (WK * CLUSTER == 1) {
        mt = i / WARP_TILES, rt = warp_tile(warp, i % WARP_TILES);
        if (!is_in_cta(warp, i % WARP_TILES)) continue;
      } else if (i * WARPS + warp >= OWN || rank >= OWNERS) {
        break;
      }
      const u16* from = residual + (size_t)min(mt * 8 + g, M - 1) * N + (tile * TILES + rt) * 16 + 2 * t;
      kept[i][0] = load_l2((const u32*)from);
      kept[i][1] = load_l2((const u32*)(from + 8));
    }
  }

  // Mean and 1 / deviation of each row of x, from its producer's partial statistics.
  __device__ __forceinline__ void load_statistics(const float2* stats_in, int stats_tiles,
                                                  float eps) const {
    float2* scale = (float2*)(shared + SCALE_AT);
    // All rows of this warp at once: each is a trip to L2.
    float mean[STAT_ROWS], square[STAT_ROWS];
#pragma unroll
    for (int j = 0; j < STAT_ROWS; j++) mean[j] = square[j] = 0.f;
#pragma unroll 2
    for (int i = lane; i < stats_tiles; i += 32) {
#pragma unroll
      for (int j = 0; j < STAT_ROWS; j++) {
        int row = min(warp + j * WARPS, M - 1);
        float2 v = load_l2(stats_in + (size_t)row * stats_tiles + i);
        mean[j] += v.x;
        // Of RMSNorm the sum of squares; of LayerNorm that of deviations, and the tiles' means.
        square[j] += NORM == 2 ? v.y + v.x * v.x * (float)(K / stats_tiles) : v.y;
      }
    }
#pragma unroll
    for (int j = 0; j < STAT_ROWS; j++) {
#pragma unroll
      for (int d = 16; d; d >>= 1) {
        mean[j] += __shfl_xor_sync(~0u, mean[j], d);
        square[j] += __shfl_xor_sync(~0u, square[j], d);
      }
      float m = NORM == 2 ? mean[j] / stats_tiles : 0.f;
      float variance = square[j] / K - m * m;
      int row = warp + j * WARPS;
      if (lane == 0 && row < MT * 8) scale[row] = make_float2(m, rsqrtf(variance + eps));
    }
  }

  // One fragment: row m = 8 * mt + g of the output, columns 2t, 2t + 1 of the upper and of the lower
  // half of `row_tile`. `own` is where its statistics go, `before` its residual.
  __device__ __forceinline__ void finish(int row_tile, int mt, int own, float (&v)[4],
                                         const u32 (&before)[2]) const {
    const float2* scale = (const float2*)(shared + SCALE_AT);
    const int m = mt * 8 + g, n = row_tile * (GATED ? 8 : 16) + 2 * t;
    u16* into = out + (size_t)m * out_row + n;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = min(n + j % 2 + j / 2 * (GATED ? N / 2 : 8), N - 1);
      if (NORM == 1) v[j] *= scale[m].y;
      if (bias != nullptr) v[j] += widen(bias[column]);
    }
#if EPILOGUE == 1
    float2* stats = (float2*)(shared + STATS_AT) + own * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 sum = pack(v[half * 2] + low(before[half]), v[half * 2 + 1] + high(before[half]));
      v[half * 2] = low(sum), v[half * 2 + 1] = high(sum);
      if (m < M) *(u32*)(into + half * 8) = sum;
      if (SCALES && m < M)
        *(u32*)(scaled + (into - out) + half * 8) = mul2(sum, *(const u32*)(next_weight + n + half * 8));
    }
    float mean = 0.f, square = 0.f;
    if (STATS == 2) {
      mean = v[0] + v[1] + v[2] + v[3];
      mean += __shfl_xor_sync(~0u, mean, 1);
      mean += __shfl_xor_sync(~0u, mean, 2);
      mean *= 1.f / 16;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) square += (v[j] - mean) * (v[j] - mean);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if (t == 0) stats[g] = make_float2(mean, square);
#elif GATED
    float gated[2];
#pragma unroll
    for (int j = 0; j < 2; j++) gated[j] = __fdividef(v[j], 1.f + __expf(-v[j])) * v[j + 2];
    if (m < M) *(u32*)into = pack(gated[0], gated[1]);
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 pair = pack(activate(v[half * 2]), activate(v[half * 2 + 1]));
      if (N % 16 == 0) {
        if (m < M && n + half * 8 < N) *(u32*)(into + half * 8) = pair;
      } else {
        if (m < M && n + half * 8 < N) into[half * 8] = (u16)pair;
        if (m < M && n + half * 8 + 1 < N) into[half * 8 + 1] = (u16)(pair >> 16);
      }
    }
#endif
  }

  // A persistent CTA's tile: nothing is split, no residual.
  template <typename Take>
  __device__ __forceinline__ void finish_tile(const Take& take, int row_block) const {
    const u32 none[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int mt = 0; mt < MT && is_in_cta(warp, r); mt++) {
        float v[4];
        take(r, mt, v);
        finish(row_block * TILES + warp_tile(warp, r), mt, 0, v, none);
      }
  }

  // Adds up what the CTAs and warps have that share K, and finishes the output.
  template <typename Take>
  __device__ __forceinline__ void reduce_and_finish(const Take& take, Residual& kept, u32 ring, int wk,
                                                    float4* workspace, u32* arrivals) const {
    // Where an owner is sent a partial sum: its fragment's number, the CTA and the warp it comes from.
    auto part_at = [&](int own, int c, int k) {
      return ((own * CLUSTER + c) * WK + k) * 512 + lane * 16;
    };
    if (WK * CLUSTER == 1) {
#if WORKSPACE && SPLIT_K > 1
      float4* block = workspace + (size_t)tile * SPLIT_K * FRAGMENTS * 32 + lane;
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
        for (int mt = 0; mt < MT && is_in_cta(warp, r); mt++) {
          float v[4];
          take(r, mt, v);
          block[(rank * FRAGMENTS + warp_tile(warp, r) * MT + mt) * 32] =
              make_float4(v[0], v[1], v[2], v[3]);
        }
      __shared__ u32 before;
      __syncthreads();
      if (threadIdx.x == 0) {
        before = add_one_in_order(arrivals + tile);
        if (before == SPLIT_K - 1) arrivals[tile] = 0;  // for the next launch
      }
      __syncthreads();
      if (before != SPLIT_K - 1) return;
      if (LATE_RESIDUAL) load_residual(kept);
#endif
#pragma unroll
      for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int r = 0; r < WARP_TILES; r++) {
          if (!is_in_cta(warp, r)) continue;
          float v[4];
          take(r, mt, v);
#if WORKSPACE && SPLIT_K > 1
          float4 part[SPLIT_K], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int c = 0; c < SPLIT_K; c++)
            part[c] = c == rank ? make_float4(v[0], v[1], v[2], v[3])
                                : load_l2(block + (c * FRAGMENTS + warp_tile(warp, r) * MT + mt) * 32);
#pragma unroll
          for (int c = 0; c < SPLIT_K; c++)
            sum.x += part[c].x, sum.y += part[c].y, sum.z += part[c].z, sum.w += part[c].w;
          v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
#endif
          finish(tile * TILES + warp_tile(warp, r), mt, mt * TILES + warp_tile(warp, r), v,
                 kept[EPILOGUE == 1 ? mt * WARP_TILES + r : 0]);
        }
    } else {
      // Fragment f of this warp's slice of K: to the CTA that owns it, or into this warp's own ring.
      if (CLUSTER > 1)
        await_cluster();
      else
        await_copies<0>();
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
        for (int mt = 0; mt < MT && is_in_cta(warp, r); mt++) {
          float v[4];
          take(r, mt, v);
          const float4 part = make_float4(v[0], v[1], v[2], v[3]);
          if (CLUSTER > 1) {
            const int f = mt * TILES + warp_tile(warp, r), owner = f / OWN;
            send(peer_address(base + SENT_AT + part_at(f % OWN, rank, wk), owner), part,
                 peer_address(base + ALL_SENT_AT, owner));
          } else {
            store_shared(ring + (r * MT + mt) * 512 + lane * 16, bits(part));
          }
        }
      if (CLUSTER == 1) __syncthreads();
      if (rank >= OWNERS) return;
      if (CLUSTER > 1) await_sent(base + ALL_SENT_AT, 0);
#pragma unroll
      for (int i = 0; i < PER_WARP; i++) {
        const int own = i * WARPS + warp;
        if (own >= OWN) break;
        const int f = rank * OWN + own, mt = f / TILES, rt = f % TILES;
        float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int c = 0; c < CLUSTER; c++)
#pragma unroll
          for (int k = 0; k < WK; k++) {
            const u32 at = CLUSTER > 1 ? SENT_AT + part_at(own, c, k)
                                       : (k * (WARPS / WK) + rt / RT) * RING_BYTES +
                                             (rt % RT * MT + mt) * 512 + lane * 16;
            const float4 part = floats(load_shared(base + at));
            v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
          }
        finish(tile * TILES + rt, mt, own, v, kept[EPILOGUE == 1 ? i : 0]);
      }
    }

#if EPILOGUE == 1
    __syncthreads();
    const float2* stats = (const float2*)(shared + STATS_AT);
    for (int i = threadIdx.x; i < OWN / STAT_TILES * 8; i += THREADS) {
      int f = (WORKSPACE ? 0 : rank) * OWN + i / 8 * STAT_TILES, m = f / TILES * 8 + i % 8;
      float mean = 0.f, square = 0.f;
      for (int r = 0; r < STAT_TILES; r++) {
        float2 v = stats[(i / 8 * STAT_TILES + r) * 8 + i % 8];
        mean += v.x;
        square += v.y + 16.f * v.x * v.x;
      }
      mean /= STAT_TILES;
      square -= 16.f * STAT_TILES * mean * mean;
      int index = (tile * TILES + f % TILES) / STAT_TILES;
      if (m < M) stats_out[(size_t)m * (N / (16 * STAT_TILES)) + index] = make_float2(mean, square);
    }
#endif
  }
};
