// Messages from one rank to others, in their memory: a ring of SLOTS messages in each.
//
//   TAKES      0: post `message` to all that have a place in `to_*`; 1: take the next one from `received`
//   SLOTS      a power of two; CAPACITY 32-bit words that a message may have, a multiple of two
//   THREADS    of the one CTA
//
// Nobody who posts waits. A 32-bit word travels together with the number of its message, and who takes it
// reads until the number is right. A rank counts its messages itself, so graphs may replay in any order on
// one stream. Who posts is never SLOTS messages ahead: that is for the callers to see to.

extern "C" __device__ const int shared_bytes = 0;

static_assert((SLOTS & (SLOTS - 1)) == 0 && CAPACITY % 2 == 0, "slots go on in turns, words come by twos");

__device__ __forceinline__ u64 numbered(int value, u32 number) { return (u64)number << 32 | (u32)value; }

extern "C" __global__ void __launch_bounds__(THREADS)
    mailbox(int* message, int words, u64* received, u32* done, PEERS) {
  u64* const to[8] = ALL_PEERS;
  wait_for_predecessor();
  u32 number = load_l2(done) + 1;
  if (number == 0) number = SLOTS;  // that of words which were never sent
  const size_t slot = (size_t)(number % SLOTS) * CAPACITY;
  for (int at = threadIdx.x * 2; at < words; at += THREADS * 2) {
    const bool has_second = at + 1 < words;
    if (TAKES) {
      u64 first, second;
      poll_peer(received + slot + at, first, second);
      while ((u32)(first >> 32) != number || (u32)(second >> 32) != number) {
        wait_a_little();
        poll_peer(received + slot + at, first, second);
      }
      message[at] = (int)(u32)first;
      if (has_second) message[at + 1] = (int)(u32)second;
    } else {
      const u64 first = numbered(message[at], number);
      const u64 second = numbered(has_second ? message[at + 1] : 0, number);
#pragma unroll
      for (int peer = 0; peer < 8; peer++)
        if (to[peer]) publish_to_peer(to[peer] + slot + at, first, second);
    }
  }
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) *done = number;
}
