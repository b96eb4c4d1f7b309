// e4m3 (S.EEEE.MMM, without infinities) as bfloat16.

// Two bytes of a word, `pair` 0 or 1, their bits in place: 2^-120 of them, of subnormals too. NaN (0x7f,
// 0xff) becomes 480.
__device__ __forceinline__ u32 e4m3_bits(u32 word, int pair) {
  const u32 extended = permute(word, pair ? 0xb3a2 : 0x9180);  // to 16 bits each, with sign
  return extended << 4 & 0x87f087f0;
}
// The same exactly: a product with a power of two rounds nothing, and before the sums nothing is lost below
// the smallest float.
__device__ __forceinline__ u32 widen_e4m3(u32 word, int pair) {
  return mul2(e4m3_bits(word, pair), 0x7b807b80);
}
