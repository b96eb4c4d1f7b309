// The best of all ranks for each row: best[r] = max over ranks and splits of packed[r, split] - first_id,
// the same on all ranks.
//
//   RANKS      of the group, on one host; their GPUs reach each other's memory
//   MOST_ROWS  of a launch
//   CTAS       of the grid, the same on all ranks, all running at once
//   THREADS    of a CTA, whose warps have a row each
//
// As in peer_sum.cu: half of a value travels in a word together with the number of the launch, and who
// needs it reads the word until the number is right. Words lie in two halves, which launches use in turns.

#define WARPS (THREADS / 32)

extern "C" __device__ const int shared_bytes = 0;

__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ size_t place_of(u32 half, int sender, int row) {
  return ((size_t)(half * RANKS + sender) * MOST_ROWS + row) * 2;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    peer_best(const i64* packed, int rows, int splits, int first_id, u64* received, int rank, u32* launches,
              i64* best, PEERS) {
  u64* const to[8] = ALL_PEERS;
  const int lane = threadIdx.x % 32, first_row = blockIdx.x * WARPS + threadIdx.x / 32;
  wait_for_predecessor();
  release_successor();
  u32 launch = load_l2(launches + blockIdx.x) + 1;
  if (launch == 0) launch = 2;  // that of words which were never sent; halves go on in turns
  for (int row = first_row; row < rows; row += CTAS * WARPS) {
    i64 own = load_l2(packed + (size_t)row * splits + min(lane, splits - 1));
    for (int split = lane + 32; split < splits; split += 32)
      own = larger(own, load_l2(packed + (size_t)row * splits + split));
#pragma unroll
    for (int d = 16; d; d >>= 1) own = larger(own, __shfl_xor_sync(~0u, own, d));
    own -= first_id;
    i64 found = own;
    if (lane < RANKS && lane != rank) {  // a lane for each peer
      const u64 high = (u64)launch << 32;
      u64* peer = to_0;
#pragma unroll
      for (int each = 1; each < RANKS; each++)
        if (lane == each) peer = to[each];
      publish_to_peer(peer + place_of(launch & 1, rank, row), high | (u32)own, high | (u32)((u64)own >> 32));
      const u64* at = received + place_of(launch & 1, lane, row);
      u64 low, upper;
      poll_peer(at, low, upper);
      while ((u32)(low >> 32) != launch || (u32)(upper >> 32) != launch) wait_a_little(), poll_peer(at, low, upper);
      found = larger(own, (i64)(upper << 32 | (u32)low));
    }
#pragma unroll
    for (int d = 4; d; d >>= 1) found = larger(found, __shfl_xor_sync(~0u, found, d));
    if (lane == 0) best[row] = found;
  }
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) launches[blockIdx.x] = launch;
}
