// out = epilogue(norm(x) W^T) for few rows of x: the weights stream once from memory, and everything
// around the product is inside.
//
//   x        [M, K] bf16, M <= 8 * MT and M <= XR    W  [N, K] bf16, row major
//   OWN      fragments, of 16 rows of W and 8 of x, that a block of a cluster finishes, if it does any
//   LEAST    bytes of shared memory to take at least: more than half keeps two blocks of one product
//            from one multiprocessor while others have none
//   NORM     0 none, 1 RMSNorm, 2 LayerNorm of x over K, from the partial statistics of its producer;
//            of RMSNorm x is multiplied by the weight already
//   EPILOGUE 0 store, 1 add to the residual stream and emit its partial statistics,
//            2 SiLU(gate) * up, 3 GELU (tanh), 4 GELU (erf)
//   STATS    of EPILOGUE 1: 1 for RMSNorm, with the stream times the norm's weight beside the stream
//            itself, 2 for LayerNorm
//
// A block has WR x WK warps: WR warps beside each other in N with RT tiles of 16 rows of W each, WK
// in K; C blocks split K further. Partial sums are added in a fixed order: by the blocks of a cluster
// (MEMORY 0), of which each owns some fragments and is sent what the others have of them, or through
// memory by the last of the C blocks that comes to it (MEMORY 1), which needs no blocks beside each
// other.
//
// W is the B operand of m16n8k16, 8 of its rows at a time, and x the A operand. Which k an operand
// register holds is free as long as A and B agree, so a lane loads 16 bytes of a row of W, eight k of
// it, and these are its own operands for two products. Each warp has a ring in shared memory for its
// rows of W alone, a stage of 64 k at a time, so the weights need no barrier of the block. A copy
// brings whole lines: 128 bytes of four rows.
//
// With BOX 1 a block is four warps that multiply its RT tiles together, straight from shared memory, by
// wgmma m64nMk16 (rows beyond the last tile are what lies behind it, for nothing). A stage is two boxes
// of tensors, the weight's and that of x, each one bulk copy: the loop has neither copies by lanes nor
// barriers of the block.
//
// x lies in shared memory as a whole (STREAM 0: normed, K / C columns), or passes through XB
// buffers of XS stages (STREAM 1: WK = 1, RMSNorm or none), the only barriers of the loop. RMSNorm
// multiplies by 1 / rms at the end.

#define WARPS (BOX ? 4 : WR * WK)
#define WARP_TILES (BOX ? (RT + 3) / 4 : RT)  // of a warp
#define THREADS (32 * WARPS)
#define TILES (RT * WR)                 // tiles of 16 rows of W in a block
#define UNITS (K / 64)                  // stages of K in all
#define WEIGHT_BYTES (2048 * RT)
#define STAGE_BYTES (WEIGHT_BYTES + (BOX ? X_STAGE : 0))  // of one warp, or with BOX of all
#define RING_BYTES (ST * STAGE_BYTES)
#define XS 2                            // stages in a buffer of x
#define XB ((ST + 1) / 2 + 1)           // buffers of x
#define SLICE ((UNITS + C - 1) / C * 64)
#define X_ROW (STREAM ? 128 : SLICE * 2 + 64)
#define X_STAGE (MT * 8 * 128)
#define BEYOND ((WARP_TILES * 4 - RT) * 2048)  // what wgmma reads behind the last tile
#define BOX_REST (BEYOND > X_STAGE ? BEYOND - X_STAGE : 0)
#define X_BYTES (BOX ? BOX_REST : STREAM ? XB * XS * X_STAGE : XR * X_ROW)
#define X_VECTORS ((XR * SLICE / 8 + THREADS - 1) / THREADS)  // of 16 bytes for each thread
#define X_BATCH (X_VECTORS < 12 ? X_VECTORS : 12)
#define X_PIECES ((XS * MT * 64 + THREADS - 1) / THREADS)
#define FRAGMENTS (MT * TILES)
#define CLUSTER (MEMORY ? 1 : C)
#define OWNERS (FRAGMENTS / OWN)        // blocks of the cluster that finish some fragments
#define PER_WARP (WK * CLUSTER == 1 ? MT * WARP_TILES : (OWN + WARPS - 1) / WARPS)
#define STAT_ROWS ((MT * 8 + WARPS - 1) / WARPS)
#define STAT_TILES (OWN < TILES ? OWN : TILES)
#define SPLIT (WK * C > 1)
#define GATED (EPILOGUE == 2)
#define SCALES (EPILOGUE == 1 && STATS == 1)

