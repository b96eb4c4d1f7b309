// Decode attention over the paged cache, from the packed projection to the attended heads: norm and
// rotation of queries and key, the append of key and value, attention split over the tokens, and
// the sum of the splits.
//
//   D head dimension, GROUP query heads of a KV head, KV_HEADS, BLOCK tokens of a cache block
//   CLUSTER CTAs share the tokens of one row and KV head (or of a KV split of it), WARPS warps share a
//   CTA's. Each CTA owns some elements of the result, and is sent what its peers have of them.
//   A row of more than SPLIT_TOKENS tokens a CTA is divided into equal KV splits, MAX_SPLITS at most, so
//   that one long row does not keep the others waiting. The splits of a row depend on its length alone.
//   LANE_ROWS: rows of the batch that each lane handles when a warp looks for a split: 32 * LANE_ROWS at
//   most
//   MIN_SHARED  bytes of shared memory to take at least: they decide how many CTAs fit on an SM
//   NORM 1: RMSNorm of each query head and key; ROPE 1: rotation of pairs (i, i + D / 2)
//   WINDOW tokens of each row, of consecutive positions; those behind the row's end are padding, which
//   has a position, a cache slot, and a finite result, all without meaning
//   GAPS 1: there may be padding in front of a row's first token too; padding has the null slot, which is
//   above all others
//   SLIDING_WINDOW: tokens that a query sees, its own included; 0 is all. Tokens in front of these are
//   not read: their blocks may be others' by now
//   SOFT_CAP: the bits of an fp32 cap c, scores s become c * tanh(s / c); 0 is none
//   SINKS 1: each query head has a sink, bf16 [KV_HEADS, GROUP]: a score, not capped, of a token without
//   a value. The warp that takes a query's own token begins with it, and no other one, so that it counts
//   once whatever warps, CTAs and splits there are
//   E4M3 1: keys and values are kept as e4m3, a byte each, divided by their head's scale, a power of two,
//   fp32 [2, KV_HEADS]. What they are multiplied with is float16, which has all numbers of e4m3: Hopper
//   widens two with one instruction. A query is brought to float16's range by a power of two of its own
//   (attention_kept.cuh). Those of this step are read as they are kept
//   SHARES: the heads of a group are divided into so many items, each of which reads the keys and values
//
// A warp takes tiles of 16 tokens: scores[16 tokens x 8 heads] and out[D x 8 heads] with m16n8k16, for
// each eight queries (heads of a token), online softmax in base 2. Tokens before these were written by
// earlier steps, so their copies start before the projection is there. A window's own keys and values
// come from the projection, not from the cache: nobody waits for another CTA's append. They are the last
// tile, in which a query sees the tokens up to its own. The CTAs are persistent: the
// splits of all rows and heads go round the clusters, which find them from the lengths. Of many rows,
// whose lengths differ, a dynamic scheduler gives a CTA the next split (DYNAMIC). Which one that is, where
// its tiles are and what its token is are on their way while the CTA is at the one before, and its tiles
// come behind that one's without a gap (STREAM). When loads are issued changes no bit.

#ifndef E4M3
#define E4M3 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#define THREADS (32 * WARPS)
#define PADDED (D <= 64 ? 64 : D <= 128 ? 128 : 256)
#define KEPT_BYTES (2 - E4M3)              // of a number in the cache
#define ROW_BYTES (PADDED * KEPT_BYTES)
#define CHUNKS (D * KEPT_BYTES / 16)       // of 16 bytes in a row
#define TILE_BYTES (16 * ROW_BYTES)
#define STAGE_BYTES (2 * TILE_BYTES)       // keys, values
#define RING_BYTES (ST * STAGE_BYTES)
#define HEADS (GROUP / SHARES)             // of an item
#define ITEM_HEADS (KV_HEADS * SHARES)     // items of a split
#define QUERIES (WINDOW * HEADS)           // of an item: those of a token come one after the other
#define EIGHTS ((QUERIES + 7) / 8)         // of queries
#define Q_ROW (PADDED * 2 + 16)
#define Q_ROWS ((EIGHTS + 1) / 2 * 16)
#define Q_IN_SHARED (WINDOW > 1 && EIGHTS > 1)  // not in registers: two CTAs would leave none
#define NEW_ROWS (WINDOW > 8 ? 16 : WINDOW > 4 ? 8 : WINDOW > 2 ? 4 : WINDOW)
#define STEPS ((D / 2 + 31) / 32)          // of a warp over a vector's pairs
#define AHEAD (STEPS > 3 ? 3 : STEPS > 1 ? 6 : 12)  // vectors that a warp reads at once

