// MXFP4 (S.EE.M) as bfloat16, from words of eight numbers in the order of kernels/moe/mxfp4.py.

// Numbers PLACE and PLACE + 4 of a word, their bits in place: 2^-126 of them. Bits of others may come with a
// shift, and are taken out by `xor` with bits that have them alone.
template <int PLACE>
__device__ __forceinline__ u32 mxfp4_bits(u32 word) {
  const u32 moved = PLACE == 0   ? word
                    : PLACE == 1 ? word << 6
                    : PLACE == 2 ? word << 12 | word >> 20
                                 : word << 2 ^ word >> 6;
  return moved & 0x81c081c0u;
}