#define X_AT ((BOX ? 1 : WARPS) * RING_BYTES)
#define ARRIVED_AT (X_AT + X_BYTES)     // barriers of the stages
#define SCALE_AT (ARRIVED_AT + (BOX ? ST * 8 : 0))
#define STATS_AT (SCALE_AT + MT * 8 * 8)
#define SENT_AT ((STATS_AT + (EPILOGUE == 1 ? OWN * 64 : 0) + 15) / 16 * 16)
#define SENT_BYTES (CLUSTER > 1 ? OWN * CLUSTER * WK * 512 : 0)  // partial sums of own fragments
#define ALL_SENT_AT (SENT_AT + SENT_BYTES)  // their barrier
#define SHARED_BYTES (ALL_SENT_AT + (CLUSTER > 1 ? 8 : 0))

static_assert(K % 64 == 0 && UNITS >= C * WK, "shape");
static_assert(FRAGMENTS % OWN == 0 && OWNERS <= CLUSTER, "every fragment has an owner");
static_assert(TILES % STAT_TILES == 0 && OWN % STAT_TILES == 0, "statistics");
static_assert(!STREAM || (WK == 1 && NORM != 2), "streaming x");
static_assert(!PERSISTENT || (!SPLIT && EPILOGUE != 1), "a persistent block keeps its ring busy");
static_assert(!MEMORY || WK == 1, "partial sums in memory are of whole blocks");
static_assert(XR == 8 * MT || MT == 1, "rows of x");
static_assert(!BOX || (STREAM && WR * WK == 1 && RT <= 16), "boxes");
static_assert(BOX || (XB - 1) * XS >= ST, "x must not be later than the weights");
static_assert(BOX || !STREAM || !PERSISTENT || UNITS % XS == 0, "streaming x in whole buffers");
static_assert(RT * MT * 512 <= RING_BYTES || WK == 1 || CLUSTER > 1, "partial sums lie in the ring");

extern "C" __device__ const int shared_bytes = SHARED_BYTES > LEAST ? SHARED_BYTES : LEAST;

extern __shared__ __align__(BOX ? 1024 : 128) char shared[];

__device__ __forceinline__ float activate(float v) {
#if EPILOGUE == 3
  float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + tanhf(inner));
#elif EPILOGUE == 4
  return 0.5f * v * (1.f + erff(v * 0.7071067811865476f));
#else
  return v;
#endif
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    linear(const u16* x, const char* w, const u16* bias, const u16* norm_weight,
           const u16* norm_bias, const float2* stats_in, int stats_tiles, float eps,
           const u16* residual, u16* out, const u16* next_weight, u16* scaled, float2* stats_out, int M,
           int out_row, float4* partials, u32* arrivals
#if BOX
           , const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map
#endif
           ) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wr = warp % WR, wk = BOX ? 0 : warp / WR;
  const int rank = C > 1 ? blockIdx.x % C : 0;
  const int block_count = gridDim.x / C;
  int tile = blockIdx.x / C;
  const int row_blocks = (N + 16 * TILES - 1) / (16 * TILES);
  const int my_tiles = PERSISTENT ? (row_blocks - tile + block_count - 1) / block_count : 1;
  const int first_unit = UNITS * (rank * WK + wk) / (C * WK);
  const int count = UNITS * (rank * WK + wk + 1) / (C * WK) - first_unit;
  const int slice_unit = UNITS * rank / C;
  const int total = count * my_tiles;
  const u32 base = shared_address(shared);
  const u32 ring = base + (BOX ? 0 : warp) * RING_BYTES;
  // A warp's tiles in the block; with BOX the last of some lies beyond it.
  auto own_tile = [&](int r) { return BOX ? r * 4 + warp : wr * RT + r; };
  auto is_mine = [&](int r) { return !BOX || own_tile(r) < RT; };
  float2* scale = (float2*)(shared + SCALE_AT);  // mean and 1 / deviation of each row of x

  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      init_barrier(base + ALL_SENT_AT);
      publish_barriers();
      if (rank < OWNERS) expect_bytes(base + ALL_SENT_AT, SENT_BYTES);
    }
    __syncwarp();
    arrive_in_cluster();  // peers may send
  }

  // --- weights, as far as the ring holds them, before anything is known of x ------------------