#define NEW_AT (WARPS * RING_BYTES)        // this step's keys and values: a tile of NEW_ROWS tokens
#define NEW_VALUES_AT (NEW_AT + NEW_ROWS * ROW_BYTES)
#define Q_AT (NEW_VALUES_AT + NEW_ROWS * ROW_BYTES)
#define PARTS_AT (Q_AT + Q_ROWS * Q_ROW)   // [WARPS][QUERIES][D] fp32
#define PARTS_BYTES (WARPS * QUERIES * D * 4)
// Each warp's is in its ring where there is no room next to it: two CTAs shall fit on an SM, and few
// rows, which give a CTA one split, shall leave the next kernel what they leave it with one token each.
#define SUMS_BYTES (PARTS_BYTES + (CLUSTER > 1 ? QUERIES * D * 8 : 0))
#define PARTS_IN_RING (WINDOW > 1 && WARPS * RING_BYTES + SUMS_BYTES > (LANE_ROWS > 1 ? 96 : 72) * 1024)
#define PART_GAP (PARTS_IN_RING ? RING_BYTES - QUERIES * D * 4 : 0)  // behind a warp's part
#define PART_STATS_AT (PARTS_AT + (PARTS_IN_RING ? 0 : PARTS_BYTES))
#define WEIGHTS_AT (PART_STATS_AT + WARPS * QUERIES * 8)  // of splits
#define BEFORE_AT (WEIGHTS_AT + QUERIES * MAX_SPLITS * 4)
#define NEXT_AT (BEFORE_AT + 4)             // the split that comes next
#define BROKEN_AT (BEFORE_AT + 16)          // [WINDOW]: a new value is not finite
#define SENT_AT ((BEFORE_AT + 16 + (WINDOW > 1 ? WINDOW * 4 : 0) + 15) / 16 * 16)
#define QUADS (QUERIES * D / 4)            // of elements of the result
#define OWN_QUADS ((QUADS + CLUSTER - 1) / CLUSTER)
#define SENT_PARTS (CLUSTER * OWN_QUADS * 16)            // [CLUSTER][OWN_QUADS] and statistics:
#define SENT_BYTES (SENT_PARTS + CLUSTER * QUERIES * 8)  // [CLUSTER][QUERIES]
// One split's may come while that of the split before is read.
#define ALL_SENT_AT (SENT_AT + (CLUSTER > 1 ? 2 * SENT_BYTES : 0))
#define SHARED_BYTES (ALL_SENT_AT + 16)
#define SPLIT_TILES (SPLIT_TOKENS * CLUSTER / 16)
#define DYNAMIC (LANE_ROWS > 1 && CLUSTER == 1)
// The next item's tiles come behind this one's, and what is read of its token into registers, unless
// the ring is taken by sums then, or registers are full of them.
#define STREAM (DYNAMIC && !PARTS_IN_RING && EIGHTS * D <= 256)
#define EARLY_TOKEN (STREAM && WINDOW == 1)
#define FEW_TILES 8  // of a warp, in a short item
#if DYNAMIC
#define BOUNDS THREADS, 2  // CTAs of an SM: all registers that two leave may be used
#else
#define BOUNDS THREADS
#endif
#define EACH ((GROUP + 1 + WARPS) / WARPS)  // vectors of a warp: queries, key, value
#if EARLY_TOKEN
#define LOADED u16
#define AS_LOADED(x) (x)
#else
#define LOADED float
#define AS_LOADED(x) widen(x)
#endif

static_assert(D % 16 == 0 && D <= 256 && GROUP <= 16 && BLOCK % 16 == 0, "shape");
static_assert(WINDOW <= 16 && GROUP % SHARES == 0 && (WINDOW > 1 || SHARES == 1 && !GAPS), "window");
static_assert(!PARTS_IN_RING || QUERIES * D * 4 <= RING_BYTES, "a warp's part takes its ring");
static_assert(MAX_SPLITS <= 32, "a lane for each split");
static_assert(LANE_ROWS <= 32, "a lane for each row of a lane");
static_assert(PARTS_AT % 16 == 0 && (CLUSTER == 1 || SENT_BYTES % 16 == 0), "four at a time");

// Of a row with so many tokens in the cache: the first that it reads, and the tiles from there on. Later
// queries of a window have later edges, so a query may see nothing of a tile, and nothing up to it.
// Without a window the code is what it is without these lines.
#if SLIDING_WINDOW
#define EDGE(tokens) max(0, (tokens) + 1 - SLIDING_WINDOW)
#define TILES(tokens) (((tokens) + 15) / 16 - EDGE(tokens) / 16)
#define FINITE(most) ((most) == MINUS_INF ? 0.f : (most))
#define SEEN(broken) (SLIDING_WINDOW < 32 ? (broken) >> (32 - SLIDING_WINDOW) % 32 : (broken))
#else
#define SEEN(broken) (broken)
#define TILES(tokens) (((tokens) + 15) / 16)
#define FINITE(most) (most)
#endif

extern "C" __device__ const int shared_bytes = SHARED_BYTES > MIN_SHARED ? SHARED_BYTES : MIN_SHARED;

extern __shared__ __align__(128) char shared[];

#define MINUS_INF __uint_as_float(0xff800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)

