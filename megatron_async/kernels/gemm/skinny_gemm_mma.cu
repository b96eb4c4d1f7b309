// A skinny GEMM (skinny_gemm.cuh) by mma m16n8k16, with operands that the threads themselves copy into
// shared memory (cp.async).
//
//   x    M <= XR rows, in MT groups of eight
//   A CTA has WR x WK warps: WR next to each other in N, with RT 16-row tiles of W each, and WK in K.
//   x lies in shared memory as a whole (STREAM_X 0: normed, K / SPLIT_K columns), or passes through
//   X_BUFFERS buffers of X_STAGES stages (STREAM_X 1: WK = 1, RMSNorm or none), which are the only CTA
//   barriers of the main loop
//
// W is the B operand, 8 of its rows at a time, and x the A operand. Which k an operand register holds is
// free as long as A and B agree, so a lane loads 16 bytes of a row of W, eight k of it, and these are its
// own operands for two instructions. Each warp has a ring in shared memory for its rows of W alone, of ST
// stages of 64 columns, so weights need no barrier of the CTA. A copy brings whole lines: 128 bytes of
// four rows.
//
// Of W8 a stage has 128 columns, as many bytes of W. A lane's 16 bytes are 16 k, for four instructions
// (skinny_gemm_mma_fp8.cuh), and so it loads 32 bytes of x. Behind a stage's weights lie its scales, if
// they are not of whole rows: SCALE_BYTES of each row.

#if W8
#define W_BYTES 1                       // of a weight
#define X_LINE 256                      // bytes of a row of x in a stage
#define X_LINE_VECTORS 16               // of 16 bytes
#define X_EIGHT 128                     // and of eight rows
#define X_PAD 16
#define X_SWAP(row) (row & 1)
#define SCALE_BYTES (SCALES_ROWS ? 0 : 4 * STAGE_K / SCALE_COLUMNS)
#define SCALES_OF_ROW (SCALE_BYTES == 16 ? 4 : 2)  // registers, of a stage
#define SCALE_COPIES ((16 * RT + 31) / 32)
#define STAGE_BYTES (WEIGHT_BYTES + (16 * RT * SCALE_BYTES + 127) / 128 * 128)
#else
#define SCALE_BYTES 0
#define W_BYTES 2
#define X_LINE 128
#define X_LINE_VECTORS 8
#define X_EIGHT 64
#define X_PAD 64
#define X_SWAP(row) ((row & 1) << 2)
#define STAGE_BYTES WEIGHT_BYTES
#endif
#define WARPS (WR * WK)
#define TILES (RT * WR)
#define WARP_TILES RT
#define INTERLEAVED 0
#define LATE_RESIDUAL WORKSPACE
#define RING_BYTES (ST * STAGE_BYTES)
#define X_STAGES 2                      // in a buffer of x
#define X_BUFFERS ((ST + 1) / 2 + 1)
#define X_ROW (STREAM_X ? X_LINE : SLICE * 2 + X_PAD)
#define X_STAGE (MT * 8 * X_LINE)
#define X_BYTES (STREAM_X ? X_BUFFERS * X_STAGES * X_STAGE : XR * X_ROW)
#define X_VECTORS ((XR * SLICE / 8 + THREADS - 1) / THREADS)  // of 16 bytes for each thread
#define X_BATCH (X_VECTORS < 12 ? X_VECTORS : 12)
#define X_COPIES ((X_STAGES * MT * X_EIGHT + THREADS - 1) / THREADS)  // of a thread for each buffer
#define X_AT (WARPS * RING_BYTES)
#define MAINLOOP_BYTES (X_AT + X_BYTES)

extern __shared__ __align__(128) char shared[];

#include "skinny_gemm.cuh"
#if W8
#include "e4m3.cuh"
#endif

