// Peers may send once all CTAs of the cluster have come here.
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      init_barrier(base + ALL_SENT_AT);
      publish_barriers();
      if (rank < OWNERS) expect_bytes(base + ALL_SENT_AT, SENT_BYTES);
    }
    __syncwarp();
    arrive_in_cluster();
  }
