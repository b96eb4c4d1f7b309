    // Part of the main loop of skinny_gemm_wgmma.cu: a stage of e4m3, 128 columns of W and of x. The
    // tensor cores add products of e4m3 up in some 14 bits, so what a stage adds up to begins anew, and
    // goes to the sums in fp32. One part is added there while the next one is multiplied. Uses weights,
    // sums and part.
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++) {
      begin_wgmma();
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_e4m3<MT * 8>(part[r % 2], weights + r * 64 * 128 + k * 32, weights + WEIGHT_BYTES + k * 32,
                           k > 0);
      end_wgmma();
      if (r == 0) continue;
      await_wgmma<MT * 8, 1>(part[(r - 1) % 2]);
#pragma unroll
      for (int j = 0; j < MT * 4; j++) sums[r - 1][j] += part[(r - 1) % 2][j];
    }
    await_wgmma<MT * 8>(part[(WARP_TILES - 1) % 2]);
#pragma unroll
    for (int j = 0; j < MT * 4; j++) sums[WARP_TILES - 1][j] += part[(WARP_TILES - 1) % 2][j];