__device__ __forceinline__ u32 place(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ (ROW_BYTES < 128 ? row / 2 & 3 : row & 7)) * 16);
}
__device__ __forceinline__ void add(float4& sum, float weight, float4 part) {
  sum.x += weight * part.x, sum.y += weight * part.y;
  sum.z += weight * part.z, sum.w += weight * part.w;
}
__device__ __forceinline__ bool is_finite(float v) {
  return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u;
}
#if SOFT_CAP
__device__ __forceinline__ float capped(float score) {  // in base 2; tanh(x) = 1 - 2 / (1 + e^2x)
  const float log2_e = 1.4426950408889634f, cap = __uint_as_float(SOFT_CAP) * log2_e;
  return cap - 2.f * cap / (1.f + exp2f(score * (2.f * log2_e / cap)));
}
#define SCORE(score) capped(score)
#else
#define SCORE(score) (score)
#endif
#if SINKS
#define SINK_LOGITS , const u16* sinks
#else
#define SINK_LOGITS
#endif
__device__ __forceinline__ float weight_of(float m, float of) {
  return m == MINUS_INF ? 0.f : exp2f(m - of);
}

#include "attention_kept.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BOUNDS)
    attention(const u16* qkv, KEPT* keys, KEPT* values, const i64* block_table, int columns,
              const i64* slots, const i64* positions, const i64* slot_mapping,
              const float* cos_sin, const u16* q_weight, const u16* k_weight, float eps,
              float scale_log2, u16* out, int rows, float4* splits_out, float2* splits_stats,
              u32* arrivals SCALES SINK_LOGITS) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
  const u32 base = shared_address(shared);
  const u32 ring = base + warp * RING_BYTES;

  // --- which split ---------------------------------------------------------------------------------
  struct First {  // token of a row
    i64 slot;
    int position, gap;
  };
#if GAPS
  auto first_of = [&](int row) {  // the first token of a row: others are not below its slot
    First first;
#pragma unroll
    for (int token = 0; token < WINDOW; token++) {
      const i64 slot = load_l2(slots + row * WINDOW + token);
      const int position = (int)load_l2(positions + row * WINDOW + token);
      if (token == 0 || slot < first.slot) first = First{slot, position, token};
    }
    return first;
  };
  auto tokens_of = [&](int row) { return row < rows ? first_of(row).position : 0; };
#else
  auto first_of = [&](int row) {
    return First{load_l2(slots + row * WINDOW), (int)load_l2(positions + row * WINDOW), 0};
  };
  auto tokens_of = [&](int row) { return row < rows ? (int)load_l2(positions + row * WINDOW) : 0; };
#endif
  auto splits_of = [&](int row, int tokens) {
    const int tiles = TILES(tokens);
    const int split_tiles =
        SPLIT_TILES * max(1, (tiles + SPLIT_TILES * MAX_SPLITS - 1) / (SPLIT_TILES * MAX_SPLITS));
    return row < rows ? max(1, (tiles + split_tiles - 1) / split_tiles) : 0;
  };
  auto up_to_this_lane = [&](int sum) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int before = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += before;
    }
    return sum;
  };
  int length[LANE_ROWS], own_splits = 0;  // of the rows of this lane
#pragma unroll
  for (int j = 0; j < LANE_ROWS; j++) length[j] = tokens_of(lane * LANE_ROWS + j);
#pragma unroll
  for (int j = 0; j < LANE_ROWS; j++) own_splits += splits_of(lane * LANE_ROWS + j, length[j]);
  const int until = up_to_this_lane(own_splits);  // splits of all rows up to those of this lane
  const int all_splits = __shfl_sync(~0u, until, 31), items = all_splits * ITEM_HEADS;
  struct Item {
    int row, head, share, split, splits, position, first, count;
    const i64* table;
    // Of token `lane` of the window; of the last one in all lanes behind it.
    int own_position;
    i64 own_slot;  // of the cache
#if GAPS
    int gap;  // tokens in front of the row's first one
#endif
  };
  auto head_of = [](Item& item, int number) {
    item.head = number % ITEM_HEADS / SHARES;
    item.share = number % SHARES;
  };
  auto tiles_of = [&](Item& item) {
    const int tiles = TILES(item.position);
    const int begin = tiles * item.split / item.splits;
    const int these = tiles * (item.split + 1) / item.splits - begin;
    const int end = begin + these * (rank + 1) / CLUSTER;
    item.first = begin + these * rank / CLUSTER + warp;
    item.count = item.first < end ? (end - item.first + WARPS - 1) / WARPS : 0;
#if SLIDING_WINDOW
    item.first += EDGE(item.position) / 16;
#endif
  };
  auto own_token_of = [&](Item& item) {
    const int token = item.row * WINDOW + min(lane, WINDOW - 1);
    item.own_position = (int)load_l2(positions + token);
    item.own_slot = load_l2(slot_mapping + token);
  };
