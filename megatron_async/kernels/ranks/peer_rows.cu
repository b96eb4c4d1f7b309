// The sum of all ranks' partial sums for many rows, and the residual addition and RMSNorm behind it: total =
// sum over ranks of partial, rounded; with NORM hidden = total + bias + residual, rounded, and its norm.
// All ranks have the same bits: partial sums are added up in the order of ranks.
//
//   NORM       1: addition and norm too, with the bits of Triton's _add_norm_kernel (norm/add_norm.py): a
//              thread has the elements it has there, and squares are added up in its order
//   H          hidden size
//   OWN        rows of a CTA at most; row r is that of CTA r % CTAS
//   RANKS      of the group, on one host; their GPUs reach each other's memory
//   CAPACITY   elements that a rank can send to another in a launch
//   CTAS       of the grid, the same for all numbers of rows and on all ranks, all running at once
//   LAUNCHES   entries of `launches`, see peer_words.cuh. GEMMs send to these words too (skinny_gemm_many.cu)
//   THREADS    of a CTA, those of _add_norm_kernel
//
// For few rows latency counts (peer_sum.cu), for many the bytes. So what travels is the partial sums alone,
// without the number of the launch (bare_words.cuh).
//
// There is no barrier between ranks, and each thread waits for its own words alone. Words lie in two halves,
// which launches use in turns. A rank sends in launch n + 2 when its launch n + 1 is over, so it had words
// of each peer's launch n + 1, and these were sent when the peer's launch n was over: all that this one
// sent in it had been read and set to 0 by then. Launches of no rows do not count.

#define VECTORS (H / 8)                            // of a row, of 16 bytes
#define EACH ((VECTORS + THREADS - 1) / THREADS)  // of a thread in each row
#define WARPS (THREADS / 32)
#define OTHERS (RANKS - 1)

static_assert(H % 8 == 0 && THREADS % 32 == 0 && WARPS <= 32, "whole warps");
static_assert((WARPS & (WARPS - 1)) == 0, "a tree of warps");
static_assert(RANKS <= 8 && CAPACITY % 8 == 0, "room for all words");

// Each warp's squares, of one row and of the next.
extern "C" __device__ const int shared_bytes = 2 * WARPS * sizeof(float);
extern __shared__ __align__(16) char shared[];

#include "bare_words.cuh"
#include "peer_words.cuh"

__device__ __forceinline__ Vec as_sent(Vec v) {
  return Vec{as_sent(v.x), as_sent(v.y), as_sent(v.z), as_sent(v.w)};
}
__device__ __forceinline__ bool has_arrived(Vec v) {
  return (v.x != 0) & (v.y != 0) & (v.z != 0) & (v.w != 0);
}
__device__ __forceinline__ void add(float (&sum)[8], Vec v) {
  sum[0] += low(v.x), sum[1] += high(v.x), sum[2] += low(v.y), sum[3] += high(v.y);
  sum[4] += low(v.z), sum[5] += high(v.z), sum[6] += low(v.w), sum[7] += high(v.w);
}
__device__ __forceinline__ Vec rounded(const float (&v)[8]) {
  return Vec{pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
}
__device__ __forceinline__ void widen(float (&v)[8], Vec from) {
  v[0] = low(from.x), v[1] = high(from.x), v[2] = low(from.y), v[3] = high(from.y);
  v[4] = low(from.z), v[5] = high(from.z), v[6] = low(from.w), v[7] = high(from.w);
}

__device__ __forceinline__ int vector_of(int e) { return e * THREADS + (int)threadIdx.x; }
__device__ __forceinline__ bool is_inside(int e) { return VECTORS % THREADS == 0 || vector_of(e) < VECTORS; }

// Where a thread's vector of a row lies that `sender` sends.
__device__ __forceinline__ u32* words_of(u64* memory, u32 half, int sender, int row, int e) {
  const size_t vector = (size_t)row * VECTORS + vector_of(e);
  return (u32*)memory + (size_t)(half * RANKS + sender) * (CAPACITY / 2) + vector * 4;
}

// The place of the i-th of all other ranks.
__device__ __forceinline__ int other(int i, int rank) { return i < rank ? i : i + 1; }

// What all others have sent of a row, in whose place there are zeros then.
__device__ __forceinline__ void receive(Vec (&got)[EACH][OTHERS], u64* received, u32 half, int rank, int row) {
  bool missing = true;
  while (missing) {  // all at once: each is a trip to L2
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int i = 0; i < OTHERS; i++)
        if (is_inside(e)) got[e][i] = poll_peer(words_of(received, half, other(i, rank), row, e));
    missing = false;
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int i = 0; i < OTHERS; i++)
        if (is_inside(e)) missing |= !has_arrived(got[e][i]);
    if (missing) wait_a_little();
  }
