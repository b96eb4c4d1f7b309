// Attention of prefill chunks over a paged KV cache on Hopper: the chunks of one step, of any requests, in
// one launch. It is FlashAttention-3's (Shah et al., 2024): a warp brings keys and values in by TMA while two
// warpgroups multiply by wgmma, of which one exponentiates while the other multiplies, and each multiplies
// one tile's scores while it adds up the values of the tile before.
//
//   D head dimension, PADDED to a multiple of 64; BLOCK tokens of a cache block
//   HEADS  query heads of a tile, which share a KV head: SHARES such parts of its group
//   KEYS of a tile; stages ST of keys and as many of values; QUERY_TILES in shared memory
//   SLIDING_WINDOW 1: a query sees the last `window` tokens, its own included
//   SOFT_CAP 1: scores s, in base 2, become cap * tanh(s / cap)
//   SINKS 1: each query head has a score, bf16, of a token without a value
//   HALF 1: products are of float16, and so are queries, keys, values and results
//   E4M3 1, with HALF: keys and values are kept as e4m3, a byte each, whose scales are the caller's. Float16
//   has all its numbers, and Hopper widens two with one instruction. Queries are bfloat16, and brought to
//   float16's range by a power of two of their own; so are results
//
// CTAs are persistent. A tile is 128 queries, of HEADS heads and 128 / HEADS tokens of one chunk. Chunks are
// found in the step's chunk table on the device, so the grid depends on shapes alone. Tiles count from the
// beginning of their chunk and keys from the beginning of the sequence, the last ones first: a token's bits
// depend on its chunk, and on nothing else in the step.
//
// Of the first warpgroup one warp brings in keys and values, and three bring in the queries of the next tile
// while one is attended to; these also widen keys and values of e4m3, which TMA brings into a ring of their
// own. What no token sees may be NaN, whose weight of zero would spread it: rows of such values are made zero
// in shared memory.

#define THREADS 384
#define ROWS 128
#define TOKENS (ROWS / HEADS)              // of a tile
#define HALVES (PADDED / 64)               // columns of 128 bytes
#define BOX (BLOCK % 64 == 0 ? 64 : BLOCK % 32 == 0 ? 32 : 16)  // tokens of a TMA tile
#define BOXES (KEYS / BOX)
#define Q_BYTES (ROWS * PADDED * 2)
#define TILE_BYTES (KEYS * PADDED * 2)
#define KEYS_AT (QUERY_TILES * Q_BYTES)
#define VALUES_AT (KEYS_AT + ST * TILE_BYTES)
#define RAW_AT (VALUES_AT + ST * TILE_BYTES)
#define RAW_STAGES (E4M3 ? 2 : 0)          // of bytes, keys and values in turn
#define CHUNKS (PADDED / 16)               // of 16 numbers in a row
#define RAW_HALVES ((PADDED + 127) / 128)
#define RAW_BYTES (KEYS * 128 * RAW_HALVES)
#define BARRIERS_AT (RAW_AT + RAW_STAGES * RAW_BYTES)
#define KEYS_FULL BARRIERS_AT
#define KEYS_FREE (KEYS_FULL + ST * 8)
#define VALUES_FULL (KEYS_FREE + ST * 8)
#define VALUES_FREE (VALUES_FULL + ST * 8)
#define QUERY_FULL (VALUES_FREE + ST * 8)
#define QUERY_FREE (QUERY_FULL + QUERY_TILES * 8)
#define EDGE_FULL (QUERY_FREE + QUERY_TILES * 8)
#define RAW_FULL (EDGE_FULL + 8)
#define RAW_FREE (RAW_FULL + RAW_STAGES * 8)
#define WORK_AT ((RAW_FREE + RAW_STAGES * 8 + 15) / 16 * 16)
#define QUERY_SCALES_AT (WORK_AT + QUERY_TILES * 16)  // fp32 [ROWS]
#define SHARED_BYTES (QUERY_SCALES_AT + (E4M3 ? ROWS * 4 : 0))
#define QUERY_WARPS 3
#define FILLERS (E4M3 ? QUERY_WARPS : 1)   // arrivals that fill a tile of keys or values
// Registers of a thread; a warpgroup that fills and two that multiply have all that three begin with.
#define FILLER_REGISTERS (!E4M3 ? 40 : PADDED > 128 ? 56 : 104)
#define CONSUMER_REGISTERS ((3 * 168 - FILLER_REGISTERS) / 2)
#ifndef HALF
#define HALF 0
#endif
#define MINUS_INF __uint_as_float(0xff800000u)
#define LOWEST -1e30f                      // of a row that has seen nothing yet