#if BOX
  const u32 arrived = base + ARRIVED_AT;
  const bool leads = threadIdx.x == 0;
  if (leads) {
    prefetch_map(w_map), prefetch_map(x_map);
    for (int s = 0; s < ST; s++) init_barrier(arrived + s * 8);
    publish_barriers();
  }
  int ahead_tile = tile, ahead_unit = 0, ahead_stage = 0, issued = 0;
  auto issue_x = [&](int unit, int stage) {
    copy_box(base + stage * STAGE_BYTES + WEIGHT_BYTES, x_map, (first_unit + unit) * 64, 0,
             arrived + stage * 8);
  };
  auto issue_weights = [&]() {
    if (leads) {
      const u32 into = base + ahead_stage * STAGE_BYTES, barrier = arrived + ahead_stage * 8;
      const int k = (first_unit + ahead_unit) * 64;
      expect_bytes(barrier, WEIGHT_BYTES + X_STAGE);
#if GATED
      copy_box(into, w_map, k, 0, 0, ahead_tile * TILES, barrier);  // eight rows of each half in turn
#else
      copy_box(into, w_map, k, ahead_tile * TILES * 16, barrier);
#endif
      if (issued >= ST) issue_x(ahead_unit, ahead_stage);
    }
    ahead_stage = ahead_stage == ST - 1 ? 0 : ahead_stage + 1;
    issued++;
    if (++ahead_unit == count) {
      ahead_unit = 0;
      ahead_tile += block_count;
    }
  };
#else
  // Rows of 128 bytes in a stage, of W and of x: of odd rows the halves change places, so that the
  // lanes of a load hit different banks. A copy's lane: row lane / 8, 16 bytes number lane % 8.
  const u32 ring_end = ring + RING_BYTES;
  const u32 copied = lane / 8 * 128 + ((lane % 8 ^ (lane / 8 & 1) << 2) * 16);
  // Of each tile, for its upper and lower half, the first of two copies' row of this lane; the second
  // is four rows on, which must be rows of W too.
  constexpr bool whole = N % 8 == 0;
  const char* ahead[RT][2][whole ? 1 : 2];
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
          ahead[r][half][j] = w + (size_t)n * (K * 2) + first_unit * 128 + lane % 8 * 16;
        }
  };
  start_tile(tile);
  int ahead_tile = tile, ahead_unit = 0, issued = 0;
  u32 ahead_slot = ring + copied;
  auto issue_weights = [&]() {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 2; j++)
          copy16(ahead_slot + (r * 2 + half) * 1024 + j * 512,
                 whole ? ahead[r][half][0] + j * 4 * K * 2 : ahead[r][half][j * !whole]);
#pragma unroll
        for (int j = 0; j < (whole ? 1 : 2); j++) ahead[r][half][j] += 128;
      }
    ahead_slot += STAGE_BYTES;
    if (ahead_slot >= ring_end) ahead_slot -= RING_BYTES;
    issued++;
    if (PERSISTENT && ++ahead_unit == count) {
      ahead_unit = 0;
      ahead_tile += block_count;
      start_tile(ahead_tile);
    }
  };

  // Pieces of 16 bytes of x that this thread copies for each buffer: where from, where to.
  int x_unit = 0;
  u32 x_buffer = base + X_AT;
  u32 x_from[X_PIECES], x_to[X_PIECES];