#pragma unroll
  for (int e = 0; e < EACH; e++)
#pragma unroll
    for (int i = 0; i < OTHERS; i++)
      if (is_inside(e)) *(Vec*)words_of(received, half, other(i, rank), row, e) = Vec{0, 0, 0, 0};
}

// The sum of squares of a row, in the order of _add_norm_kernel. `turn` is another one in the next row.
__device__ __forceinline__ float sum_of_squares(const float (&v)[EACH][8], int turn) {
  float square = __fmaf_rn(v[0][0], v[0][0], __fmul_rn(v[0][1], v[0][1]));
#pragma unroll
  for (int i = 2; i < EACH * 8; i++) square = __fmaf_rn(v[i / 8][i % 8], v[i / 8][i % 8], square);
#pragma unroll
  for (int d = 16; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
  if (WARPS == 1) return square;
  float* of_warps = (float*)shared + turn * WARPS;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = square;
  __syncthreads();
  square = of_warps[threadIdx.x % WARPS];
#pragma unroll
  for (int d = WARPS / 2; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
  return square;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    peer_rows(const u16* partial, u64* received, int rank, int rows, u32* launches, const u16* bias,
              const u16* residual, const u16* weight, float offset, float columns, float eps, u16* total,
              u16* normed, PEERS) {
  u64* const to[8] = ALL_PEERS;
  auto row_of = [](int k) { return k * CTAS + (int)blockIdx.x; };
  auto element_of = [&](int k, int e) { return ((size_t)row_of(k) * VECTORS + vector_of(e)) * 8; };
  if (NORM && row_of(0) < rows) {
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (is_inside(e)) touch(weight + vector_of(e) * 8);
  }
  wait_for_predecessor();
  release_successor();

  const u32 launch = next_launch(launches + blockIdx.x), half = launch & 1;
  Vec own[OWN][EACH], before[OWN][EACH];
#pragma unroll
  for (int k = 0; k < OWN; k++)
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (row_of(k) < rows && is_inside(e)) own[k][e] = load_l2_vec(partial + element_of(k, e));
#pragma unroll
  for (int k = 0; k < OWN; k++)
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int i = 0; i < OTHERS; i++)
        if (row_of(k) < rows && is_inside(e))
          publish_to_peer(words_of(i < rank ? to[i] : to[i + 1], half, rank, row_of(k), e), as_sent(own[k][e]));
#pragma unroll
  for (int k = 0; k < OWN; k++)
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (NORM && row_of(k) < rows && is_inside(e)) before[k][e] = load_l2_vec(residual + element_of(k, e));
  Vec weights[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (NORM && row_of(0) < rows && is_inside(e)) weights[e] = *(const Vec*)(weight + vector_of(e) * 8);

#pragma unroll
  for (int k = 0; k < OWN; k++) {
    if (row_of(k) >= rows) break;  // the whole CTA
    Vec got[EACH][OTHERS];
    receive(got, received, half, rank, row_of(k));
    float v[EACH][8] = {};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (!is_inside(e)) continue;
#pragma unroll
      for (int from = 0; from < RANKS; from++) {
        const Vec one_before = got[e][from ? from - 1 : 0], one = got[e][from < OTHERS ? from : 0];
        add(v[e], from == rank ? own[k][e] : from > rank ? one_before : one);
      }
      Vec out = rounded(v[e]);
      if (NORM) {
        widen(v[e], out);
        if (bias) add(v[e], *(const Vec*)(bias + vector_of(e) * 8));
        add(v[e], before[k][e]);
        out = rounded(v[e]);
        widen(v[e], out);  // the norm sees what the next layer sees
      }
      *(Vec*)(total + element_of(k, e)) = out;
    }
    if (!NORM) continue;
    // Columns are H: of a constant the compiler would know another inverse than the GPU.
    const float mean = quotient(sum_of_squares(v, k & 1), columns);
    const float scale = quotient(1.f, square_root(mean + eps));
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (!is_inside(e)) continue;
      float w[8];
      widen(w, weights[e]);
#pragma unroll
      for (int i = 0; i < 8; i++) v[e][i] = __fmul_rn(__fmul_rn(v[e][i], scale), w[i] + offset);
      *(Vec*)(normed + element_of(k, e)) = rounded(v[e]);
    }
  }
  __syncthreads();  // all have read it
  if (rows) count_launch(launches, launch);
}