#if LANE_ROWS > 1
  // An item is found in two steps, so that what the first one loads may be on its way for long: each
  // lane looks at a row that may be the item's.
  auto look = [&](int number) {
    const int which = number / ITEM_HEADS;
    int row = which;
    if (all_splits != rows)
      row = __popc(__ballot_sync(~0u, until <= which)) * LANE_ROWS + lane % LANE_ROWS;
    return row < rows ? first_of(row) : First{0, 0, 0};
  };
  auto found = [&](int number, const First& seen) {
    Item item;
    const int which = number / ITEM_HEADS;
    head_of(item, number);
    int j = 0;  // the lane that has seen it
    item.row = which, item.split = 0, item.splits = 1;
    if (all_splits != rows) {
      const int owner = __popc(__ballot_sync(~0u, until <= which));
      const int before = __shfl_sync(~0u, until - own_splits, owner);
      const int splits = lane < LANE_ROWS ? splits_of(owner * LANE_ROWS + lane, seen.position) : 0;
      const int row_until = up_to_this_lane(splits);
      j = __popc(__ballot_sync(~0u, lane < LANE_ROWS && before + row_until <= which));
      item.row = owner * LANE_ROWS + j;
      item.split = which - before - __shfl_sync(~0u, row_until - splits, j);
      item.splits = __shfl_sync(~0u, splits, j);
    }
    item.position = __shfl_sync(~0u, seen.position, j);
    item.table = block_table + __shfl_sync(~0u, seen.slot, j) * columns;
#if GAPS
    item.gap = __shfl_sync(~0u, seen.gap, j);
#endif
    tiles_of(item);
    if (WINDOW > 1) own_token_of(item);
    return item;
  };
  auto find = [&](int number) { return found(number, look(number)); };
#else
  auto find = [&](int number) {
    Item item;
    const int which = number / ITEM_HEADS;
    head_of(item, number);
    const int owner = __popc(__ballot_sync(~0u, until <= which));
    const int before = __shfl_sync(~0u, until - own_splits, owner);
    item.row = owner;
    item.split = which - before;
    item.splits = __shfl_sync(~0u, own_splits, owner);
    item.position = __shfl_sync(~0u, length[0], owner);
    tiles_of(item);
#if GAPS
    const First first = first_of(item.row);
    item.table = block_table + first.slot * columns;
    item.gap = first.gap;
#else
    item.table = block_table + load_l2(slots + item.row * WINDOW) * columns;
#endif
    if (WINDOW > 1) own_token_of(item);
    return item;
  };
#endif

  int blocks = 0;  // of the cache, for the next 32 tiles of this warp, one in each lane
  auto blocks_of = [&](const Item& item, int i) {
    const int tile = item.first + (i + lane) * WARPS;
    return i + lane < item.count ? (int)load_l2(item.table + tile * 16 / BLOCK) : 0;
  };
  int slot = 0;  // of the ring, if that goes round all items: of the tile to be read and then replaced
  auto issue = [&](const Item& item, int i) {
    if (i % 32 == 0 && (!STREAM || i > 0)) blocks = blocks_of(item, i);
    i64 block = __shfl_sync(~0u, blocks, i % 32);
    int token = (item.first + i * WARPS) * 16;
    size_t at = ((size_t)(block * BLOCK + token % BLOCK) * KV_HEADS + item.head) * D;
    u32 into = ring + (STREAM ? slot : i % ST) * STAGE_BYTES;
    if (DYNAMIC && 32 % CHUNKS == 0) {  // all is a constant away: bits of r and of j * more are apart
      const int r = lane / CHUNKS, c = lane % CHUNKS, more = 32 / CHUNKS;
      const size_t from = at + (size_t)r * KV_HEADS * D + c * (16 / KEPT_BYTES);
      const KEPT *key = keys + from, *value = values + from;
      const int valid = item.position - token - r;
#if SLIDING_WINDOW
      const int edge = EDGE(item.position) - token - r;
#else
      const int edge = 0;
#endif
      const u32 to = place(r, c);
      auto copy = [&](bool is_whole) {
#pragma unroll
        for (int j = 0; j < CHUNKS / 2; j++) {
          const bool keep = is_whole || j * more < valid && (!SLIDING_WINDOW || j * more >= edge);
          const u32 at_row = into + (to ^ place(j * more, 0));
          copy16_or_zero(at_row, key + (size_t)j * more * KV_HEADS * D, keep);
          copy16_or_zero(at_row + TILE_BYTES, value + (size_t)j * more * KV_HEADS * D, keep);
        }
      };
      if (valid + r >= 16 && edge + r <= 0)
        copy(true);
      else
        copy(false);
      return;
    }
#pragma unroll
    for (int j = 0; j < (CHUNKS + 1) / 2; j++) {
      int unit = lane + 32 * j, r = unit / CHUNKS, c = unit % CHUNKS;
      if (CHUNKS % 2 && unit >= 16 * CHUNKS) break;
      size_t from = at + (size_t)r * KV_HEADS * D + c * (16 / KEPT_BYTES);
#if SLIDING_WINDOW
      bool keep = token + r < item.position && token + r >= EDGE(item.position);
#else
      bool keep = token + r < item.position;
#endif
      copy16_or_zero(into + place(r, c), keys + from, keep);
      copy16_or_zero(into + TILE_BYTES + place(r, c), values + from, keep);
    }
  };
  auto start = [&](const Item& item) {
    for (int s = 0; s < ST; s++) {
      if (s < item.count) issue(item, s);
      commit_copies();
      if (STREAM) slot = (slot + 1) % ST;
    }
  };
  auto touch_angles = [&](const Item& item) {
    if (ROPE && WINDOW == 1 && threadIdx.x < D / 32)
      touch(cos_sin + (size_t)item.position * D + threadIdx.x * 32);
    for (int token = 0; ROPE && WINDOW > 1 && token < WINDOW; token++) {
      const int of = __shfl_sync(~0u, item.own_position, token);
      if (threadIdx.x < D / 32) touch(cos_sin + (size_t)of * D + threadIdx.x * 32);
    }
  };

  int number = blockIdx.x / CLUSTER;
  if (number >= items) return;
  const int own_quads = max(0, min(OWN_QUADS, QUADS - rank * OWN_QUADS));
  auto expect_parts = [&](int turn) {
    expect_bytes(base + ALL_SENT_AT + turn * 8, CLUSTER * (own_quads * 16 + QUERIES * 8));
  };
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      for (int turn = 0; turn < 2; turn++) init_barrier(base + ALL_SENT_AT + turn * 8);
      publish_barriers();
      for (int turn = 0; turn < 2; turn++) expect_parts(turn);
    }
    __syncwarp();
    arrive_in_cluster();  // peers may send
  }
  Item item = find(number);
  if (STREAM) blocks = blocks_of(item, 0);
  start(item);
  touch_angles(item);