#pragma unroll
  for (int p = 0; p < X_PIECES && STREAM; p++) {
    const u32 i = threadIdx.x + p * THREADS, row = i / 8 % (MT * 8), c = i % 8;
    x_from[p] = min(row, M - 1u) * (K * 2u) + (slice_unit + i / (MT * 64)) * 128 + c * 16;
    x_to[p] = i / (MT * 64) * X_STAGE + row * 128 + ((c ^ ((row & 1) << 2)) * 16);
  }
  auto issue_x = [&]() {
#pragma unroll
    for (int p = 0; p < X_PIECES; p++) {
      const u32 i = threadIdx.x + p * THREADS;
      if (i < XS * MT * 64 && x_unit + (int)(i / (MT * 64)) < count)
        copy16(x_buffer + x_to[p], (const char*)x + x_from[p] + x_unit * 128);
    }
    x_buffer = x_buffer == base + X_AT + (XB - 1) * XS * X_STAGE ? base + X_AT : x_buffer + XS * X_STAGE;
    x_unit += XS;
    if (PERSISTENT && x_unit >= count) x_unit = 0;
  };
#endif
  for (int s = 0; s < ST; s++) {
    if (issued < total) issue_weights();
    if (!BOX) commit_copies();
  }
  if (BOX) __syncthreads();  // the barriers are there
  // What is read once a product would else come from memory while all wait for it.
  if (bias != nullptr && threadIdx.x < (GATED ? 2 : 1) * ((16 * TILES * 2 / (GATED ? 2 : 1) + 127) / 128)) {
    const int lines = (16 * TILES * 2 / (GATED ? 2 : 1) + 127) / 128;
    const int n = tile * (GATED ? 8 : 16) * TILES + threadIdx.x % lines * 64;
    touch(bias + (min(n, (GATED ? N / 2 : N) - 2) & ~1) + threadIdx.x / lines * (N / 2));
  }
  if (SCALES && threadIdx.x < (16 * TILES * 2 + 127) / 128)
    touch(next_weight + min(tile * 16 * TILES + threadIdx.x * 64, N - 2u));
  if (NORM == 2) {
    for (int i = threadIdx.x; i < SLICE / 64; i += THREADS) {
      touch(norm_weight + slice_unit * 64 + i * 64);
      touch(norm_bias + slice_unit * 64 + i * 64);
    }
  }

  wait_for_predecessor();
  release_successor();

  // --- x ---------------------------------------------------------------------------------------
#if BOX
  if (leads)
    for (int s = 0; s < ST && s < total; s++) issue_x(s % count, s);
#elif STREAM
  for (int s = 0; s < XB - 1; s++) {
    issue_x();
    commit_copies();
  }
#endif
  u32 kept[PER_WARP][2];
  auto keep_residual = [&]() {
#pragma unroll
    for (int i = 0; i < PER_WARP && EPILOGUE == 1; i++) {
      int f = rank * OWN + i * WARPS + warp, mt = f / TILES, rt = f % TILES;
      if (WK * CLUSTER == 1) {
        mt = i / WARP_TILES, rt = own_tile(i % WARP_TILES);
        if (!is_mine(i % WARP_TILES)) continue;
      } else if (i * WARPS + warp >= OWN || rank >= OWNERS) {
        break;
      }
      const u16* from = residual + (size_t)min(mt * 8 + g, M - 1) * N + (tile * TILES + rt) * 16 + 2 * t;
      kept[i][0] = load_l2((const u32*)from);
      kept[i][1] = load_l2((const u32*)(from + 8));
    }
  };
  if (!MEMORY || BOX) keep_residual();
  auto statistics = [&]() {
    // All rows of this warp at once: each is a trip to L2.
    float mean[STAT_ROWS], square[STAT_ROWS];
#pragma unroll
    for (int j = 0; j < STAT_ROWS; j++) mean[j] = square[j] = 0.f;
#pragma unroll 2
    for (int i = lane; i < stats_tiles; i += 32) {
#pragma unroll
      for (int j = 0; j < STAT_ROWS; j++) {
        int row = min(warp + j * WARPS, M - 1);
        float2 v = load_l2(stats_in + (size_t)row * stats_tiles + i);
        mean[j] += v.x;
        // Of RMSNorm the sum of squares; of LayerNorm that of deviations, and the tiles' means.
        square[j] += NORM == 2 ? v.y + v.x * v.x * (float)(K / stats_tiles) : v.y;
      }
    }
#pragma unroll
    for (int j = 0; j < STAT_ROWS; j++) {
#pragma unroll
      for (int d = 16; d; d >>= 1) {
        mean[j] += __shfl_xor_sync(~0u, mean[j], d);
        square[j] += __shfl_xor_sync(~0u, square[j], d);
      }
      float m = NORM == 2 ? mean[j] / stats_tiles : 0.f;
      float variance = square[j] / K - m * m;
      int row = warp + j * WARPS;
      if (lane == 0 && row < MT * 8) scale[row] = make_float2(m, rsqrtf(variance + eps));
    }
  };