static_assert(!STREAM_X || (WK == 1 && NORM != 2), "streaming x");
static_assert(XR == 8 * MT || MT == 1, "rows of x");
static_assert((X_BUFFERS - 1) * X_STAGES >= ST, "x must not be later than the weights");
static_assert(!STREAM_X || !PERSISTENT || K_STAGES % X_STAGES == 0, "streaming x in whole buffers");
static_assert(RT * MT * 512 <= RING_BYTES || WK == 1 || CLUSTER > 1, "partial sums lie in the ring");

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    skinny_gemm_mma(const u16* x, const char* w, const u16* bias, const u16* norm_weight,
                    const u16* norm_bias, const float2* stats_in, int stats_tiles, float eps,
                    const u16* residual, u16* out, const u16* next_weight, u16* scaled,
                    float2* stats_out, int M, int out_row, float4* workspace, u32* arrivals SCALING SENDING) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wr = warp % WR, wk = warp / WR;
  const int rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0;
  const int cta_count = gridDim.x / SPLIT_K;
  int tile = blockIdx.x / SPLIT_K;
  const int row_blocks = (N + 16 * TILES - 1) / (16 * TILES);
  const int my_tiles = PERSISTENT ? (row_blocks - tile + cta_count - 1) / cta_count : 1;
  const int first_stage = K_STAGES * (rank * WK + wk) / (SPLIT_K * WK);
  const int count = K_STAGES * (rank * WK + wk + 1) / (SPLIT_K * WK) - first_stage;
  const int slice_stage = K_STAGES * rank / SPLIT_K;
  const int total = count * my_tiles;
  const u32 base = shared_address(shared);
  const u32 ring = base + warp * RING_BYTES;

#include "skinny_gemm_begin.cuh"

  // --- weights, as far as the ring holds them, before anything is known of x ------------------
  // Rows of 128 bytes in a stage, of W and of x: of odd rows the halves change places, so that the
  // lanes of a load hit different banks. A copy's lane: row lane / 8, 16 bytes number lane % 8.
  const u32 ring_end = ring + RING_BYTES;
  const u32 copied = lane / 8 * 128 + ((lane % 8 ^ (lane / 8 & 1) << 2) * 16);
  // Of each tile, for its upper and lower half, the first of two copies' row of this lane; the second
  // is four rows on, which must be rows of W too.
  constexpr bool whole = N % 8 == 0;
  const char* ahead[RT][2][whole ? 1 : 2];
#if SCALE_BYTES
  const char* ahead_scale[SCALE_COPIES];  // of rows lane, lane + 32, ... of the warp's
#endif
  auto start_tile = [&](int tile) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < (whole ? 1 : 2); j++) {
          int first = (tile * WR + wr) * RT + r, row = lane / 8 + j * 4;
          int n = GATED ? first * 8 + half * (N / 2) : first * 16 + half * 8;
          n = whole ? min(n, N - 8) + row : min(n + row, N - 1);
          ahead[r][half][j] = w + (size_t)n * (K * W_BYTES) + first_stage * 128 + lane % 8 * 16;
        }
#if SCALE_BYTES
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; i++) {
      const int row = (lane + i * 32) % (16 * RT), first = (tile * WR + wr) * RT + row / 16;
      const int n = GATED ? first * 8 + row / 8 % 2 * (N / 2) + row % 8 : first * 16 + row % 16;
      ahead_scale[i] = (const char*)(weight_scale + (size_t)min(n, N - 1) * (K / SCALE_COLUMNS)) +
                       first_stage * SCALE_BYTES;
    }
#endif
  };
  start_tile(tile);
  int ahead_tile = tile, ahead_k = 0, issued = 0;
  u32 ahead_slot = ring + copied;
  auto load_weights = [&]() {
#if LAST_K
    const bool is_last = first_stage + (PERSISTENT ? ahead_k : issued) == K_STAGES - 1;
    const bool inside = !is_last || lane % 8 < LAST_K * W_BYTES / 16;
#define COPY_WEIGHTS(into, from) copy16_or_zero(into, from, inside)
#else
#define COPY_WEIGHTS copy16
#endif
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 2; j++)
          COPY_WEIGHTS(ahead_slot + (r * 2 + half) * 1024 + j * 512,
                       whole ? ahead[r][half][0] + j * 4 * K * W_BYTES : ahead[r][half][j * !whole]);
#pragma unroll
        for (int j = 0; j < (whole ? 1 : 2); j++) ahead[r][half][j] += 128;
      }
#if SCALE_BYTES
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; i++) {
      const int row = lane + i * 32;
      if (row < 16 * RT)
        copy_few<SCALE_BYTES>(ahead_slot - copied + WEIGHT_BYTES + row * SCALE_BYTES, ahead_scale[i]);
      ahead_scale[i] += SCALE_BYTES;
    }
#endif
    ahead_slot += STAGE_BYTES;
    if (ahead_slot >= ring_end) ahead_slot -= RING_BYTES;
    issued++;
    if (PERSISTENT && ++ahead_k == count) {
      ahead_k = 0;
      ahead_tile += cta_count;
      start_tile(ahead_tile);
    }
  };

  // The 16 bytes of x that this thread copies for each buffer: where from, where to.
  int x_stage = 0;
  u32 x_buffer = base + X_AT;
  u32 x_from[X_COPIES], x_to[X_COPIES];
