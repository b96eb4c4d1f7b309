  // Part of a skinny GEMM's body (skinny_gemm.cuh) that sends its output; uses lane and the kernel's
  // arguments, declares what sends. The number is that of the next launch of peer_sum.cu, or with SUMS of
  // this one.
  u64* const to[8] = ALL_PEERS;
  const u32 number = next_launch(launches + (SUMS ? blockIdx.x : 0));
#if SUMS
  // Where a fragment's words are in the memory of any rank: a lane's two lie next to each other.
  auto words_of = [&](int row_tile, int mt, int sender) {
#if BARE
    return ((size_t)(number & 1) * RANKS + sender) * (CAPACITY / 4) + ((size_t)row_tile * MT + mt) * 32 + lane;
#else
    return ((size_t)(number & 1) * RANKS + sender) * SENT_WORDS + ((size_t)row_tile * MT + mt) * 64 + lane * 2;
#endif
  };
  // Rounds a fragment's partial sums, times their scales, and sends them to the other ranks.
#if SCALES_EARLY
  auto send_sums = [&](int row_tile, int mt, float (&v)[4], u32 (&pairs)[2], float (&by)[4]) {
#else
  auto send_sums = [&](int row_tile, int mt, float (&v)[4], u32 (&pairs)[2]) {
#endif
    const int m = mt * 8 + g;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      [[maybe_unused]] const int column = min(row_tile * 16 + 2 * t + j % 2 + j / 2 * 8, N - 1);
#include "skinny_gemm_scale.cuh"
    }
    pairs[0] = pack(v[0], v[1]), pairs[1] = pack(v[2], v[3]);
    if (m >= M || row_tile * 16 >= N) return;
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++)
      if (peer != place)
#if BARE
        publish_to_peer(to[peer] + words_of(row_tile, mt, place),
                        (u64)pairs[1] << 32 | as_sent(pairs[0]));
#else
        publish_to_peer(to[peer] + words_of(row_tile, mt, place), peer_word(pairs[0], number),
                        peer_word(pairs[1], number));
#endif
  };
  // What rank `from` has sent of a fragment, or how this rank has it; whether it is there.
  auto receive_sums = [&](int row_tile, int mt, int from, const u32 (&own)[2], u32 (&pairs)[2]) {
    pairs[0] = own[0], pairs[1] = own[1];
    if (from == place || mt * 8 + g >= M || row_tile * 16 >= N) return true;
#if BARE
    const u64 both = poll_peer(received + words_of(row_tile, mt, from));
    pairs[0] = (u32)both, pairs[1] = (u32)(both >> 32);
    return both != 0;
#else
    u64 upper, lower;
    poll_peer(received + words_of(row_tile, mt, from), upper, lower);
    pairs[0] = (u32)upper, pairs[1] = (u32)lower;
    return is_of(upper, number) && is_of(lower, number);
#endif
  };
#if BARE
  // Behind the last look at what all have sent of a fragment.
  auto clear_received = [&](int row_tile, int mt) {
    if (mt * 8 + g >= M || row_tile * 16 >= N) return;
#pragma unroll
    for (int from = 0; from < RANKS; from++)
      if (from != place) const_cast<u64*>(received)[words_of(row_tile, mt, from)] = 0;
  };
#endif
#else
  // A warp's words of eight rows and eight columns lie next to each other.
  auto send_pair = [&](int mt, int columns, u32 pair) {
    const size_t at = ((size_t)(number & 1) * RANKS + place) * SENT_WORDS +
                      ((size_t)mt * (N / 8) + columns / 8) * 32 + lane;
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) publish_to_peer(to[peer] + at, peer_word(pair, number));
  };
#endif
