  // Part of a skinny GEMM's body (skinny_gemm.cuh): which tiles a warp has, and the cluster's beginning.
  // Uses warp, wr, rank, base and `shared`; declares warp_tile, is_in_cta and scale.

  // Which of the CTA's tiles a warp's tile r is, and whether it is one.
  auto warp_tile = [&](int r) { return INTERLEAVED ? r * WARPS + warp : wr * RT + r; };
  auto is_in_cta = [&](int r) { return HAS_SUMS && (!INTERLEAVED || warp_tile(r) < RT); };
  float2* scale = (float2*)(shared + SCALE_AT);  // mean and 1 / deviation of each row of x; X8: its scale

  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      init_barrier(base + ALL_SENT_AT);
      publish_barriers();
      if (rank < OWNERS) expect_bytes(base + ALL_SENT_AT, SENT_BYTES);
    }
    __syncwarp();
    arrive_in_cluster();  // peers may send
  }