#pragma unroll
  for (int p = 0; p < X_COPIES && STREAM_X; p++) {
    const u32 i = threadIdx.x + p * THREADS, row = i / X_LINE_VECTORS % (MT * 8), c = i % X_LINE_VECTORS;
    x_from[p] = min(row, M - 1u) * (K * 2u) + (slice_stage + i / (MT * X_EIGHT)) * X_LINE + c * 16;
    x_to[p] = i / (MT * X_EIGHT) * X_STAGE + row * X_LINE + ((c ^ X_SWAP(row)) * 16);
  }
  auto load_x = [&]() {
#pragma unroll
    for (int p = 0; p < X_COPIES; p++) {
      const u32 i = threadIdx.x + p * THREADS;
      if (i < X_STAGES * MT * X_EIGHT && x_stage + (int)(i / (MT * X_EIGHT)) < count) {
#if LAST_K
        const int stage = slice_stage + x_stage + i / (MT * X_EIGHT);
        copy16_or_zero(x_buffer + x_to[p], (const char*)x + x_from[p] + x_stage * X_LINE,
                       stage < K_STAGES - 1 || i % X_LINE_VECTORS < LAST_K / 8);
#else
        copy16(x_buffer + x_to[p], (const char*)x + x_from[p] + x_stage * X_LINE);
#endif
      }
    }
    x_buffer = x_buffer == base + X_AT + (X_BUFFERS - 1) * X_STAGES * X_STAGE
                   ? base + X_AT
                   : x_buffer + X_STAGES * X_STAGE;
    x_stage += X_STAGES;
    if (PERSISTENT && x_stage >= count) x_stage = 0;
  };
  for (int s = 0; s < ST; s++) {
    if (issued < total) load_weights();
    commit_copies();
  }
#include "skinny_gemm_prefetch.cuh"
  if (NORM == 2) {
    for (int i = threadIdx.x; i < SLICE / 64 && (!LAST_K || slice_stage * STAGE_K + i * 64 < K);
         i += THREADS) {
      touch(norm_weight + slice_stage * STAGE_K + i * 64);
      touch(norm_bias + slice_stage * STAGE_K + i * 64);
    }
  }

  wait_for_predecessor();
#if !SENDS
  release_successor();
#endif
#if SENDS || SUMS
#include "skinny_gemm_send.cuh"
#endif

  // --- x ---------------------------------------------------------------------------------------
#if STREAM_X
  for (int s = 0; s < X_BUFFERS - 1; s++) {
    load_x();
    commit_copies();
  }
#endif
#include "skinny_gemm_input.cuh"
  if (!LATE_RESIDUAL) load_residual();
#if !STREAM_X
  const int slice_vectors = (K_STAGES * (rank + 1) / SPLIT_K - slice_stage) * X_LINE_VECTORS,
            vectors = M * slice_vectors;
#pragma unroll 1
  for (int first = threadIdx.x; first == threadIdx.x || first < vectors;
       first += X_BATCH * THREADS) {
    Vec v[X_BATCH];
#pragma unroll
    for (int j = 0; j < X_BATCH; j++) {
      int i = first + j * THREADS, k = slice_stage * STAGE_K + i % slice_vectors * 8;
#if LAST_K
      v[j] = Vec{0, 0, 0, 0};
      if (k >= K) continue;
#endif
      if (i < vectors) v[j] = load_l2_vec(x + (size_t)(i / slice_vectors) * K + k);
    }
    if (NORM == 2 && first == threadIdx.x) {
      load_statistics();
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < X_BATCH; j++) {
      int i = first + j * THREADS, row = i / slice_vectors, c = i % slice_vectors;
      int k = slice_stage * STAGE_K + c * 8;
      if (i >= vectors) break;
      if (NORM == 2 && (!LAST_K || k < K)) {
        Vec a = *(const Vec*)(norm_weight + k), b = *(const Vec*)(norm_bias + k);
        float2 s = scale[row];
        auto norm2 = [&](u32 v, u32 a, u32 b) {
          return pack((low(v) - s.x) * s.y * low(a) + low(b),
                      (high(v) - s.x) * s.y * high(a) + high(b));
        };
        v[j] = Vec{norm2(v[j].x, a.x, b.x), norm2(v[j].y, a.y, b.y), norm2(v[j].z, a.z, b.z),
                   norm2(v[j].w, a.w, b.w)};
      }
      store_shared(base + X_AT + row * X_ROW + c * 16, v[j]);
    }
  }
