// The partial sums of all ranks into the residual stream, in one kernel: hidden += sum over ranks of
// partial + bias, with the partial statistics that the next norm reads. All ranks have the same bits:
// partial sums are added up in the order of ranks.
//
//   STEPS      1: each rank sends its partial sums to all others, and adds up what it got
//              2: each rank adds up a share of the elements, which the others send to it alone, and sends
//              the new values to all others: less is sent, and later
//   SENT       1: the GEMM in front has sent all ranks' partial sums, this one's too (skinny_gemm.cuh with
//              SENDS), and `partial` is not read. It may still run: then each word is waited for
//   H          hidden size; MOST_ROWS of the step
//   RANKS      of the group, on one host; their GPUs reach each other's memory
//   CAPACITY, LAUNCHES   see peer_words.cuh
//   CTAS       of the grid, the same for all numbers of rows and on all ranks, all running at once
//   TILE       elements of a partial statistic, 64, 128 or 256
//   STATS      1 for RMSNorm, and the stream times the norm's weight goes to `scaled`, 2 for LayerNorm,
//              0 for none
//
// There is no barrier, within a GPU or between them. Two elements travel in a word together with the
// number of the launch, and who needs them reads the word until the number is right (as NCCL's LL
// protocol). Launches are counted on the device (peer_words.cuh), so graphs may replay in any order on one
// stream, the same on all ranks.
//
// Words lie in two halves, which launches use in turns. A rank sends in launch n + 2 when its launch
// n + 1 is over, so each peer had sent words in launch n + 1 (to this rank, or to the one that added up
// what this rank got), when the peer's launch n was over: nobody reads the half any more. So it is with
// all that sends to these words (SENDS and SUMS elsewhere), in any order. A launch of no rows gets no word:
// what sends next must know by other means that all ranks are done.

#define VECTORS (H / 8)  // of a row, of 16 bytes
#define OWN ((MOST_ROWS * VECTORS + CTAS * THREADS - 1) / (CTAS * THREADS))  // of a thread
#define TILES (H / TILE)
#define LANES (TILE / 8)           // that share a partial statistic

static_assert(H % TILE == 0 && LANES <= 32 && 32 % LANES == 0, "tiles of a warp");
static_assert(THREADS % 32 == 0 && CAPACITY % 256 == 0, "whole warps");
static_assert(RANKS <= 8 && (MOST_ROWS * H + 255) / 256 * 256 <= CAPACITY, "room for all words");

static_assert(!SENT || (STEPS == 1 && (MOST_ROWS + 7) / 8 * 8 * H <= CAPACITY), "room for eight rows");

#include "peer_words.cuh"

static_assert(CTAS <= LAUNCHES, "an entry for each CTA");

extern "C" __device__ const int shared_bytes = 0;

// Where a warp's lanes have the first words of their vector; the others are 64 words behind, so that a
// warp's bytes lie next to each other.
__device__ __forceinline__ size_t word_of(u32 half, int sender, int vector) {
  return (size_t)(half * RANKS + sender) * SENT_WORDS + vector / 32 * 128 + vector % 32 * 2;
}
__device__ __forceinline__ void send_words(u64* at, Vec v, u32 launch) {
  publish_to_peer(at, peer_word(v.x, launch), peer_word(v.y, launch));
  publish_to_peer(at + 64, peer_word(v.z, launch), peer_word(v.w, launch));
}
__device__ __forceinline__ void read_words(const u64* at, u64 (&v)[4]) {
  poll_peer(at, v[0], v[1]);
  poll_peer(at + 64, v[2], v[3]);
}
__device__ __forceinline__ bool has_arrived(const u64 (&v)[4], u32 launch) {
  return is_of(v[0], launch) & is_of(v[1], launch) & is_of(v[2], launch) & is_of(v[3], launch);
}
__device__ __forceinline__ void add(float (&sum)[8], u32 a, u32 b, u32 c, u32 d) {
  sum[0] += low(a), sum[1] += high(a), sum[2] += low(b), sum[3] += high(b);
  sum[4] += low(c), sum[5] += high(c), sum[6] += low(d), sum[7] += high(d);
}
__device__ __forceinline__ void add(float (&sum)[8], Vec v) { add(sum, v.x, v.y, v.z, v.w); }

// The rank that adds a vector up in two steps, the same for a warp. To a rank others send vectors that it
// adds up, or that they do: no word has two meanings.
__device__ __forceinline__ int owner_of(int vector) { return vector / 32 % RANKS; }

// What the owner of a vector has made of it.
__device__ __forceinline__ Vec await_words(const u64* at, u32 launch) {
  u64 v[4];
  read_words(at, v);
  while (!has_arrived(v, launch)) wait_a_little(), read_words(at, v);
  return Vec{(u32)v[0], (u32)v[1], (u32)v[2], (u32)v[3]};
}