#if DYNAMIC
  // What a CTA knows of its next item while it attends to one: the first two are given, of others it
  // takes the number from a counter, and looks at them, in the item before the last.
  number += gridDim.x;
  First seen{0, 0, 0};
  if (number < items) seen = look(number);
#if STREAM
  Item next = item;
  int next_blocks = 0;
#endif
#endif
  // Queries and new tokens that do not exist are zeros.
  const int zeros_at = WINDOW > 1 ? NEW_AT : Q_AT;
  for (int i = threadIdx.x; i < (PARTS_AT - zeros_at) / 16; i += THREADS)
    store_shared(base + zeros_at + i * 16, Vec{0, 0, 0, 0});
  __syncthreads();

  if (NORM && threadIdx.x < (D + 63) / 64) {
    touch(q_weight + threadIdx.x * 64);
    touch(k_weight + threadIdx.x * 64);
  }
#if E4M3
  if (threadIdx.x < (2 * KV_HEADS + 31) / 32) touch(scales + threadIdx.x * 32);
#endif
#if SINKS
  for (int i = threadIdx.x; i < (KV_HEADS * GROUP + 63) / 64; i += THREADS) touch(sinks + i * 64);
#endif

  wait_for_predecessor();
  release_successor();

#if EARLY_TOKEN
  struct Token {  // what a warp has loaded of an item's: nothing waits for it before the item begins
    i64 slot;     // of the cache
    u16 a[EACH][STEPS], b[EACH][STEPS], low_weights[STEPS], high_weights[STEPS];
    float cosines[STEPS], sines[STEPS];
    Vec value;
#if E4M3
    float key_scale, value_scale;
#endif
  };
  auto token_of = [&](const Item& item) {
    const size_t row_head = (size_t)item.row * ITEM_HEADS + item.head;
    const bool takes_new = item.split == item.splits - 1;
    const int position = item.position;
#include "attention_token_loads.cuh"
    Token token;
    token.slot = own_slot, token.value = value;
#if E4M3
    token.key_scale = scales[item.head], token.value_scale = scales[KV_HEADS + item.head];
#endif
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
#pragma unroll
      for (int n = 0; n < EACH; n++) token.a[n][j] = a[n][j], token.b[n][j] = b[n][j];
      if (ROPE) token.cosines[j] = cosines[j], token.sines[j] = sines[j];
      if (NORM) token.low_weights[j] = low_weights[j], token.high_weights[j] = high_weights[j];
    }
    return token;
  };
  Token token = token_of(item);
