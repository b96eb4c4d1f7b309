// e4m3 (S.EEEE.MMM, without infinities) as bfloat16.

// Two bytes of a word, `pair` 0 or 1, exactly. Their bits in place are 2^-120 of them, of subnormals too;
// a product with a power of two rounds nothing, and before the sums nothing is lost below the smallest
// float. NaN (0x7f, 0xff) becomes 480.
__device__ __forceinline__ u32 widen_e4m3(u32 word, int pair) {
  const u32 extended = permute(word, pair ? 0xb3a2 : 0x9180);  // to 16 bits each, with sign
  return mul2(extended << 4 & 0x87f087f0, 0x7b807b80);
}
