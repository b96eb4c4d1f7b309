    // Part of the main loop of skinny_gemm_wgmma.cu: a stage of weights in e4m3, 128 columns. A warp
    // widens its 16 rows of each 64 into registers, from which wgmma takes them. Uses weights, sums, warp,
    // g, t and is_in_cta.
    u32 a[2][8][4];  // of two tiles: one is multiplied while the other is widened
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++) {
      if (r >= 2) await_wgmma<MT * 8>(sums[r - 2]);
      u32(&own)[8][4] = a[r % 2];
      // Row g of the warp's, and the one eight rows on. 16 columns are a vector, which the row swizzles.
      const u32 row = weights + (r * 4 + warp) * 2048 + g * 128 + t * 2;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u32 at = row + (k ^ g) * 16;
        own[k][0] = widen_e4m3(load_shared_pair(at), 0);
        own[k][1] = widen_e4m3(load_shared_pair(at + 1024), 0);
        own[k][2] = widen_e4m3(load_shared_pair(at + 8), 0);
        own[k][3] = widen_e4m3(load_shared_pair(at + 1024 + 8), 0);
      }
      begin_wgmma();
#pragma unroll
      for (int k = 0; k < 8; k++)
        wgmma<MT * 8>(sums[r], own[k], weights + WEIGHT_BYTES + k / 4 * X_HALF + k % 4 * 32);
      end_wgmma();
    }
