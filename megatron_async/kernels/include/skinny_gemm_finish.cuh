  // Part of a skinny GEMM's body (skinny_gemm.cuh): the epilogue. Uses g, t, scale, kept, take,
  // warp_tile, is_in_cta and the kernel's arguments; declares finish.

  // One fragment: row m = 8 * mt + g of the output, columns 2t, 2t + 1 of the upper and of the lower half
  // of `row_tile`. `own` is where its statistics go, `before` its residual, `by` the scales of its rows of W.
  // With SUMS `v` has been scaled, and summed over all ranks.
#if SCALES_EARLY
  auto finish = [&](int row_tile, int mt, int own, float (&v)[4], u32 (&before)[2], float (&by)[4]) {
#else
  auto finish = [&](int row_tile, int mt, int own, float (&v)[4], u32 (&before)[2]) {
#endif
    const int m = mt * 8 + g, n = row_tile * (GATED ? 8 : 16) + 2 * t;
    u16* into = out + (size_t)m * out_row + n;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = min(n + j % 2 + j / 2 * (GATED ? N / 2 : 8), N - 1);
#if !SUMS
#include "skinny_gemm_scale.cuh"
#endif
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
#if ROUNDED
    for (int j = 0; j < 2; j++) gated[j] = silu_as_triton(as_stored(v[j])) * as_stored(v[j + 2]);
#else
    for (int j = 0; j < 2; j++) gated[j] = __fdividef(v[j], 1.f + __expf(-v[j])) * v[j + 2];
#endif
    if (m < M) *(u32*)into = pack(gated[0], gated[1]);
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 pair = pack(activate(v[half * 2]), activate(v[half * 2 + 1]));
#if SENDS
      if (m < M && n + half * 8 < N) send_pair(mt, n + half * 8, pair);
      continue;
#endif
      if (N % 16 == 0) {
        if (m < M && n + half * 8 < N) *(u32*)(into + half * 8) = pair;
      } else {
        if (m < M && n + half * 8 < N) into[half * 8] = (u16)pair;
        if (m < M && n + half * 8 + 1 < N) into[half * 8 + 1] = (u16)(pair >> 16);
      }
    }
#endif
  };
