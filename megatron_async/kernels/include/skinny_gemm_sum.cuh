  // Part of a skinny GEMM's body (skinny_gemm.cuh) with SUMS: what other ranks have sent of the fragments that
  // this warp finishes, which are finished. Uses g, lane, rank, place, tile, sent, kept, warp_tile, is_in_cta,
  // receive_sums, clear_received and finish.

  // Of the warp's i-th fragment: whether there is one, its tile, which one of the CTA's, and eight rows of x.
  auto fragment = [&](int i, int& row_tile, int& own, int& mt) {
    own = WK * CLUSTER == 1 ? GROUP(i / WARP_TILES) * TILES + warp_tile(i % WARP_TILES) : i * WARPS + warp;
    const int f = WK * CLUSTER == 1 ? own : rank * OWN + own;
    row_tile = tile * TILES + f % TILES, mt = f / TILES;
    return WK * CLUSTER == 1 ? is_in_cta(i % WARP_TILES) : own < OWN;
  };
  u32 of_rank[PER_WARP][RANKS][2];
  bool is_missing = true;
  while (is_missing) {  // all at once: each is a trip to L2
    is_missing = false;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      int row_tile, own, mt;
      if (!fragment(i, row_tile, own, mt)) continue;
#pragma unroll
      for (int from = 0; from < RANKS; from++)
        is_missing |= !receive_sums(row_tile, mt, from, sent[i], of_rank[i][from]);
    }
    if (is_missing) wait_a_little();
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    int row_tile, own, mt;
    if (!fragment(i, row_tile, own, mt)) continue;
#if BARE
    clear_received(row_tile, mt);
#endif
    float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int from = 0; from < RANKS; from++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        v[half * 2] += low(of_rank[i][from][half]), v[half * 2 + 1] += high(of_rank[i][from][half]);
    finish(row_tile, mt, own, v, kept[i] BY_ROW(WK * CLUSTER == 1 ? i % WARP_TILES : i));
  }