#endif

  int turn = 0;
  u32 passed = 0;  // turns of both barriers, by parity
  for (bool first = true, goes_on = true; goes_on; first = false) {
    // --- queries, and by the cluster's last CTA keys and values ------------------------------------
    const int position = item.position;
#if SINKS
    u16 own_sinks[EIGHTS][2];  // of this lane's queries; on their way while queries come
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        own_sinks[e][j] =
            sinks[item.head * GROUP + item.share * HEADS + (e * 8 + 2 * t + j) % HEADS];
#endif
#if WINDOW == 1
    const size_t row_head = (size_t)item.row * ITEM_HEADS + item.head, out_head = row_head;
    // This CTA attends to the new token.
    const bool takes_new = rank == CLUSTER - 1 && item.split == item.splits - 1;
#if !EARLY_TOKEN
#include "attention_token_loads.cuh"
#endif
#include "attention_token.cuh"
#else
#include "attention_window.cuh"
#endif
#if DYNAMIC
    goes_on = number < items;
    // The number of the item behind the next one, if there is a next one. It takes a while to come; but
    // who takes it early in a long item may leave others nothing to do in the end.
    u32* all_taken = arrivals + rows * ITEM_HEADS;
    u32 taken = 0;
    const bool takes_number = goes_on && threadIdx.x == 0, takes_it_early = item.count <= FEW_TILES;
    if (takes_number && takes_it_early) taken = take_number(all_taken);
    auto hand_number_on = [&] {
      *(u32*)(shared + NEXT_AT) = 2 * gridDim.x + taken;
      if (taken == items - min((int)gridDim.x, items) - 1) *all_taken = 0;  // the last, for the next launch
    };
#endif
#if STREAM
    if (goes_on) {
      next = found(number, seen);
      next_blocks = blocks_of(next, 0);
    }
#endif
    // WAR and RAW: the new queries and tokens are there (Q_AT, NEW_AT, BROKEN_AT); the sums of the item
    // before (parts, part_stats) and the number it was handed (NEXT_AT) have been read by all.
    __syncthreads();

    u32 q[D / 16][EIGHTS][2];
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
        const char* at = shared + Q_AT + (e * 8 + g) * Q_ROW + (k * 16 + 2 * t) * 2;
        q[k][e][0] = *(const u32*)at;
        q[k][e][1] = *(const u32*)(at + 16);
      }

#if E4M3
    float factors[EIGHTS][2];  // of scores
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
      for (int j = 0; j < 2; j++) factors[e][j] = factor_of(e * 8 + 2 * t + j);
#endif

    // --- tiles ---------------------------------------------------------------------------------------
    // Of queries 2t and 2t + 1 of each eight: elements g and g + 8 of every 16 of the output. Of e4m3 2g
    // and 2g + 1.
    float o[D / 16][EIGHTS][4];
    float most[EIGHTS][2], total[EIGHTS][2];
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
#pragma unroll
      for (int n = 0; n < D / 16; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][e][j] = 0.f;
#pragma unroll
      for (int j = 0; j < 2; j++) most[e][j] = MINUS_INF, total[e][j] = 0.f;
#if SINKS
      // Once for all warps, CTAs and splits, and in one lane, as the lanes' totals are added up.
      const bool counts_sinks = takes_new && warp == WARPS - 1;
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (counts_sinks) {
          most[e][j] = widen(own_sinks[e][j]) * 1.4426950408889634f;
          total[e][j] = g == 0 ? 1.f : 0.f;
        }
#endif
    }

    // Tokens from `valid` on weigh nothing; of the new ones those behind a query's own, and in front of
    // the row's first one, where a query sees its own. A tile of one token has `rows` 0: its row stands
    // for all. With a sliding window, those in front of a query's edge weigh nothing either.
    auto attend = [&](u32 tile, u32 value_tile, int rows, int valid, bool is_new) {
      float s[EIGHTS][4];  // tokens g and g + 8
      u32 kept[4];         // of two chunks that are next to each other
#pragma unroll
      for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[e][j] = 0.f;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        u32 a[4];
        load_keys(a, kept, tile, (lane / 8 % 2 * 8 + lane % 8) & rows, k, lane / 16);
#pragma unroll
        for (int e = 0; Q_IN_SHARED && e < EIGHTS; e += 2) {
          u32 b[4];
          load_matrices(b, base + Q_AT + ((e + lane / 16) * 8 + lane % 8) * Q_ROW +
                               (k * 2 + lane / 8 % 2) * 16);
          MULTIPLY(s[e], a[0], a[1], a[2], a[3], b[0], b[1]);
          if (e + 1 < EIGHTS) MULTIPLY(s[e + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; !Q_IN_SHARED && e < EIGHTS; e++)
          MULTIPLY(s[e], a[0], a[1], a[2], a[3], q[k][e][0], q[k][e][1]);
      }
      float high[EIGHTS][2];
      bool rises = false;
#pragma unroll
      for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& upper = s[e][j];
          float& lower = s[e][j + 2];
          const int seen = WINDOW > 1 && is_new ? (e * 8 + 2 * t + j) / HEADS + 1 : valid;
          upper = g < seen ? SCORE(upper * FACTOR) : MINUS_INF;
          lower = g + 8 < seen ? SCORE(lower * FACTOR) : MINUS_INF;
#if SLIDING_WINDOW
          int before = WINDOW > 1 ? (e * 8 + 2 * t + j) / HEADS : 0;  // of the query's tokens
#if GAPS
          if (!is_new) before = max(0, before - item.gap);
#endif
          const int edge = before + (is_new ? 0 : valid) + 1 - SLIDING_WINDOW;
          if (g < edge) upper = MINUS_INF;
          if (g + 8 < edge) lower = MINUS_INF;
#endif
#if GAPS
          const int unseen = is_new ? min(item.gap, (e * 8 + 2 * t + j) / HEADS) : 0;
          if (g < unseen) upper = MINUS_INF;
          if (g + 8 < unseen) lower = MINUS_INF;
#endif
          float m = fmaxf(upper, lower);
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
          rises |= m > most[e][j];
          high[e][j] = fmaxf(m, most[e][j]);
        }
      if (__any_sync(~0u, rises)) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float keep = weight_of(most[e][j], high[e][j]);
            most[e][j] = high[e][j];
            total[e][j] *= keep;
#pragma unroll
            for (int n = 0; n < D / 16; n++) o[n][e][j] *= keep, o[n][e][j + 2] *= keep;
          }
      }
      u32 p[EIGHTS][2];
