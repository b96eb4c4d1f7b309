  // Part of a skinny GEMM's body (skinny_gemm.cuh): what its producers wrote, besides x. Uses warp, lane,
  // g, t, rank, tile, scale, warp_tile, is_in_cta and the kernel's arguments; declares kept,
  // load_residual and load_statistics.

  u32 kept[PER_WARP][2];  // of the residual: pairs of columns of a tile's upper and lower half
  auto load_residual = [&]() {
#pragma unroll
    for (int i = 0; i < PER_WARP && EPILOGUE == 1; i++) {
      int f = rank * OWN + i * WARPS + warp, mt = f / TILES, rt = f % TILES;
      if (WK * CLUSTER == 1) {
        mt = GROUP(i / WARP_TILES), rt = warp_tile(i % WARP_TILES);
        if (!is_in_cta(i % WARP_TILES)) continue;
      } else if (i * WARPS + warp >= OWN || rank >= OWNERS) {
        break;
      }
      const u16* from = residual + (size_t)min(mt * 8 + g, M - 1) * N + (tile * TILES + rt) * 16 + 2 * t;
      kept[i][0] = load_l2((const u32*)from);
      kept[i][1] = load_l2((const u32*)(from + 8));
    }
  };
  // Mean and 1 / deviation of each row of x, from its producer's partial statistics.
  auto load_statistics = [&]() {
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
  };