#if !STREAM
  const int slice_vectors = (UNITS * (rank + 1) / C - slice_unit) * 8, vectors = M * slice_vectors;
#pragma unroll 1
  for (int first = threadIdx.x; first == threadIdx.x || first < vectors;
       first += X_BATCH * THREADS) {
    Vec v[X_BATCH];
#pragma unroll
    for (int j = 0; j < X_BATCH; j++) {
      int i = first + j * THREADS, k = slice_unit * 64 + i % slice_vectors * 8;
      if (i < vectors) v[j] = load_l2_vec(x + (size_t)(i / slice_vectors) * K + k);
    }
    if (NORM == 2 && first == threadIdx.x) {
      statistics();
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < X_BATCH; j++) {
      int i = first + j * THREADS, row = i / slice_vectors, c = i % slice_vectors;
      int k = slice_unit * 64 + c * 8;
      if (i >= vectors) break;
      if (NORM == 2) {
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
  if (NORM == 1) statistics();
  if (!STREAM || NORM) __syncthreads();

  // --- the product -----------------------------------------------------------------------------
#if BOX
  float sums[WARP_TILES][MT * 4];  // row g of a tile, 2t and 2t + 1 of eight rows of x; then row g + 8
  auto clear = [&]() {
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int j = 0; j < MT * 4; j++) sums[r][j] = 0.f;
  };
  // Turned round: row g of x, 2t and 2t + 1 of the tile's upper and of its lower half.
  auto take = [&](int r, int mt, float (&v)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int from = (2 * t + j % 2) * 4 + g / 2;
      const float even = __shfl_sync(~0u, sums[r][mt * 4 + j / 2 * 2], from);
      const float odd = __shfl_sync(~0u, sums[r][mt * 4 + j / 2 * 2 + 1], from);
      v[j] = g % 2 ? odd : even;
    }
  };
#else
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
#endif
  clear();

  // Row m = 8 * mt + g of the output, columns 2t, 2t + 1 of the tile's upper and of its lower half.
  auto finish = [&](int row_tile, int mt, int own, float (&v)[4], u32 (&before)[2]) {
    const int m = mt * 8 + g, n = row_tile * (GATED ? 8 : 16) + 2 * t;
    u16* into = out + (size_t)m * out_row + n;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = min(n + j % 2 + j / 2 * (GATED ? N / 2 : 8), N - 1);
      if (NORM == 1) v[j] *= scale[m].y;
      if (bias != nullptr) v[j] += widen(bias[column]);
    }
#if EPILOGUE == 1
    float2* stats = (float2*)(shared + STATS_AT) + own * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 sum = pack(v[half * 2] + low(before[half]), v[half * 2 + 1] + high(before[half]));
      v[half * 2] = low(sum), v[half * 2 + 1] = high(sum);
      if (m < M) *(u32*)(into + half * 8) = sum;
      if (SCALES && m < M)
        *(u32*)(scaled + (into - out) + half * 8) = mul2(sum, *(const u32*)(next_weight + n + half * 8));
    }
    float mean = 0.f, square = 0.f;
    if (STATS == 2) {
      mean = v[0] + v[1] + v[2] + v[3];
      mean += __shfl_xor_sync(~0u, mean, 1);
      mean += __shfl_xor_sync(~0u, mean, 2);
      mean *= 1.f / 16;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) square += (v[j] - mean) * (v[j] - mean);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if (t == 0) stats[g] = make_float2(mean, square);