#pragma unroll
      for (int e = 0; e < EIGHTS; e++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          s[e][j] = exp2f(s[e][j] - FINITE(most[e][j % 2]));
          total[e][j % 2] += s[e][j];
        }
        // From a token's heads to a head's tokens.
        p[e][0] = transpose(PACK(s[e][0], s[e][1]));
        p[e][1] = transpose(PACK(s[e][2], s[e][3]));
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 a[4];
        load_values(a, kept, value_tile, (lane / 16 * 8 + lane % 8) & rows, n, lane / 8 % 2);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) MULTIPLY(o[n][e], a[0], a[1], a[2], a[3], p[e][0], p[e][1]);
      }
    };

#if STREAM
    // The ring never runs empty: behind this item's tiles are the next one's. Of fewer than ST tiles
    // the others are empty, so that the next one's first ST always take the places of this one's last.
    const int count = max(item.count, ST);
    auto advance = [&](int i) {  // over tile i
      const int ahead = i + ST - count;  // of the next item's tiles
      if (ahead < 0) {
        issue(item, i + ST);
      } else if (goes_on) {
        if (ahead == 0) blocks = next_blocks;
        if (ahead < next.count) issue(next, ahead);
      }
      commit_copies();
      slot = (slot + 1) % ST;
    };
    for (int i = 0; i < item.count; i++) {
      await_copies<ST - 1>();
      __syncwarp();
      const u32 tile = ring + slot * STAGE_BYTES;
      attend(tile, tile + TILE_BYTES, 15, position - (item.first + i * WARPS) * 16, false);
      __syncwarp();
      advance(i);
    }
#pragma unroll 1
    for (int i = item.count; i < ST; i++) advance(i);
#else
    for (int i = 0; i < item.count; i++) {
      await_copies<ST - 1>();
      __syncwarp();
      const u32 tile = ring + i % ST * STAGE_BYTES;
      attend(tile, tile + TILE_BYTES, 15, position - (item.first + i * WARPS) * 16, false);
      __syncwarp();
      if (i + ST < item.count) issue(item, i + ST);
      commit_copies();
    }
#endif
    if (takes_new && warp == WARPS - 1) {
      attend(base + NEW_AT, base + NEW_VALUES_AT, NEW_ROWS - 1, 1, true);
      if (WINDOW > 1) {
        // Who sees a value that is not finite gets none either; for the others it was a zero.
        u32 broken =
            __ballot_sync(~0u, lane < WINDOW && ((const u32*)(shared + BROKEN_AT))[lane % WINDOW]);
#if GAPS
        broken &= ~0u << item.gap;
#endif
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (SEEN(broken << (31 - min((e * 8 + 2 * t + j) / HEADS, 31)))) total[e][j] = NOT_A_NUMBER;
      }
    }

    // The next split is on its way while this one is summed up, unless the sums take its place.
    const int split = item.split, splits = item.splits;
#if DYNAMIC
    if (takes_number) {
      if (takes_it_early)
        hand_number_on();
      else
        taken = take_number(all_taken);
    }
    if (goes_on) {
#if STREAM
      item = next;
#else
      item = found(number, seen);
      if (!PARTS_IN_RING) start(item);
#endif
#if EARLY_TOKEN
      token = token_of(item);
#else
      touch_angles(item);
#endif
    }
#else
    number += gridDim.x / CLUSTER;
    goes_on = number < items;
    if (goes_on) {
      item = find(number);
      if (!PARTS_IN_RING) {
        start(item);
        touch_angles(item);
      }
    }
#endif

    // --- the warps' parts, then the cluster's, then the KV splits' -----------------------------------
    float* parts = (float*)(shared + (PARTS_IN_RING ? 0 : PARTS_AT));
    float2* part_stats = (float2*)(shared + PART_STATS_AT);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) total[e][j] += __shfl_xor_sync(~0u, total[e][j], d);
        const int r = e * 8 + 2 * t + j;
        if (r >= QUERIES) continue;
        float* into = parts + (warp * QUERIES + r) * D + warp * (PART_GAP / 4) + FIRST_OF(g);
#pragma unroll
        for (int n = 0; n < D / 16; n++)
          into[n * 16] = o[n][e][j], into[n * 16 + SECOND] = o[n][e][j + 2];
        if (g == 0) part_stats[warp * QUERIES + r] = make_float2(most[e][j], total[e][j] * VALUE_FACTOR);
      }
#if DYNAMIC
    if (takes_number && !takes_it_early) hand_number_on();
#endif
    // RAW and WAR: the warps' parts and the next number are there; queries and new tokens have been read
    // by all. Rings need no barrier: each is its warp's own, unless parts take their place.
    __syncthreads();
