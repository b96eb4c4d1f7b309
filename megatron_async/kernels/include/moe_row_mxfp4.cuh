// Weights of experts in MXFP4: where their scales are, and products with them. A vector has 32 numbers,
// which share a scale: sums of such have a byte for it. What they are multiplied by is 64 bytes of shared
// memory, a quarter of which eight lanes read from another place each, so that no two meet in a bank.

#define UP_GROUPS (H / 32)  // scales of a row
#define DOWN_GROUPS (INNER / 32)

static_assert(H % 32 == 0 && INNER % 32 == 0 && SHARED == 0, "whole blocks, and none of shared experts");

struct UpScales {
  Scales of_routed, of_shared;
  Scales row;  // of a row of the gate

  __device__ __forceinline__ void begin(int expert, int i) {
    row = of_routed + ((size_t)expert * (1 + GATED) * INNER + i) * UP_GROUPS;
  }
  // Of a vector of the row, or of the one in the other half.
  __device__ __forceinline__ Scale of(int vector, bool other) const {
    return row[(size_t)other * INNER * UP_GROUPS + vector];
  }
};

struct DownScales {
  Scales of_routed, of_shared;

  // Of a vector of an expert's row `column`.
  __device__ __forceinline__ Scale of(int expert, int column, int vector) const {
    return of_routed[((size_t)expert * H + column) * DOWN_GROUPS + vector];
  }
};

struct Inputs {
  Vec part[4];  // as this lane has read them
};

// The quarter of a vector that a lane reads first.
__device__ __forceinline__ u32 first_quarter() { return threadIdx.x / 2 % 4; }

__device__ __forceinline__ Inputs load_inputs(u32 at) {
  Inputs x;
#pragma unroll
  for (u32 k = 0; k < 4; k++) x.part[k] = load_shared(at + (k + first_quarter()) % 4 * 16);
  return x;
}

// Numbers PLACE and PLACE + 4 of a word, exactly.
template <int PLACE>
__device__ __forceinline__ u32 widen_pair(u32 word) {
  return mul2(mxfp4_bits<PLACE>(word), 0x7e807e80u);
}
__device__ __forceinline__ void add_eight(float& sum, u32 word, const Vec& x) {
  const u32 a = widen_pair<0>(word), b = widen_pair<1>(word), c = widen_pair<2>(word),
            d = widen_pair<3>(word);
  sum += low(a) * low(x.x), sum += low(b) * high(x.x), sum += low(c) * low(x.y), sum += low(d) * high(x.y);
  sum += high(a) * low(x.z), sum += high(b) * high(x.z), sum += high(c) * low(x.w);
  sum += high(d) * high(x.w);
}
__device__ __forceinline__ void add_products(float& sum, const Vec& w, Scale scale, const Inputs& x) {
  const bool by_one = first_quarter() & 1, by_two = first_quarter() & 2;
  const u32 a = by_one ? w.y : w.x, b = by_one ? w.z : w.y, c = by_one ? w.w : w.z, d = by_one ? w.x : w.w;
  float part = 0.f;
  add_eight(part, by_two ? c : a, x.part[0]);
  add_eight(part, by_two ? d : b, x.part[1]);
  add_eight(part, by_two ? a : c, x.part[2]);
  add_eight(part, by_two ? b : d, x.part[3]);
  // 255 becomes an infinity, so that what comes out is not finite.
  sum += part * __uint_as_float(scale ? (u32)scale << 23 : 0x400000u);
}
