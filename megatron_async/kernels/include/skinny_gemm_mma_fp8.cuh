    // Part of the main loop of skinny_gemm_mma.cu: a stage of weights in e4m3. Of 16 bytes of a row of W,
    // word p has four k, and one half of vector p / 2 of x has the same. The columns of half a stage, 64,
    // are added up and scaled. Of scales for 32 columns lanes with t < 2 have the first 32, and the others
    // the rest: an instruction keeps them apart, as rows of x and eight below. Uses slot, own_scale, x_at,
    // t, sums, load_weights, issued and total.
    Vec b[2][RT][2];
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[u][r][half] = load_shared((slot ^ u * 64) + (r * 2 + half) * 1024);
#if SCALE_BYTES
    // Of rows 2t and 2t + 1 of W, for each half of a stage.
    float by[RT][2][2][SCALES_OF_ROW];
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 at = slot + own_scale + (r * 2 + half) * 8 * SCALE_BYTES;
        const float4 first = floats(load_shared(SCALE_BYTES == 4 ? at & ~15u : at));
        float(&of)[2][SCALES_OF_ROW] = by[r][half];
        if (SCALE_BYTES == 4) {
          of[0][0] = of[0][1] = t % 2 ? first.z : first.x;
          of[1][0] = of[1][1] = t % 2 ? first.w : first.y;
        } else if (SCALE_BYTES == 8) {
          of[0][0] = first.x, of[0][1] = first.y, of[1][0] = first.z, of[1][1] = first.w;
        } else {
          const float4 second = floats(load_shared(at + 16));
          of[0][0] = first.x, of[0][1] = first.y, of[0][2] = first.z, of[0][3] = first.w;
          of[1][0] = second.x, of[1][1] = second.y, of[1][2] = second.z, of[1][3] = second.w;
        }
      }
#endif
    __syncwarp();  // WAR: all lanes have read what is filled again
    if (issued < total) load_weights();
    commit_copies();
#pragma unroll
    for (int u = 0; u < 2; u++) {
      Vec a[2][MT];
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
          a[e][mt] = load_shared((STREAM_X ? x_at ^ e * 16 : x_at + e * 16) + u * 128 + mt * 8 * X_ROW);
#pragma unroll
      for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Vec& ws = b[u][r][half];
          const u32 words[4] = {ws.x, ws.y, ws.z, ws.w};
          u32 wide[4][2];
#pragma unroll
          for (int p = 0; p < 4; p++)
            wide[p][0] = widen_e4m3(words[p], 0), wide[p][1] = widen_e4m3(words[p], 1);
#if SCALE_BYTES == 16
          const u32 first = t < 2 ? ~0u : 0u;
#pragma unroll
          for (int mt = 0; mt < MT; mt++) {
            float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int p = 0; p < 4; p++) {
              const Vec& xs = a[p / 2][mt];
              const u32 k0 = p % 2 ? xs.z : xs.x, k2 = p % 2 ? xs.w : xs.y;
              mma(part, k0 & first, k0 & ~first, k2 & first, k2 & ~first, wide[p][0], wide[p][1]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
              sums[r][half][mt / 2][mt % 2 * 2 + j] +=
                  by[r][half][j][u * 2] * part[j] + by[r][half][j][u * 2 + 1] * part[2 + j];
          }
#else
#pragma unroll
          for (int mt = 0; mt < MT; mt += 2) {
            float part[4] = {0.f, 0.f, 0.f, 0.f};
            float(&into)[4] = SCALE_BYTES ? part : sums[r][half][mt / 2];
#pragma unroll
            for (int p = 0; p < 4; p++) {
              const Vec &xs = a[p / 2][mt], &more = a[p / 2][mt + (MT > 1)];
              const u32 a0 = p % 2 ? xs.z : xs.x, a2 = p % 2 ? xs.w : xs.y;
              const u32 a1 = MT > 1 ? p % 2 ? more.z : more.x : 0;
              const u32 a3 = MT > 1 ? p % 2 ? more.w : more.y : 0;
              mma(into, a0, a1, a2, a3, wide[p][0], wide[p][1]);
            }
#if SCALE_BYTES
#pragma unroll
            for (int j = 0; j < 4; j++) sums[r][half][mt / 2][j] += by[r][half][j % 2][u] * part[j];
#endif
          }
#endif
        }
    }
