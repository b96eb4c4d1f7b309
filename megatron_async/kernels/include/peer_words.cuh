// Words that the ranks of a group send each other in a launch, each with the launch's number. They lie in
// two halves, which launches use in turns; see peer_sum.cu for why that is enough.
//
//   RANKS      of the group
//   CAPACITY   elements that a rank can send in a launch, two in a word
//   LAUNCHES   entries of `launches`: all are the number of the last launch. Whatever sends to these words
//              counts, with a grid of any size up to it: a CTA reads its own entry

#define SENT_WORDS (CAPACITY / 2)  // of a rank, in each half

// Behind the last launch, of which an entry is.
__device__ __forceinline__ u32 next_launch(const u32* entry) {
  const u32 number = load_l2(entry) + 1;
  return number ? number : 2;  // 0 is that of words which were never sent; halves go on in turns
}
// Behind a barrier of the CTA that all its reads of the number are in front of.
__device__ __forceinline__ void count_launch(u32* launches, u32 number) {
  for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < LAUNCHES; i += THREADS * gridDim.x)
    launches[i] = number;
}
__device__ __forceinline__ u64 peer_word(u32 value, u32 number) { return (u64)number << 32 | value; }
__device__ __forceinline__ bool is_of(u64 word, u32 number) { return (u32)(word >> 32) == number; }
