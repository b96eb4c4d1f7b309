  // Part of a skinny GEMM's body (skinny_gemm.cuh) that sends its output; uses lane and the kernel's
  // arguments, declares send. The number is that of the launch of peer_sum.cu that comes next.
  u64* const to[8] = ALL_PEERS;
  u32 number = load_l2(launches) + 1;
  if (number == 0) number = 2;
  // A warp's words of eight rows and eight columns lie next to each other.
  auto send_pair = [&](int mt, int columns, u32 pair) {
    const size_t at = ((size_t)(number & 1) * RANKS + place) * (CAPACITY / 2) +
                      ((size_t)mt * (N / 8) + columns / 8) * 32 + lane;
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) publish_to_peer(to[peer] + at, (u64)number << 32 | pair);
  };
