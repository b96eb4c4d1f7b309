// Weights of experts in e4m3: where their scales are, and products with them. A vector has 16 weights,
// which share a scale: sums of such have a float for it.

#define UP_GROUPS (H / UP_COLUMNS)  // scales of a row
#define DOWN_GROUPS (INNER / DOWN_COLUMNS)
#if SHARED
#define SHARED_UP_GROUPS (H / SHARED_UP_COLUMNS)
#define SHARED_DOWN_GROUPS (SHARED * INNER / SHARED_DOWN_COLUMNS)
static_assert(SHARED_UP_COLUMNS % 16 == 0 && SHARED_DOWN_COLUMNS % 16 == 0, "a scale for a vector");
#endif

static_assert(UP_COLUMNS % 16 == 0 && DOWN_COLUMNS % 16 == 0, "a scale for a vector");

// The group of vector `first` + lane of a row. Where `first` begins one, the compiler knows lanes' apart.
template <int COLUMNS>
__device__ __forceinline__ int group_of(int first, bool begins_one) {
  const int lane = threadIdx.x % 32;
  return begins_one ? first * 16 / COLUMNS + lane * 16 / COLUMNS : (first + lane) * 16 / COLUMNS;
}

struct UpScales {
  const float *of_routed, *of_shared;
  const float* row;  // of a row of the gate
  bool is_shared;

  __device__ __forceinline__ void begin(int expert, int i) {
    is_shared = SHARED && expert >= EXPERTS;
    row = of_routed + ((size_t)expert * (1 + GATED) * INNER + i) * UP_GROUPS;
#if SHARED
    if (is_shared) row = of_shared + (size_t)((expert - EXPERTS) * INNER + i) * SHARED_UP_GROUPS;
#endif
  }
  // Of vector `first` + lane of the row, or of the one in the other half; `first` is a multiple of 32.
  __device__ __forceinline__ float of(int first, bool other) const {
#if SHARED
    if (is_shared)
      return row[other * SHARED * INNER * SHARED_UP_GROUPS + group_of<SHARED_UP_COLUMNS>(first, false)];
#endif
    return row[other * INNER * UP_GROUPS + group_of<UP_COLUMNS>(first, 512 % UP_COLUMNS == 0)];
  }
};

struct DownScales {
  const float *of_routed, *of_shared;

  // Of vector `first` + lane of an expert's row `column`; `first` is a multiple of 32, less some such rows.
  __device__ __forceinline__ float of(int expert, int column, int first) const {
#if SHARED
    if (expert >= EXPERTS)
      return of_shared[(size_t)column * SHARED_DOWN_GROUPS +
                       group_of<SHARED_DOWN_COLUMNS>((expert - EXPERTS) * (INNER / 16) + first, false)];
#endif
    return of_routed[((size_t)expert * H + column) * DOWN_GROUPS +
                     group_of<DOWN_COLUMNS>(first, 512 % DOWN_COLUMNS == 0)];
  }
};

// Tensor cores add up four lanes: these have one scale where all of a row have, and where groups of columns,
// of one expert each, end with fours.
#if UP_GROUPS == 1 && (!SHARED || SHARED_UP_GROUPS == 1)
#define UP_BY_ROW 1
#endif
#if UP_COLUMNS % 64 == 0 && (!SHARED || SHARED_UP_COLUMNS % 64 == 0) || UP_BY_ROW
#define UP_ON_TENSOR_CORES 1
#define UP_FACTOR 0x5f805f80u
#endif
#if INNER % 64 == 0 && DOWN_COLUMNS % 64 == 0 && (!SHARED || SHARED_DOWN_COLUMNS % 64 == 0)
#define DOWN_ON_TENSOR_CORES 1
#define DOWN_FACTOR 0x5f805f80u
#endif
// There weights are their bits in place, 2^-120 of them, and inputs 2^64 times too large. So products are
// normal numbers of fp32 from 2^-70 on, and inputs finite up to 2^63.
#define MISSING 0x1p56f
#define CHAINS 1

__device__ __forceinline__ void add_four(float& sum, u32 weights, u32 a, u32 b) {
  const float4 w = widen_four(weights);
  sum += w.x * low(a), sum += w.y * high(a), sum += w.z * low(b), sum += w.w * high(b);
}
__device__ __forceinline__ void add_vector(float& sum, const Loaded& from, int u, const Inputs& x) {
  float part = 0.f;
  add_four(part, from[u].x, x.part[0].x, x.part[0].y);
  add_four(part, from[u].y, x.part[0].z, x.part[0].w);
  add_four(part, from[u].z, x.part[1].x, x.part[1].y);
  add_four(part, from[u].w, x.part[1].z, x.part[1].w);
  sum += part * from.scale[u];
}

// As DiagonalSums says.
__device__ __forceinline__ void multiply(float (&c)[2][4], const Vec& w, const Inputs& x) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const Vec& a = x.part[k];
#pragma unroll
    for (int i = 0; i < 2; i++)
      mma(c[i], a.x, a.y, a.z, a.w, e4m3_bits(words[k * 2], i), e4m3_bits(words[k * 2 + 1], i));
  }
}
// As GatedSums says.
__device__ __forceinline__ void multiply(float (&c)[4], float (&d)[4], const Vec& w, const Vec& other,
                                         const Inputs& x) {
  const u32 words[4] = {w.x, w.y, w.z, w.w}, others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const Vec& of = x.part[k / 2];
    mma(k % 2 ? d : c, e4m3_bits(words[k], 0), e4m3_bits(others[k], 0), e4m3_bits(words[k], 1),
        e4m3_bits(others[k], 1), k % 2 ? of.z : of.x, k % 2 ? of.w : of.y);
  }
}