#endif
  if (NORM == 1) load_statistics();
  if (!STREAM_X || NORM) __syncthreads();

  // --- the main loop ---------------------------------------------------------------------------
  float sums[RT][2][(MT + 1) / 2][4];  // tile, its half, 16 rows of x
  auto clear = [&]() {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int mt = 0; mt < (MT + 1) / 2; mt++)
#pragma unroll
          for (int j = 0; j < 4; j++) sums[r][half][mt][j] = 0.f;
  };
  auto take = [&](int r, int mt, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = sums[r][j / 2][mt / 2][mt % 2 * 2 + j % 2];
  };
  clear();

#include "skinny_gemm_finish.cuh"

  int k_done = 0;
  const u32 own_w = ring + g * 128 + (t ^ (g & 1) << 2) * 16;
  u32 slot = own_w;
  // This lane's 16 bytes of row g of x for the first half of a stage; the second is 64 bytes away. Of W8
  // they are the first 16 of 32, and half a stage is 128 bytes.
#if W8
  const u32 own_scale = ring + WEIGHT_BYTES - own_w + t * 2 * SCALE_BYTES;  // from `slot` on
  const u32 own_x = base + X_AT + (STREAM_X ? g : min(g, XR - 1)) * X_ROW + t * 32 +
                    (STREAM_X ? X_SWAP(g) * 16 : (first_stage - slice_stage) * X_LINE);
#else
  const u32 own_x = base + X_AT + (STREAM_X ? g : min(g, XR - 1)) * X_ROW +
                    (STREAM_X ? (t ^ ((g & 1) << 2)) * 16 : (first_stage - slice_stage) * 128 + t * 16);
#endif
  u32 x_at = own_x;
  if (STREAM_X) await_copies<X_BUFFERS - 2>();
  for (int i = 0; i < total; i++) {
    if (STREAM_X && k_done % X_STAGES == 0) {
      // WAR: the buffer that is filled next was read last before this barrier.
      if (i < (X_BUFFERS - 1) * X_STAGES)
        await_copies<(ST < X_BUFFERS ? ST : X_BUFFERS) - 1>();
      else
        await_copies<ST - 1>();
      __syncthreads();
      load_x();
    } else {
      await_copies<ST - 1>();
      __syncwarp();  // RAW: what the other lanes copied
    }
#if W8
#include "skinny_gemm_mma_fp8.cuh"
#else
    Vec b[2][RT][2], a[2][MT];
#pragma unroll
    for (int u = 0; u < 2; u++) {
#pragma unroll
      for (int mt = 0; mt < MT; mt++)
        a[u][mt] = load_shared((STREAM_X ? x_at ^ (u * 64) : x_at + u * 64) + mt * 8 * X_ROW);
#pragma unroll
      for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[u][r][half] = load_shared((slot ^ u * 64) + (r * 2 + half) * 1024);
    }
    __syncwarp();  // WAR: all lanes have read what is filled again
    if (issued < total) load_weights();
    commit_copies();
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int part = 0; part < 2; part++)
#pragma unroll
        for (int mt = 0; mt < MT; mt += 2)
#pragma unroll
          for (int r = 0; r < RT; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const Vec &xs = a[u][mt], &ws = b[u][r][half];
              const u32 b0 = part ? ws.z : ws.x, b1 = part ? ws.w : ws.y;
              const u32 a0 = part ? xs.z : xs.x, a2 = part ? xs.w : xs.y;
              u32 a1 = 0, a3 = 0;
              if (MT > 1) {
                const Vec& more = a[u][mt + (MT > 1)];
                a1 = part ? more.z : more.x, a3 = part ? more.w : more.y;
              }
              mma(sums[r][half][mt / 2], a0, a1, a2, a3, b0, b1);
            }
#endif
    slot = slot == own_w + (ST - 1) * STAGE_BYTES ? own_w : slot + STAGE_BYTES;
    k_done++;
    if (!STREAM_X) {
      x_at += X_LINE;
    } else {
      x_at += X_STAGE;
      if (x_at == own_x + X_BUFFERS * X_STAGES * X_STAGE) x_at = own_x;
      // A last buffer that is not full ends the loop.
    }
    if (k_done == count && PERSISTENT) {
#include "skinny_gemm_finish_tile.cuh"
      clear();
      k_done = 0;
#if !STREAM_X
      x_at = own_x;
#endif
      tile += cta_count;
    }
  }
  if (PERSISTENT) return;

  if (SENDS) release_successor();  // who adds up would wait for words until here
#include "skinny_gemm_reduce.cuh"
}
