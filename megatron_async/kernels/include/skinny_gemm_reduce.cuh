  // The end of a skinny GEMM's body (skinny_gemm.cuh): adds up what the CTAs and warps have that share K,
  // and finishes the output. Uses all that the other parts declare, and warp, lane, rank, wk, tile, base,
  // ring, take, workspace and arrivals. It returns from the kernel.

#if SUMS
  u32 sent[PER_WARP][2];  // this rank's partial sums of what this warp finishes
#endif
  // Where an owner is sent a partial sum: its fragment's number, the CTA and the warp it comes from.
  auto part_at = [&](int own, int c, int k) {
    return ((own * CLUSTER + c) * WK + k) * 512 + lane * 16;
  };
  if (WK * CLUSTER == 1) {
#if WORKSPACE && SPLIT_K > 1 && !GATHERED
    float4* block = workspace + (size_t)tile * SPLIT_K * FRAGMENTS * 32 + lane;
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int i = 0; i < WARP_GROUPS && is_in_cta(r); i++) {
        float v[4];
        take(r, i, v);
        block[(rank * FRAGMENTS + warp_tile(r) * MT + GROUP(i)) * 32] =
            make_float4(v[0], v[1], v[2], v[3]);
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
    if (LATE_RESIDUAL) load_residual();
#endif
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; i++)
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++) {
        if (!is_in_cta(r)) continue;
        float v[4];
        take(r, i, v);
#if WORKSPACE && SPLIT_K > 1 && !GATHERED
        float4 part[SPLIT_K], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int c = 0; c < SPLIT_K; c++)
          part[c] = c == rank ? make_float4(v[0], v[1], v[2], v[3])
                              : load_l2(block + (c * FRAGMENTS + warp_tile(r) * MT + GROUP(i)) * 32);
#pragma unroll
        for (int c = 0; c < SPLIT_K; c++)
          sum.x += part[c].x, sum.y += part[c].y, sum.z += part[c].z, sum.w += part[c].w;
        v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
#endif
#if SUMS
        send_sums(tile * TILES + warp_tile(r), GROUP(i), v, sent[i * WARP_TILES + r] BY_ROW(r));
#else
        finish(tile * TILES + warp_tile(r), GROUP(i), GROUP(i) * TILES + warp_tile(r), v,
               kept[EPILOGUE == 1 ? i * WARP_TILES + r : 0] BY_ROW(r));
#endif
      }
  } else {
    // Fragment f of this warp's slice of K: to the CTA that owns it, or into this warp's own ring.
    if (CLUSTER > 1 && SENT_AT > 0)
      await_cluster();
    else if (CLUSTER == 1)
      await_copies<0>();
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int i = 0; i < WARP_GROUPS && is_in_cta(r); i++) {
        float v[4];
        take(r, i, v);
        const float4 part = make_float4(v[0], v[1], v[2], v[3]);
        if (CLUSTER > 1) {
          const int f = GROUP(i) * TILES + warp_tile(r), owner = f / OWN;
          send(peer_address(base + SENT_AT + part_at(f % OWN, rank, wk), FIRST_PEER + owner), part,
               peer_address(base + ALL_SENT_AT, FIRST_PEER + owner));
        } else {
          store_shared(ring + (r * MT + i) * 512 + lane * 16, bits(part));
        }
      }
    if (CLUSTER == 1) __syncthreads();
#if SUMS
    if (rank >= OWNERS) {
      __syncthreads();
      count_launch(launches, number);
    }
#endif
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
#if SUMS
      send_sums(tile * TILES + rt, mt, v, sent[i] BY_ROW(i));
#else
      finish(tile * TILES + rt, mt, own, v, kept[EPILOGUE == 1 ? i : 0] BY_ROW(i));
#endif
    }
  }
#if SUMS
#include "skinny_gemm_sum.cuh"
#endif

#if EPILOGUE == 1
  __syncthreads();
#if SUMS
  count_launch(launches, number);
#endif
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