#if DYNAMIC
    if (goes_on) {
      number = *(const u32*)(shared + NEXT_AT);
      if (number < items) seen = look(number);
    }
#endif
    // A query's place in the output.
    auto at_of = [](int quad) {
      return WINDOW == 1 ? quad * 4
                         : quad / (HEADS * D / 4) * (KV_HEADS * GROUP * D) + quad % (HEADS * D / 4) * 4;
    };
    u16* row_out = out + out_head * HEADS * D;
    float4* split_out = splits_out + (row_head * MAX_SPLITS + split) * QUADS;
    float2* split_stats = splits_stats + (row_head * MAX_SPLITS + split) * QUERIES;
    auto emit = [&](int quad, float4 sum, float m, float l) {
      if (splits == 1) {
        *(u32*)(row_out + at_of(quad)) = pack(sum.x / l, sum.y / l);
        *(u32*)(row_out + at_of(quad) + 2) = pack(sum.z / l, sum.w / l);
      } else {
        split_out[quad] = sum;
        if (quad % (D / 4) == 0) split_stats[quad / (D / 4)] = make_float2(m, l);
      }
    };
    const u32 sent = base + SENT_AT + turn * SENT_BYTES, all_sent = base + ALL_SENT_AT + turn * 8;
    if (CLUSTER > 1 && first) await_cluster();
    for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
      const int r = quad / (D / 4);
      float m = MINUS_INF, l = 0.f;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; w++) m = fmaxf(m, part_stats[w * QUERIES + r].x);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 stat = part_stats[w * QUERIES + r];
        const float weight = weight_of(stat.x, m);
        l += weight * stat.y;
        add(sum, weight, ((const float4*)parts)[w * (QUADS + PART_GAP / 16) + quad]);
      }
      if (CLUSTER == 1) {
        emit(quad, sum, m, l);
      } else {
        const int owner = quad / OWN_QUADS;
        send(peer_address(sent + (rank * OWN_QUADS + quad % OWN_QUADS) * 16, owner), sum,
             peer_address(all_sent, owner));
        if (quad % (D / 4) == 0)
          for (int peer = 0; peer < CLUSTER; peer++)
            send(peer_address(sent + SENT_PARTS + (rank * QUERIES + r) * 8, peer), make_float2(m, l),
                 peer_address(all_sent, peer));
      }
    }
    if (PARTS_IN_RING && goes_on) {
      __syncthreads();
      start(item);
      if (!DYNAMIC) touch_angles(item);
    }
    if (CLUSTER > 1) {
      await_sent(all_sent, passed);
      const char* all = shared + SENT_AT + turn * SENT_BYTES;
      for (int own = threadIdx.x; own < own_quads; own += THREADS) {
        const int quad = rank * OWN_QUADS + own, r = quad / (D / 4);
        float m = MINUS_INF, l = 0.f;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        const float2* stats = (const float2*)(all + SENT_PARTS) + r;
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) m = fmaxf(m, stats[c * QUERIES].x);
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
          const float weight = weight_of(stats[c * QUERIES].x, m);
          l += weight * stats[c * QUERIES].y;
          add(sum, weight, ((const float4*)all)[c * OWN_QUADS + own]);
        }
        emit(quad, sum, m, l);
      }
      if (threadIdx.x == 0) expect_parts(turn);
      turn ^= 1;
      passed ^= turn == 0;
    }

    if (splits > 1) {
      u32& before = *(u32*)(shared + BEFORE_AT);
      __syncthreads();
      if (threadIdx.x == 0) {
        before = add_one_in_order(arrivals + row_head);
        if (before == splits * CLUSTER - 1) arrivals[row_head] = 0;  // for the next launch
      }
      __syncthreads();
      if (before == splits * CLUSTER - 1) {
        // Lane c has the statistics of split c.
        float* weights = (float*)(shared + WEIGHTS_AT);  // [QUERIES][MAX_SPLITS]
        for (int r = warp; r < QUERIES; r += WARPS) {
          float2 stat = make_float2(MINUS_INF, 0.f);
          if (lane < splits) stat = load_l2(splits_stats + (row_head * MAX_SPLITS + lane) * QUERIES + r);
          float m = stat.x;
#pragma unroll
          for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
          const float weight = weight_of(stat.x, m);
          float l = weight * stat.y;
#pragma unroll
          for (int d = 16; d; d >>= 1) l += __shfl_xor_sync(~0u, l, d);
          if (lane < MAX_SPLITS) weights[r * MAX_SPLITS + lane] = weight / l;
        }
        __syncthreads();
        const float4* from = splits_out + row_head * MAX_SPLITS * QUADS;
        for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
          float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
          for (int c = 0; c < splits; c++)
            add(sum, weights[quad / (D / 4) * MAX_SPLITS + c], load_l2(from + (size_t)c * QUADS + quad));
          *(u32*)(row_out + at_of(quad)) = pack(sum.x, sum.y);
          *(u32*)(row_out + at_of(quad) + 2) = pack(sum.z, sum.w);
        }
      }
    }
  }
}
