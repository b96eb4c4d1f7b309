#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int mt = 0; mt < MT && is_in_cta(r); mt++) {
        float v[4];
        take(r, mt, v);
        finish(tile * TILES + warp_tile(r), mt, 0, v, kept[0]);
      }
