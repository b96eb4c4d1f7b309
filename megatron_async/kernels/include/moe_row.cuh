// What the parts of moe_row.cu share: its macros, shared memory, and words that are awaited.

#define WARPS (THREADS / 32)
#define VECTORS (H / 8)  // of a row, of 16 bytes
#define OWN_VECTORS ((VECTORS + THREADS - 1) / THREADS)
#if W8 || W4
typedef unsigned char Weight;
#if W4
typedef unsigned char Scale;
#define IN_VECTOR 32  // numbers
#define IN_WEIGHT 2
#else
typedef float Scale;
#define IN_VECTOR 16
#endif
typedef const Scale* Scales;
#define SCALING , Scales w1_scale, Scales shared_w1_scale, Scales w2_scale, Scales shared_w2_scale
#else
typedef u16 Weight;
#define SCALING
#define IN_VECTOR 8
#endif
#ifndef IN_WEIGHT
#define IN_WEIGHT 1
#endif
#define UP_WIDTH (H / IN_WEIGHT)  // of a row, as it lies
#define DOWN_WIDTH (INNER / IN_WEIGHT)
#define VECTOR_WIDTH (IN_VECTOR / IN_WEIGHT)
#define UP_VECTORS (H / IN_VECTOR)  // of a row of an expert's first weight
#define INNER_VECTORS (INNER / IN_VECTOR)
#define SLOTS (TOP_K + SHARED)  // experts of a row
#define ROW_WORDS (SLOTS * INNER)
#define ROW_VECTORS (SLOTS * INNER_VECTORS)
#define LOGITS (EXPERTS + GATE)
#define OWN_LOGITS ((LOGITS + CTAS - 1) / CTAS)
#define LANE_EXPERTS ((EXPERTS + 31) / 32)
#define ROW_WARPS (WARPS / (ROWS == 3 ? 4 : ROWS))  // that choose for a row
#define DEPTH (LOADS / (1 + GATED))  // of a step, for each half of the first weight
#define UP_STEPS ((UP_VECTORS + 32 * DEPTH - 1) / (32 * DEPTH))
#define DOWN_STEPS ((ROW_VECTORS + 32 * LOADS - 1) / (32 * LOADS))
#define TILES (H / TILE)
#define WARP_COLUMNS (TILE / WARPS)
#define POLLS 4  // of activations on their way at once

#ifndef SUMS
#define SUMS 0
#endif
#if SUMS
#define SUMMING , int own_rank, const u64 *received, u32 *rank_launches, PEERS
#else
#define SUMMING
#endif

#define ROUTES (PHASES & 1)
#define GOES_UP (PHASES & 2)
#define GOES_DOWN (PHASES & 4)

struct __align__(8) Slot {
  const Weight *up, *down;  // the expert's
  float weight;
  int expert;
};

#define X_AT 0                                            // [ROWS][H] bf16, normed
#define ACTIVATED_AT (X_AT + ROWS * H * 2)                // [live rows][SLOTS][INNER] bf16
#define SLOTS_AT (ACTIVATED_AT + ROWS * ROW_WORDS * 2)    // [live rows][SLOTS]
#define SUMS_AT (SLOTS_AT + (ROWS * SLOTS * 24 + 15) / 16 * 16)  // [ROWS][OWN_LOGITS][WARPS]
#define STATS_AT (SUMS_AT + ROWS * OWN_LOGITS * WARPS * 4)       // [ROWS][WARPS], mean and square
#define TOTALS_AT (STATS_AT + ROWS * WARPS * 8)           // [2][ROWS][TILE]
#define LIVE_AT (TOTALS_AT + 2 * ROWS * TILE * 4)         // [ROWS], live ones first
#define LOGITS_AT (LIVE_AT + ROWS * 4)                    // [ROWS][LOGITS]
#define SCORES_AT (LOGITS_AT + ROWS * LOGITS * 4)         // [ROWS][EXPERTS]
#define SHARED_BYTES (SCORES_AT + ROWS * EXPERTS * 4)

static_assert(H % 16 == 0 && INNER % 16 == 0 && H % TILE == 0, "shape");
static_assert(ROWS <= WARPS && ROWS * TILE <= THREADS && SLOTS <= 32 && GROUPS <= 32, "a lane for each");
static_assert(TILE % WARPS == 0 && (TILE == 8 || TILE == 16), "columns of a warp");
static_assert(LOADS % (1 + GATED) == 0, "loads of a step");
static_assert(!SUMS || PHASES == 7, "what waits for other ranks");

extern "C" __device__ const int shared_bytes = SHARED_BYTES > MIN_SHARED ? SHARED_BYTES : MIN_SHARED;

// What a thread loads in a step: vectors of weights, of e4m3 and MXFP4 each with its scale.
#if W8 || W4
struct Loaded {
  Vec v[LOADS];
#if W4
  u32 scale[LOADS];
#else
  Scale scale[LOADS];
#endif
  __device__ __forceinline__ Vec& operator[](int u) { return v[u]; }
  __device__ __forceinline__ const Vec& operator[](int u) const { return v[u]; }
};
#else
typedef Vec Loaded[LOADS];
#endif

// What a vector is multiplied by.
#define PARTS (IN_VECTOR / 8)
struct Inputs {
  Vec part[PARTS];
};

extern __shared__ __align__(128) char shared[];

__device__ __forceinline__ Slot* slots() { return (Slot*)(shared + SLOTS_AT); }
__device__ __forceinline__ int* live_rows() { return (int*)(shared + LIVE_AT); }

// The launch number is in the upper half of a logit's two words, and in the lower of an activation's
// one: a word that has it has its value too, since both are stored at once. Each launch stores every
// word, so one that was not stored yet has the number before.
__device__ __forceinline__ void publish_logit(u64* at, float v, u32 launch) {
  publish(at, (u64)launch << 32 | __float_as_uint(v));
}
__device__ __forceinline__ void publish_activation(u32* at, float v, u32 launch) {
  publish(at, (u32)narrow(v) << 16 | (launch & 0xffffu));
}
__device__ __forceinline__ bool has_arrived(u64 logit, u32 launch) { return (u32)(logit >> 32) == launch; }
__device__ __forceinline__ bool has_arrived(Vec v, u32 launch) {
  return (((v.x ^ launch) | (v.y ^ launch) | (v.z ^ launch) | (v.w ^ launch)) & 0xffffu) == 0;
}

__device__ __forceinline__ float sum_of_warp(float v, int lanes = 32) {
#pragma unroll
  for (int d = 16; d; d >>= 1)
    if (d < lanes) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// `sum` and the products of eight pairs, in order.
__device__ __forceinline__ void add_products(float& sum, Vec a, Vec b) {
  sum += low(a.x) * low(b.x), sum += high(a.x) * high(b.x);
  sum += low(a.y) * low(b.y), sum += high(a.y) * high(b.y);
  sum += low(a.z) * low(b.z), sum += high(a.z) * high(b.z);
  sum += low(a.w) * low(b.w), sum += high(a.w) * high(b.w);
}