// The sum of a vector over all ranks.
__device__ __forceinline__ void sum_up(float (&sum)[8], Vec own, const u64* received, u32 half, int rank,
                                       int vector, u32 launch) {
  u64 got[RANKS][4];
  bool missing = true;
  while (missing) {  // all at once: each is a trip to L2
#pragma unroll
    for (int from = 0; from < RANKS; from++)
      if (from != rank) read_words(received + word_of(half, from, vector), got[from]);
    missing = false;
#pragma unroll
    for (int from = 0; from < RANKS; from++)
      if (from != rank) missing |= !has_arrived(got[from], launch);
    if (missing) wait_a_little();
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.f;
#pragma unroll
  for (int from = 0; from < RANKS; from++)
    if (from == rank)
      add(sum, own);
    else
      add(sum, (u32)got[from][0], (u32)got[from][1], (u32)got[from][2], (u32)got[from][3]);
}

// The same of what GEMMs have sent: the words of eight rows and eight columns lie next to each other.
__device__ __forceinline__ void sum_up_sent(float (&sum)[8], const u64* received, u32 half, int vector,
                                            u32 launch) {
  const int row = vector / VECTORS;
  const size_t at = ((size_t)(row / 8) * VECTORS + vector % VECTORS) * 32 + row % 8 * 4;
  u64 got[RANKS][4];
  bool missing = true;
  while (missing) {
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      const u64* words = received + (size_t)(half * RANKS + from) * SENT_WORDS + at;
      poll_peer(words, got[from][0], got[from][1]);
      poll_peer(words + 2, got[from][2], got[from][3]);
    }
    missing = false;
#pragma unroll
    for (int from = 0; from < RANKS; from++) missing |= !has_arrived(got[from], launch);
    if (missing) wait_a_little();
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.f;
#pragma unroll
  for (int from = 0; from < RANKS; from++)
    add(sum, (u32)got[from][0], (u32)got[from][1], (u32)got[from][2], (u32)got[from][3]);
}

__device__ __forceinline__ float sum_of_tile(float v) {
#pragma unroll
  for (int d = LANES / 2; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    peer_sum(const u16* partial, u64* received, int rank, int rows, u32* launches, const u16* bias,
             u16* hidden, const u16* next_weight, u16* scaled, float2* stats_out, PEERS) {
  u64* const to[8] = ALL_PEERS;
  const int all = rows * VECTORS;
  auto vector_of = [](int k) { return (k * CTAS + (int)blockIdx.x) * THREADS + (int)threadIdx.x; };
  if (vector_of(0) < all) {
    if (bias) touch(bias + vector_of(0) % VECTORS * 8);
    if (STATS == 1) touch(next_weight + vector_of(0) % VECTORS * 8);
  }
  // The GEMM has let this kernel go when what came before it was over: but for its words all is there.
  if (!SENT) wait_for_predecessor();
  release_successor();

  const u32 launch = next_launch(launches + blockIdx.x);
  Vec own[OWN], residual[OWN];
#pragma unroll
  for (int k = 0; k < OWN; k++)
    if (!SENT && vector_of(k) < all) own[k] = load_l2_vec(partial + (size_t)vector_of(k) * 8);
#pragma unroll
  for (int k = 0; k < OWN; k++)
    if (!SENT && vector_of(k) < all) {
#pragma unroll
      for (int peer = 0; peer < RANKS; peer++)
        if (peer != rank && (STEPS == 1 || peer == owner_of(vector_of(k))))
          send_words(to[peer] + word_of(launch & 1, rank, vector_of(k)), own[k], launch);
    }
#pragma unroll
  for (int k = 0; k < OWN; k++)
    if (vector_of(k) < all) residual[k] = load_l2_vec(hidden + (size_t)vector_of(k) * 8);

#pragma unroll
  for (int k = 0; k < OWN; k++) {
    const int vector = vector_of(k), column = vector % VECTORS * 8;
    if (vector - (int)(threadIdx.x % 32) >= all) break;  // the whole warp
    const bool inside = vector < all;
    float v[8] = {};
    if (inside) {
      Vec out;
      if (STEPS == 1 || owner_of(vector) == rank) {
        if (SENT)
          sum_up_sent(v, received, launch & 1, vector, launch);
        else
          sum_up(v, own[k], received, launch & 1, rank, vector, launch);
        if (bias) add(v, *(const Vec*)(bias + column));
        add(v, residual[k]);
        out = Vec{pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++)
          if (STEPS == 2 && peer != rank)
            send_words(to[peer] + word_of(launch & 1, rank, vector), out, launch);
      } else {
        out = await_words(received + word_of(launch & 1, owner_of(vector), vector), launch);
      }
      *(Vec*)(hidden + (size_t)vector * 8) = out;
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = 0.f;
      add(v, out);  // the statistics see what is in the stream
    }
    if (STATS == 0) continue;
    if (STATS == 1 && inside) {
      float w[8] = {};
      add(w, *(const Vec*)(next_weight + column));
      *(Vec*)(scaled + (size_t)vector * 8) = Vec{pack(v[0] * w[0], v[1] * w[1]), pack(v[2] * w[2], v[3] * w[3]),
                                                 pack(v[4] * w[4], v[5] * w[5]), pack(v[6] * w[6], v[7] * w[7])};
    }
    float mean = 0.f, square = 0.f;
    if (STATS == 2) {
#pragma unroll
      for (int i = 0; i < 8; i++) mean += v[i];
      mean = sum_of_tile(mean) / (float)TILE;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) square += (v[i] - mean) * (v[i] - mean);
    square = sum_of_tile(square);
    if (inside && threadIdx.x % LANES == 0) stats_out[vector / LANES] = make_float2(mean, square);
  }
  __syncthreads();  // all have read it
  count_launch(launches, launch);
}
