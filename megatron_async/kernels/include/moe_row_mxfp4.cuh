// Weights of experts in MXFP4: where their scales are, and products with them. A vector has 32 numbers,
// which share a scale: sums of such have a byte for it.

#define UP_GROUPS (H / 32)  // scales of a row
#define DOWN_GROUPS (INNER / 32)

static_assert(H % 32 == 0 && INNER % 32 == 0 && SHARED == 0, "whole blocks, and none of shared experts");

struct UpScales {
  Scales of_routed, of_shared;
  Scales row;  // of a row of the gate

  __device__ __forceinline__ void begin(int expert, int i) {
    row = of_routed + ((size_t)expert * (1 + GATED) * INNER + i) * UP_GROUPS;
  }
  // Of vector `first` + lane of the row, or of the one in the other half.
  __device__ __forceinline__ Scale of(int first, bool other) const {
    return (row + threadIdx.x % 32)[(size_t)other * INNER * UP_GROUPS + first];
  }
};

struct DownScales {
  Scales of_routed, of_shared;

  // Of vector `first` + lane of an expert's row `column`.
  __device__ __forceinline__ Scale of(int expert, int column, int first) const {
    return (of_routed + ((size_t)expert * H + column) * DOWN_GROUPS + threadIdx.x % 32)[first];
  }
};

#define UP_ON_TENSOR_CORES 1
#define DOWN_ON_TENSOR_CORES 1
// There weights are multiplied by a power of two that has their scale: that is exact for scales from 2^-88
// to 2^45, and leaves products 2^44 times too small, which are normal numbers of fp32 from 2^-82 on. Larger
// scales become infinities, 255 among them, so that what comes out is not finite.
#define MISSING 0x1p44f
#define CHAINS 2  // of products that wait for each other

// Twice, as bfloat16.
__device__ __forceinline__ u32 factor_of(u32 scale) {
  return (min(scale, 255u - 82u) + 82u) * 0x800080u;
}

// As DiagonalSums says. Each word's numbers and inputs are pairs, n and n + 4 of eight.
__device__ __forceinline__ void multiply(float (&c)[2 * CHAINS][4], const Vec& w, u32 factor,
                                         const Inputs& x) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const Vec& a = x.part[k];
    float(&even)[4] = c[k % CHAINS * 2], (&odd)[4] = c[k % CHAINS * 2 + 1];
    const u32 word = words[k];
    mma(even, a.x, a.y, a.z, a.w, mul2(mxfp4_bits<0>(word), factor), mul2(mxfp4_bits<2>(word), factor));
    mma(odd, a.x, a.y, a.z, a.w, mul2(mxfp4_bits<1>(word), factor), mul2(mxfp4_bits<3>(word), factor));
  }
}
// As GatedSums says.
template <int PLACE>
__device__ __forceinline__ void multiply_pairs(float (&c)[4], u32 w, u32 other, u32 factor, u32 of_other,
                                               u32 a, u32 b) {
  mma(c, mul2(mxfp4_bits<PLACE>(w), factor), mul2(mxfp4_bits<PLACE>(other), of_other),
      mul2(mxfp4_bits<PLACE + 1>(w), factor), mul2(mxfp4_bits<PLACE + 1>(other), of_other), a, b);
}
__device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], const Vec& w, const Vec& other,
                                         u32 factor, u32 of_other, const Inputs& x) {
  const u32 words[4] = {w.x, w.y, w.z, w.w}, others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    multiply_pairs<0>(c, words[k], others[k], factor, of_other, x.part[k].x, x.part[k].y);
    multiply_pairs<2>(d, words[k], others[k], factor, of_other, x.part[k].z, x.part[k].w);
  }
}