#elif GATED
    float gated[2];
#pragma unroll
    for (int j = 0; j < 2; j++) gated[j] = __fdividef(v[j], 1.f + __expf(-v[j])) * v[j + 2];
    if (m < M) *(u32*)into = pack(gated[0], gated[1]);
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 pair = pack(activate(v[half * 2]), activate(v[half * 2 + 1]));
      if (N % 16 == 0) {
        if (m < M && n + half * 8 < N) *(u32*)(into + half * 8) = pair;
      } else {
        if (m < M && n + half * 8 < N) into[half * 8] = (u16)pair;
        if (m < M && n + half * 8 + 1 < N) into[half * 8 + 1] = (u16)(pair >> 16);
      }
    }
#endif
  };

  int unit = 0;
#if BOX
  int stage = 0;
  u32 passed = 0;  // rounds of the ring, by parity
  for (int i = 0; i < total; i++) {
    const u32 weights = base + stage * STAGE_BYTES;
    await_bytes(arrived + stage * 8, passed);
    __syncwarp();
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
        wgmma<MT * 8>(sums[r], weights + r * 64 * 128 + k * 32, weights + WEIGHT_BYTES + k * 32);
    end_wgmma();
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++) await_wgmma<MT * 8>(sums[r]);
    // The four warps' products end together: nobody reads this stage any more.
    if (issued < total) issue_weights();
    if (++stage == ST) stage = 0, passed ^= 1;
    unit++;
#else
  const u32 own_w = ring + g * 128 + (t ^ (g & 1) << 2) * 16;
  u32 slot = own_w;
  // This lane's 16 bytes of row g of x for the first half of a stage; the second is 64 bytes away.
  const u32 own_x = base + X_AT + (STREAM ? g : min(g, XR - 1)) * X_ROW +
                    (STREAM ? (t ^ ((g & 1) << 2)) * 16 : (first_unit - slice_unit) * 128 + t * 16);
  u32 x_at = own_x;
  if (STREAM) await_copies<XB - 2>();
  for (int i = 0; i < total; i++) {
    if (STREAM && unit % XS == 0) {
      // The buffer that is filled next was read last before this barrier.
      if (i < (XB - 1) * XS)
        await_copies<(ST < XB ? ST : XB) - 1>();
      else
        await_copies<ST - 1>();
      __syncthreads();
      issue_x();
    } else {
      await_copies<ST - 1>();
      __syncwarp();  // what the other lanes copied
    }
    Vec b[2][RT][2], a[2][MT];
#pragma unroll
    for (int u = 0; u < 2; u++) {
#pragma unroll
      for (int mt = 0; mt < MT; mt++)
        a[u][mt] = load_shared((STREAM ? x_at ^ (u * 64) : x_at + u * 64) + mt * 8 * X_ROW);
#pragma unroll
      for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[u][r][half] = load_shared((slot ^ u * 64) + (r * 2 + half) * 1024);
    }
    __syncwarp();  // all lanes have read what is filled again
    if (issued < total) issue_weights();
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
    slot = slot == own_w + (ST - 1) * STAGE_BYTES ? own_w : slot + STAGE_BYTES;
    unit++;
    if (!STREAM) {
      x_at += 128;
    } else {
      x_at += X_STAGE;
      if (x_at == own_x + XB * XS * X_STAGE) x_at = own_x;
      // A last buffer that is not full ends the loop.
    }
#endif
    if (unit == count && PERSISTENT) {
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
        for (int mt = 0; mt < MT && is_mine(r); mt++) {
          float v[4];
          take(r, mt, v);
          finish(tile * TILES + own_tile(r), mt, 0, v, kept[0]);
        }
      clear();
      unit = 0;
#if !STREAM
      x_at = own_x;
#endif
      tile += block_count;
    }
  }
  if (PERSISTENT) return;

  // --- what the parts of K add up to -------------------------------------------------------------
  // Where an owner is sent a part: the number of its fragment, the block and the warp it comes from.
  auto part_at = [&](int own, int c, int k) { return ((own * CLUSTER + c) * WK + k) * 512 + lane * 16; };
  if (WK * CLUSTER == 1) {
#if MEMORY && C > 1
    float4* block = partials + (size_t)tile * C * FRAGMENTS * 32 + lane;
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int mt = 0; mt < MT && is_mine(r); mt++) {
        float v[4];
        take(r, mt, v);
        block[(rank * FRAGMENTS + own_tile(r) * MT + mt) * 32] = make_float4(v[0], v[1], v[2], v[3]);
      }
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) {
      before = add_one_in_order(arrivals + tile);
      if (before == C - 1) arrivals[tile] = 0;  // for the next launch
    }
    __syncthreads();
    if (before != C - 1) return;
    if (!BOX) keep_residual();
