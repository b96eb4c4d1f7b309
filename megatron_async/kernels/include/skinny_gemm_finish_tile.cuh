      // Part of a skinny GEMM's body (skinny_gemm.cuh): finishes a persistent CTA's tile, of which nothing
      // is split and which has no residual. Uses tile, kept, take, warp_tile, is_in_cta and finish.
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
        for (int mt = 0; mt < MT && is_in_cta(r); mt++) {
          float v[4];
          take(r, mt, v);
          finish(tile * TILES + warp_tile(r), mt, 0, v, kept[0] BY_ROW(0));
        }
