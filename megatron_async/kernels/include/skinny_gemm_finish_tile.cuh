      // Part of a skinny GEMM's body (skinny_gemm.cuh): finishes a persistent CTA's tile, of which nothing
      // is split and which has no residual. Uses tile, kept, take, warp_tile, is_in_cta and finish.
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
        for (int i = 0; i < WARP_GROUPS && is_in_cta(r); i++) {
          float v[4];
          take(r, i, v);
          finish(tile * TILES + warp_tile(r), GROUP(i), 0, v, kept[0] BY_ROW(0));
        }