#endif
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
      for (int r = 0; r < WARP_TILES; r++) {
        if (!is_mine(r)) continue;
        float v[4];
        take(r, mt, v);
#if MEMORY && C > 1
        float4 part[C], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int c = 0; c < C; c++)
          part[c] = c == rank ? make_float4(v[0], v[1], v[2], v[3])
                              : load_l2(block + (c * FRAGMENTS + own_tile(r) * MT + mt) * 32);
#pragma unroll
        for (int c = 0; c < C; c++)
          sum.x += part[c].x, sum.y += part[c].y, sum.z += part[c].z, sum.w += part[c].w;
        v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
#endif
        finish(tile * TILES + own_tile(r), mt, mt * TILES + own_tile(r), v,
               kept[EPILOGUE == 1 ? mt * WARP_TILES + r : 0]);
      }
  } else {
    // Fragment f of this warp's slice of K: to the block that owns it, or into this warp's own ring.
    if (CLUSTER > 1)
      await_cluster();
    else
      await_copies<0>();
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int mt = 0; mt < MT && is_mine(r); mt++) {
        float v[4];
        take(r, mt, v);
        const float4 part = make_float4(v[0], v[1], v[2], v[3]);
        if (CLUSTER > 1) {
          const int f = mt * TILES + own_tile(r), owner = f / OWN;
          send(peer_address(base + SENT_AT + part_at(f % OWN, rank, wk), owner), part,
               peer_address(base + ALL_SENT_AT, owner));
        } else {
          store_shared(ring + (r * MT + mt) * 512 + lane * 16, bits(part));
        }
      }
    if (CLUSTER == 1) __syncthreads();
    if (rank >= OWNERS) return;
    if (CLUSTER > 1) await_sent(base + ALL_SENT_AT, 0);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const int own = i * WARPS + warp;
      if (own >= OWN) break;
      const int f = rank * OWN + own, mt = f / TILES, rt = f % TILES;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < CLUSTER; c++)
#pragma unroll
        for (int k = 0; k < WK; k++) {
          const u32 at = CLUSTER > 1 ? SENT_AT + part_at(own, c, k)
                                     : (k * WR + rt / RT) * RING_BYTES + (rt % RT * MT + mt) * 512 + lane * 16;
          const float4 part = floats(load_shared(base + at));
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      finish(tile * TILES + rt, mt, own, v, kept[EPILOGUE == 1 ? i : 0]);
    }
  }

#if EPILOGUE == 1
  __syncthreads();
  const float2* stats = (const float2*)(shared + STATS_AT);
  for (int i = threadIdx.x; i < OWN / STAT_TILES * 8; i += THREADS) {
    int f = (MEMORY ? 0 : rank) * OWN + i / 8 * STAT_TILES, m = f / TILES * 8 + i % 8;
    float mean = 0.f, square = 0.f;
    for (int r = 0; r < STAT_TILES; r++) {
      float2 v = stats[(i / 8 * STAT_TILES + r) * 8 + i % 8];
      mean += v.x;
      square += v.y + 16.f * v.x * v.x;
    }
    mean /= STAT_TILES;
    square -= 16.f * STAT_TILES * mean * mean;
    int index = (tile * TILES + f % TILES) / STAT_TILES;
    if (m < M) stats_out[(size_t)m * (N / (16 * STAT_TILES)) + index] = make_float2(mean, square);
  }
#endif
}
