  // Part of a skinny GEMM's body (skinny_gemm.cuh): touches what is read once and would else come from
  // memory while all wait for it. Uses bias, next_weight, weight_scale, t, warp, rank, tile and warp_tile;
  // declares by_row, the scales of W's rows that this lane finishes, where a warp has few tiles.
  if (bias != nullptr && threadIdx.x < (GATED ? 2 : 1) * BIAS_LINES) {
    const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % BIAS_LINES * 64;
    touch(bias + (min(n, (GATED ? N / 2 : N) - 2) & ~1) + threadIdx.x / BIAS_LINES * (N / 2));
  }
  if (SCALES && threadIdx.x < (16 * TILES * 2 + 127) / 128)
    touch(next_weight + min(tile * 16 * TILES + threadIdx.x * 64, N - 2u));
#if SCALES_EARLY
  float by_row[OWN_ROWS][4];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    const int own = WK * CLUSTER == 1 ? warp_tile(i) : (rank * OWN + i * WARPS + warp) % TILES;
    const int n = (tile * TILES + own) * (GATED ? 8 : 16) + 2 * t;
#pragma unroll
    for (int j = 0; j < 4; j++)
      by_row[i][j] = weight_scale[min(n + j % 2 + j / 2 * (GATED ? N / 2 : 8), N - 1)];
  }
#elif SCALES_ROWS
  if (threadIdx.x < (GATED ? 2 : 1) * SCALE_LINES) {
    const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % SCALE_LINES * 32;
    touch(weight_scale + min(n, (GATED ? N / 2 : N) - 1) + threadIdx.x / SCALE_LINES * (N / 2));
  }
#endif
