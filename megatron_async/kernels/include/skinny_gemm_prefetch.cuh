  // Part of a skinny GEMM's body (skinny_gemm.cuh): touches what is read once and would else come from
  // memory while all wait for it. Uses bias, next_weight, weight_scale and tile; declares nothing.
  if (bias != nullptr && threadIdx.x < (GATED ? 2 : 1) * BIAS_LINES) {
    const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % BIAS_LINES * 64;
    touch(bias + (min(n, (GATED ? N / 2 : N) - 2) & ~1) + threadIdx.x / BIAS_LINES * (N / 2));
  }
  if (SCALES && threadIdx.x < (16 * TILES * 2 + 127) / 128)
    touch(next_weight + min(tile * 16 * TILES + threadIdx.x * 64, N - 2u));
#if SCALES_ROWS
  if (threadIdx.x < (GATED ? 2 : 1) * SCALE_LINES) {
    const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % SCALE_LINES * 32;
    touch(weight_scale + min(n, (GATED ? N / 2 : N) - 1) + threadIdx.x / SCALE_LINES * (N / 2));
  }
#endif
