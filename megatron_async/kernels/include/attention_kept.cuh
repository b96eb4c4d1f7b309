// Numbers of the cache in the attention kernel (attention.cu): bfloat16, or e4m3 with scales. Here is how
// they are loaded and multiplied, and how new ones and queries are written.
#if E4M3
typedef unsigned char u8;  // the bits of an e4m3
#define KEPT u8
#define SCALES , const float* scales
#define MULTIPLY mma_half
#define PACK pack_half
#define FACTOR factors[e][j]
#define FIRST_OF(g) (2 * (g))
#define SECOND 1
#define VALUE_FACTOR value_factor
#define IS_SOUND(v) ((v) == (v))  // an infinity is kept as 448

// A lane finds four numbers of a key in a word. Those are 2t and 2t + 1, then 2t + 8 and 2t + 9 of the
// product, so a query has its numbers in this order.
__device__ __forceinline__ void load_keys(u32 (&a)[4], u32 (&kept)[4], u32 tile, int row, int k,
                                          int other) {
  if (k % 2 == 0) load_matrices(kept, tile + place(row, min(k + other, CHUNKS - 1)));
  halves_of_e4m3(kept[k % 2 * 2], a[0], a[2]);
  halves_of_e4m3(kept[k % 2 * 2 + 1], a[1], a[3]);
}
__device__ __forceinline__ int place_in_query(int i) {
  return i / 16 * 16 + i / 2 % 2 * 8 + i / 4 % 4 * 2 + i % 2;
}
// And of values numbers 2g and 2g + 1 of two tokens, which stand for numbers g and g + 8 of the product.
__device__ __forceinline__ void load_values(u32 (&a)[4], u32 (&kept)[4], u32 tile, int row, int n,
                                            int other) {
  if (n % 2 == 0) load_transposed(kept, tile + place(row, min(n + other, CHUNKS - 1)));
  halves_of_e4m3(permute(kept[n % 2], 0x3120), a[0], a[1]);
  halves_of_e4m3(permute(kept[n % 2 + 2], 0x3120), a[2], a[3]);
}

// What scores of a query are multiplied with stands behind it: 0 where there is none.
__device__ __forceinline__ float& factor_of(int query) {
  return *(float*)(shared + Q_AT + query * Q_ROW + PADDED * 2);
}
// A query as float16, in which the largest number becomes 2^14 or more: others are off by 2^-39 of it at
// most. A lane has numbers i and i + D / 2 for i = lane, lane + 32, ...
__device__ __forceinline__ void store_query_half(int query, const float (&a)[STEPS],
                                                 const float (&b)[STEPS], float factor) {
  const int lane = threadIdx.x % 32;
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < STEPS; j++)
    if (lane + 32 * j < D / 2) largest = fmaxf(largest, fmaxf(fabsf(a[j]), fabsf(b[j])));
#pragma unroll
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  // Both powers of two are normal floats.
  const u32 exponent = max(__float_as_uint(largest) >> 23, 15u);
  const float by = __uint_as_float((268 - exponent) << 23);
  u16* q = (u16*)(shared + Q_AT + query * Q_ROW);
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    const int i = lane + 32 * j;
    if (i >= D / 2) continue;
    const u32 pair = pack_half(a[j] * by, b[j] * by);
    q[place_in_query(i)] = pair & 0xffff, q[place_in_query(i + D / 2)] = pair >> 16;
  }
  if (lane == 0) factor_of(query) = factor * __uint_as_float((exponent - 14) << 23);
}
__device__ __forceinline__ u8& kept_at(int at, int token, int i) {
  return *(u8*)(shared + at + place(token, i / 16) + i % 16);
}
#else
#define KEPT u16
#define SCALES
#define MULTIPLY mma
#define PACK pack
#define FACTOR scale_log2
#define FIRST_OF(g) (g)
#define SECOND 8
#define VALUE_FACTOR 1.f
#define IS_SOUND(v) is_finite(v)

__device__ __forceinline__ void load_keys(u32 (&a)[4], u32 (&)[4], u32 tile, int row, int k, int other) {
  load_matrices(a, tile + place(row, k * 2 + other));
}
__device__ __forceinline__ void load_values(u32 (&a)[4], u32 (&)[4], u32 tile, int row, int n, int other) {
  load_transposed(a, tile + place(row, n * 2 + other));
}
#endif