extern "C" __device__ const int shared_bytes = SHARED_BYTES;
extern __shared__ __align__(1024) char shared[];

static_assert(D % 8 == 0 && PADDED % 64 == 0 && D <= PADDED && PADDED <= 256, "head dimension");
static_assert(32 * QUERY_WARPS % CHUNKS == 0, "whole rows at once");
static_assert(HEADS <= ROWS && BLOCK % 16 == 0 && KEYS % 64 == 0 && KEYS <= 128, "tiles");

#if HALF
#define PACK pack_half
#define HIGHEST 14.f                       // a weight is at most 2 to it, so that small ones are numbers too
#else
#define PACK pack
#define HIGHEST 0.f
#endif
#if HALF && !E4M3
#define PACK_RESULT pack_half
#else
#define PACK_RESULT pack
#endif

#if SINKS
#define SINK_LOGITS , const u16* sinks
#else
#define SINK_LOGITS
#endif

typedef u16 Number;  // the bits of a bfloat16, or of a float16

// A tile of one chunk: its first token in the step, how many there are, and the first one's position.
struct Work {
  int first, count, begin, part;
  const i64* table;
};

// The order in which an item takes tiles of keys and of values.
template <typename Keys, typename Values>
__device__ __forceinline__ void in_order(int first, int last, Keys keys, Values values) {
  keys(last);
  for (int tile = last; tile > first; tile--) keys(tile - 1), values(tile);
  values(first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const Number* query, const i64* block_table, const int* chunks, Number* out,
                      int chunk_count, int parts, int query_row, int query_head, int out_row, int out_head,
                      int table_row, float scale, float cap, int window,
                      const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map SINK_LOGITS) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(key_map), prefetch_tensor_map(value_map);
    for (int s = 0; s < ST; s++) {
      init_barrier(base + KEYS_FULL + s * 8, FILLERS), init_barrier(base + KEYS_FREE + s * 8, 2);
      init_barrier(base + VALUES_FULL + s * 8, FILLERS), init_barrier(base + VALUES_FREE + s * 8, 2);
    }
    for (int s = 0; s < RAW_STAGES; s++)
      init_barrier(base + RAW_FULL + s * 8), init_barrier(base + RAW_FREE + s * 8, QUERY_WARPS);
    for (int s = 0; s < QUERY_TILES; s++) {
      init_barrier(base + QUERY_FULL + s * 8, QUERY_WARPS);
      init_barrier(base + QUERY_FREE + s * 8, 8);
    }
    init_barrier(base + EDGE_FULL);
    publish_barriers();
  }
  __syncthreads();
  wait_for_predecessor();
  release_successor();

  // Tiles of the chunks up to a lane's, of 32 chunks from `c` on.
  auto tiles_up_to = [&](int c) {
    int sum = c + lane < chunk_count ? (chunks[(c + lane) * 4 + 2] + TOKENS - 1) / TOKENS : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, sum, d);
      sum += lane < d ? 0 : before;
    }
    return sum;
  };
  int tiles = 0;
  for (int c = 0; c < chunk_count; c += 32) tiles += __shfl_sync(~0u, tiles_up_to(c), 31);
  const int items = parts * tiles, ctas = gridDim.x;
  // The n-th item of this CTA: rounds go forth and back, since items in front have more keys.
  auto item_of = [&](int n) { return n * ctas + (n % 2 ? ctas - 1 - (int)blockIdx.x : (int)blockIdx.x); };
  // All lanes of a warp together.
  auto find = [&](int item) {
    int tile = tiles - 1 - item / parts;  // the last tiles of a chunk attend to most: they go first
    int chunk = 0;
    for (;; chunk += 32) {
      const int sum = tiles_up_to(chunk);
      const u32 behind = __ballot_sync(~0u, sum > tile);
      const int own = behind ? __popc((behind & (0u - behind)) - 1) : 32;  // the first lane of them
      const int before = __shfl_sync(~0u, sum, own ? own - 1 : 0);
      if (own) tile -= before;
      chunk += own % 32;
      if (behind) break;
    }
    const int* entry = chunks + chunk * 4;
    const int offset = tile * TOKENS;
    return Work{entry[1] + offset, min(entry[2] - offset, TOKENS), entry[3] + offset, item % parts,
                block_table + (i64)entry[0] * table_row};
  };
  auto first_tile = [&](int begin) { return SLIDING_WINDOW ? max(begin + 1 - window, 0) / KEYS : 0; };
  auto last_tile = [&](int end) { return (end + KEYS - 1) / KEYS - 1; };
  auto go_on = [&](int& stage, u32& passed, int stages) {
    if (++stage == stages) stage = 0, passed ^= 1;
  };
  // Rows of a tile of values that some token sees, `from` and those behind it up to `to`.
  auto seen_rows = [&](const Work& work, int tile, int& from, int& to) {
    from = (SLIDING_WINDOW ? work.begin + 1 - window : 0) - tile * KEYS;
    to = work.begin + work.count - tile * KEYS;
  };

  if (warp == 0) {
    // --- keys and values, as the cache has them ------------------------------------------------
    give_registers<FILLER_REGISTERS>();
    int key_stage = 0, value_stage = 0, raw_stage = 0;
    u32 keys_passed = 1, values_passed = 1, raw_passed = 1, edges_passed = 0;
    for (int n = 0; n * ctas < items; n++) {
      if (item_of(n) >= items) continue;
      const Work work = find(item_of(n));
      const int end = work.begin + work.count, kv_head = work.part / SHARES;
      const int first = first_tile(work.begin), last = last_tile(end);
      // The block of a lane's box of a tile. What is no block of the cache is read as zeros.
      auto block_of = [&](int tile) {
        const int place = tile * KEYS + lane * BOX;
        return lane < BOXES && place < end ? (int)load_l2(work.table + place / BLOCK) : 0;
      };
      auto load = [&](const TensorMap& map, int tile, int block, u32 into, u32 barrier) {
        constexpr int halves = E4M3 ? RAW_HALVES : HALVES;
        const int boxes = min((end - tile * KEYS + BOX - 1) / BOX, BOXES);
        if (lane == 0) expect_bytes(barrier, boxes * BOX * halves * 128);
        __syncwarp();
        if (lane < boxes)
          for (int h = 0; h < halves; h++)
            tma_load(into + h * KEYS * 128 + lane * BOX * 128, map, h * (E4M3 ? 128 : 64),
                     (tile * KEYS + lane * BOX) % BLOCK, kv_head, block, barrier);
      };
      auto load_raw = [&](const TensorMap& map, int tile) {
        const int block = block_of(tile);
        await_bytes(base + RAW_FREE + raw_stage * 8, raw_passed);
        __syncwarp();
        load(map, tile, block, base + RAW_AT + raw_stage * RAW_BYTES, base + RAW_FULL + raw_stage * 8);
        go_on(raw_stage, raw_passed, RAW_STAGES);
      };
      auto load_keys = [&](int tile) {
        const int block = block_of(tile);
        await_bytes(base + KEYS_FREE + key_stage * 8, keys_passed);
        __syncwarp();
        load(key_map, tile, block, base + KEYS_AT + key_stage * TILE_BYTES, base + KEYS_FULL + key_stage * 8);
        go_on(key_stage, keys_passed, ST);
      };
      auto load_values = [&](int tile) {
        const u32 full = base + VALUES_FULL + value_stage * 8;
        const u32 into = base + VALUES_AT + value_stage * TILE_BYTES;
        const int block = block_of(tile);
        int from, to;
        seen_rows(work, tile, from, to);
        await_bytes(base + VALUES_FREE + value_stage * 8, values_passed);
        __syncwarp();
        if (from <= 0 && to >= KEYS) {
          load(value_map, tile, block, into, full);
        } else {
          load(value_map, tile, block, into, base + EDGE_FULL);
          await_bytes(base + EDGE_FULL, edges_passed);
          edges_passed ^= 1;
          __syncwarp();
          for (int i = lane; i < KEYS * 8 * HALVES; i += 32) {
            const int row = i / 8 % KEYS;
            if (row < from || row >= to) store_shared(into + i * 16, Vec{0, 0, 0, 0});
          }
          publish_stores();
          __syncwarp();
          if (lane == 0) arrive_at(full);
        }
        go_on(value_stage, values_passed, ST);
      };
      if (E4M3)
        in_order(first, last, [&](int tile) { load_raw(key_map, tile); },
                 [&](int tile) { load_raw(value_map, tile); });
      else
        in_order(first, last, load_keys, load_values);
    }
  } else if (group == 0) {
    // --- queries, and what is to be done with them; keys and values of e4m3 --------------------
    give_registers<FILLER_REGISTERS>();
    const int thread = threadIdx.x - 32;
    constexpr int threads = 32 * QUERY_WARPS;
    int stage = 0;
    u32 passed = 1;
    auto publish_work = [&](const Work& work) {
      if (thread == 0)
        store_shared(base + WORK_AT + stage * 16,
                     Vec{(u32)work.first, (u32)work.count, (u32)work.begin, (u32)work.part});
    };
    auto arrive = [&](u32 barrier) {
      __syncwarp();
      if (lane == 0) arrive_at(barrier);
    };
    auto load_queries = [&](const Work& work) {
      await_bytes(base + QUERY_FREE + stage * 8, passed);
      __syncwarp();
      publish_work(work);
      const u32 into = base + stage * Q_BYTES;
      for (int i = thread; i < ROWS * HALVES * 8; i += threads) {
        const int row = i / (HALVES * 8), chunk = i % (HALVES * 8);
        const int token = row / HEADS, head = work.part * HEADS + row % HEADS;
        const bool is_there = token < work.count && chunk * 8 < D;
        const Number* from = query + (i64)(work.first + token) * query_row + head * query_head + chunk * 8;
        const u32 at = into + chunk / 8 * (ROWS * 128) + row * 128 + ((chunk ^ row) % 8) * 16;
        copy16_or_zero(at, is_there ? from : query, is_there);
      }
      commit_copies();
      await_copies<0>();
      publish_stores();
      arrive(base + QUERY_FULL + stage * 8);
      go_on(stage, passed, QUERY_TILES);
    };
#if E4M3
    int key_stage = 0, value_stage = 0, raw_stage = 0;
    u32 keys_passed = 1, values_passed = 1, raw_passed = 0;
    // A thread has the same 16 numbers of some rows.
    const u32 chunk = thread % CHUNKS, raw_column = chunk % 8 * 16, own_column = chunk % 4 * 32;
    const int first_row = thread / CHUNKS;
    auto widen_tile = [&](u32 free, u32 parity, u32 into, u32 full, int from, int to) {
      await_bytes(base + RAW_FULL + raw_stage * 8, raw_passed);
      await_bytes(free, parity);
      __syncwarp();
      const u32 raw = base + RAW_AT + raw_stage * RAW_BYTES + chunk / 8 * (KEYS * 128);
      into += chunk / 4 * (KEYS * 128);
      const bool whole = from <= 0 && to >= KEYS;
      constexpr int step = threads / CHUNKS, rounds = (KEYS + step - 1) / step, deep = 6;
#pragma unroll
      for (int begin = 0; begin < rounds; begin += deep) {
        Vec v[deep];
#pragma unroll
        for (int k = 0; k < deep; k++) {
          const int row = first_row + (begin + k) * step;
          if (begin + k < rounds && row < KEYS) v[k] = load_shared(raw + row * 128 + (raw_column ^ row % 8u * 16));
        }
#pragma unroll
        for (int k = 0; k < deep; k++) {
          const int row = first_row + (begin + k) * step;
          if (begin + k >= rounds || row >= KEYS) continue;
          if (!whole && (row < from || row >= to)) v[k] = Vec{0, 0, 0, 0};
          Vec wide[2];
          halves_of_e4m3(v[k].x, wide[0].x, wide[0].y), halves_of_e4m3(v[k].y, wide[0].z, wide[0].w);
          halves_of_e4m3(v[k].z, wide[1].x, wide[1].y), halves_of_e4m3(v[k].w, wide[1].z, wide[1].w);
          const u32 at = into + row * 128, column = own_column ^ row % 8u * 16;
          store_shared(at + column, wide[0]), store_shared(at + (column ^ 16), wide[1]);
        }
      }
      publish_stores();
      __syncwarp();
      if (lane == 0) arrive_at(full), arrive_at(base + RAW_FREE + raw_stage * 8);
      go_on(raw_stage, raw_passed, RAW_STAGES);
    };
#endif
    for (int n = 0; n * ctas < items; n++) {
      if (item_of(n) >= items) continue;
      const Work work = find(item_of(n));
      load_queries(work);
#if E4M3
      in_order(
          first_tile(work.begin), last_tile(work.begin + work.count),
          [&](int tile) {
            widen_tile(base + KEYS_FREE + key_stage * 8, keys_passed,
                       base + KEYS_AT + key_stage * TILE_BYTES, base + KEYS_FULL + key_stage * 8, 0, KEYS);
            go_on(key_stage, keys_passed, ST);
          },
          [&](int tile) {
            int from, to;
            seen_rows(work, tile, from, to);
            widen_tile(base + VALUES_FREE + value_stage * 8, values_passed,
                       base + VALUES_AT + value_stage * TILE_BYTES, base + VALUES_FULL + value_stage * 8,
                       from, to);
            go_on(value_stage, values_passed, ST);
          });
#endif
    }
    await_bytes(base + QUERY_FREE + stage * 8, passed);
    publish_work(Work{0, 0, 0, 0, nullptr});
    arrive(base + QUERY_FULL + stage * 8);
  } else {
    // --- products ------------------------------------------------------------------------------
    take_registers<CONSUMER_REGISTERS>();
    const int g = lane / 4, t = lane % 4;
    const int first_row = (group - 1) * 64 + warp % 4 * 16;  // of a warp
    int stage = 0, key_stage = 0, value_stage = 0;
    u32 passed = 0, keys_passed = 0, values_passed = 0;
    float scores[KEYS / 2], sums[PADDED / 2];
    u32 weights[KEYS / 16][4];
#pragma unroll
    for (int j = 0; j < KEYS / 2; j++) scores[j] = 0.f;
    if (group == 2) arrive_named(1, 256);

    for (;;) {
      await_bytes(base + QUERY_FULL + stage * 8, passed);
      const Vec found = load_shared(base + WORK_AT + stage * 16);
      const int begin = found.z, count = found.y, first_token = found.x, part = found.w;
      if (count == 0) break;
      const int first = first_tile(begin);
      const u32 own_query = base + stage * Q_BYTES + (group - 1) * 64 * 128;
      int tile = last_tile(begin + count);
#if E4M3
      // This warp's queries, brought to float16's range: the largest number of each is from 2^14 on, less than
      // 2^15.
      float* query_scales = (float*)(shared + QUERY_SCALES_AT);
      constexpr int lanes_of_row = HALVES == 3 ? 32 : HALVES * 8;
#pragma unroll 4
      for (int r = lane / lanes_of_row; r < 16; r += 32 / lanes_of_row) {
        const int chunk = lane % lanes_of_row, own = first_row + r;
        const u32 at = base + stage * Q_BYTES + chunk / 8 * (ROWS * 128) + own * 128 + ((chunk ^ own) % 8) * 16;
        Vec v = Vec{0, 0, 0, 0};
        if (chunk < HALVES * 8) v = load_shared(at);
        u32 size = 0;
        for (u32 pair : {v.x, v.y, v.z, v.w}) size = max(size, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
#pragma unroll
        for (int d = 1; d < lanes_of_row; d *= 2) size = max(size, __shfl_xor_sync(~0u, size, d));
        const int power = size ? 14 + 127 - (int)(size >> 23) : 0;
        const float by = __uint_as_float((u32)min(max(power + 127, 1), 253) << 23);
        v = Vec{pack_half(low(v.x) * by, high(v.x) * by), pack_half(low(v.y) * by, high(v.y) * by),
                pack_half(low(v.z) * by, high(v.z) * by), pack_half(low(v.w) * by, high(v.w) * by)};
        if (chunk < HALVES * 8) store_shared(at, v);
        if (chunk == 0) query_scales[own] = 1.f / by;
      }
      publish_stores();
      sync_named(2 + group, 128);
#endif
      int row[2], position[2];
      float most[2], mass[2], own_scale[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        row[i] = first_row + g + 8 * i;
        position[i] = begin + row[i] / HEADS;
        most[i] = LOWEST, mass[i] = 0.f, own_scale[i] = scale;
#if E4M3
        own_scale[i] *= query_scales[row[i]];
#endif
#if SINKS
        const float sink = widen(load_l2(sinks + part * HEADS + row[i] % HEADS)) * 1.4426950408889634f;
        most[i] = max(sink, LOWEST);
        if (t == 0) mass[i] = power_of_two(sink - most[i] + HIGHEST);  // of four lanes one
#endif
      }
      // What all queries of this warpgroup see lies between these.
      const int least = begin + (group - 1) * 64 / HEADS, greatest = begin + (group * 64 - 1) / HEADS;
#pragma unroll
      for (int j = 0; j < PADDED / 2; j++) sums[j] = 0.f;

      auto multiply_keys = [&] {
        const u32 keys = base + KEYS_AT + key_stage * TILE_BYTES;
#pragma unroll
        for (int k = 0; k < PADDED / 16; k++)
          wgmma_or_set<KEYS>(scores, own_query + k / 4 * (ROWS * 128) + k % 4 * 32,
                             keys + k / 4 * (KEYS * 128) + k % 4 * 32, k > 0);
        end_wgmma();
      };
      auto add_values = [&] {
        const u32 values = base + VALUES_AT + value_stage * TILE_BYTES;
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
          wgmma_of_columns<PADDED>(sums, weights[k], values + k * 2048, KEYS * 128);
        end_wgmma();
      };
      auto free_stage = [&](u32 barriers, int& which, u32& parity) {
        if (threadIdx.x % 128 == 0) arrive_at(base + barriers + which * 8);
        go_on(which, parity, ST);
      };
      // Scores to weights, which are not rounded yet; returns what sums so far are multiplied with.
      auto weigh = [&](float (&faded)[2]) {
#if SOFT_CAP
        // tanh(x) = 1 - 2 / (1 + e^2x)
        const float inner[2] = {own_scale[0] * 2.8853900817779268f / cap, own_scale[1] * 2.8853900817779268f / cap};
        const float by[2] = {1.f, 1.f};
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++)
          scores[j] = cap - __fdividef(2.f * cap, 1.f + flushed_power_of_two(scores[j] * inner[j % 4 / 2]));
#else
        const float (&by)[2] = own_scale;
#endif
        const int begins = tile * KEYS;
        if (begins + KEYS - 1 > least || SLIDING_WINDOW && begins <= greatest - window) {
#pragma unroll
          for (int j = 0; j < KEYS / 2; j++) {
            const int place = begins + j / 4 * 8 + 2 * t + j % 2, at = position[j % 4 / 2];
            const bool sees = place <= at && !(SLIDING_WINDOW && place <= at - window);
            if (!sees) scores[j] = MINUS_INF;
          }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float highest = scores[2 * i];
#pragma unroll
          for (int j = 0; j < KEYS / 2; j++)
            if (j % 4 / 2 == i) highest = max(highest, scores[j]);
          highest = max(highest, __shfl_xor_sync(~0u, highest, 1));
          highest = max(highest, __shfl_xor_sync(~0u, highest, 2));
          const float before = most[i];
          most[i] = max(before, highest * by[i]);
          faded[i] = flushed_power_of_two(before - most[i]);
          float sum = 0.f;
#pragma unroll
          for (int j = 0; j < KEYS / 2; j++)
            if (j % 4 / 2 == i) {
              scores[j] = flushed_power_of_two(__fmaf_rn(scores[j], by[i], HIGHEST - most[i]));
              sum += scores[j];
            }
          mass[i] = mass[i] * faded[i] + sum;
        }
      };
      auto round_weights = [&] {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            weights[k][j] = PACK(scores[8 * k + 2 * j], scores[8 * k + 2 * j + 1]);
      };

      float faded[2];
      await_bytes(base + KEYS_FULL + key_stage * 8, keys_passed);
      __syncwarp();
      begin_wgmma();
      multiply_keys();
      await_wgmma<KEYS>(scores);
      free_stage(KEYS_FREE, key_stage, keys_passed);
      weigh(faded);
      round_weights();
      for (tile--; tile >= first; tile--) {
        await_bytes(base + KEYS_FULL + key_stage * 8, keys_passed);
        __syncwarp();
        sync_named(group, 256);  // the other warpgroup has issued its products
        begin_wgmma();
        multiply_keys();
        await_bytes(base + VALUES_FULL + value_stage * 8, values_passed);
        __syncwarp();
        add_values();
        arrive_named(3 - group, 256);
        await_wgmma<KEYS, 1>(scores);
        free_stage(KEYS_FREE, key_stage, keys_passed);
        weigh(faded);
        await_wgmma<PADDED>(sums);
        free_stage(VALUES_FREE, value_stage, values_passed);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) keep(weights[k]);
#pragma unroll
        for (int j = 0; j < PADDED / 2; j++) sums[j] *= faded[j % 4 / 2];
        round_weights();
      }
      await_bytes(base + VALUES_FULL + value_stage * 8, values_passed);
      __syncwarp();
      begin_wgmma();
      add_values();
      await_wgmma<PADDED>(sums);
      free_stage(VALUES_FREE, value_stage, values_passed);
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) keep(weights[k]);

      // The queries' place takes a warp's results, so that lanes store 16 bytes next to each other.
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mass[i] += __shfl_xor_sync(~0u, mass[i], 1);
        mass[i] += __shfl_xor_sync(~0u, mass[i], 2);
        const float share = quotient(1.f, mass[i]);
        const u32 into = base + stage * Q_BYTES + row[i] * 128 + t * 4;
#pragma unroll
        for (int c = 0; c < PADDED / 8; c++)
          store_shared_word(into + c / 8 * (ROWS * 128) + (c ^ row[i]) % 8 * 16,
                            PACK_RESULT(sums[4 * c + 2 * i] * share, sums[4 * c + 2 * i + 1] * share));
      }
      __syncwarp();
      for (int i = lane; i < 16 * HALVES * 8; i += 32) {
        const int at = first_row + i / (HALVES * 8), chunk = i % (HALVES * 8);
        const int token = at / HEADS, head = part * HEADS + at % HEADS;
        const Vec v = load_shared(base + stage * Q_BYTES + chunk / 8 * (ROWS * 128) + at * 128 +
                                  ((chunk ^ at) % 8) * 16);
        if (token < count && chunk * 8 < D)
          *(Vec*)(out + (i64)(first_token + token) * out_row + head * out_head + chunk * 8) = v;
      }
      __syncwarp();
      if (lane == 0) arrive_at(base + QUERY_FREE + stage * 8);
      go_on(stage, passed, QUERY_TILES);
    }
  }
}
