// Weights of experts in e4m3: where their scales are, and products with them. A vector has 16 weights,
// which share a scale: sums of such have a float for it. What they are multiplied by is 32 bytes of shared
// memory, of which every other four lanes read the second half first, so that no two of eight meet in a
// bank.

#define UP_GROUPS (H / UP_COLUMNS)  // scales of a row
#define DOWN_GROUPS (INNER / DOWN_COLUMNS)
#if SHARED
#define SHARED_UP_GROUPS (H / SHARED_UP_COLUMNS)
#define SHARED_DOWN_GROUPS (SHARED * INNER / SHARED_DOWN_COLUMNS)
static_assert(SHARED_UP_COLUMNS % 16 == 0 && SHARED_DOWN_COLUMNS % 16 == 0, "a scale for a vector");
#endif

static_assert(UP_COLUMNS % 16 == 0 && DOWN_COLUMNS % 16 == 0, "a scale for a vector");

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
  // Of a vector of the row, or of the one in the other half.
  __device__ __forceinline__ float of(int vector, bool other) const {
#if SHARED
    if (is_shared)
      return row[other * SHARED * INNER * SHARED_UP_GROUPS + vector * 16 / SHARED_UP_COLUMNS];
#endif
    return row[other * INNER * UP_GROUPS + vector * 16 / UP_COLUMNS];
  }
};

struct DownScales {
  const float *of_routed, *of_shared;

  // Of a vector of an expert's row `column`.
  __device__ __forceinline__ float of(int expert, int column, int vector) const {
#if SHARED
    if (expert >= EXPERTS)
      return of_shared[(size_t)column * SHARED_DOWN_GROUPS +
                       ((expert - EXPERTS) * INNER + vector * 16) / SHARED_DOWN_COLUMNS];
#endif
    return of_routed[((size_t)expert * H + column) * DOWN_GROUPS + vector * 16 / DOWN_COLUMNS];
  }
};

struct Inputs {
  Vec first, second;  // as this lane has read them
};

__device__ __forceinline__ Inputs load_inputs(u32 at) {
  const u32 half = threadIdx.x % 8 / 4 * 16;
  return Inputs{load_shared(at + half), load_shared(at + (half ^ 16))};
}

__device__ __forceinline__ void add_four(float& sum, u32 weights, u32 a, u32 b) {
  const float4 w = widen_four(weights);
  sum += w.x * low(a), sum += w.y * high(a), sum += w.z * low(b), sum += w.w * high(b);
}
__device__ __forceinline__ void add_products(float& sum, const Vec& w, float scale, const Inputs& x) {
  const bool flipped = threadIdx.x % 8 >= 4;
  float part = 0.f;
  add_four(part, flipped ? w.z : w.x, x.first.x, x.first.y);
  add_four(part, flipped ? w.w : w.y, x.first.z, x.first.w);
  add_four(part, flipped ? w.x : w.z, x.second.x, x.second.y);
  add_four(part, flipped ? w.y : w.w, x.second.z, x.second.w);
  sum += part * scale;
}
