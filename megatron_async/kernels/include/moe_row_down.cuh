// Second linear layers, added up over a row's experts and to the residual stream. A warp has a column of
// the output at a time, over all experts of a row; the first steps of its loads are on their way before
// the activations are there. A CTA has tiles blockIdx.x, blockIdx.x + CTAS, ... of TILE columns.

// Where a warp is among its columns: column by column, and each for all live rows.
struct DownPlace {
  int tile, column = 0, row = 0, step = 0;
  // Behind load or use WHICH, of which the second has a row's second step. Returns whether a row is over.
  template <int WHICH>
  __device__ __forceinline__ bool advance(int live) {
    if (DOWN_STEPS == 2 ? WHICH == 0 : DOWN_STEPS > 2 && ++step < DOWN_STEPS) return false;
    step = 0;
    next_row(live);
    return true;
  }
  __device__ __forceinline__ void next_row(int live) {
    if (ROWS > 1 && ++row < live) return;
    row = 0;
    if (++column < WARP_COLUMNS) return;
    column = 0;
    tile += CTAS;
  }
  __device__ __forceinline__ int in_tile() const { return column * WARPS + (int)threadIdx.x / 32; }
};

#if SUMS
static_assert(ROWS * H <= SENT_WORDS && CTAS <= LAUNCHES, "room for all words, and an entry for each CTA");

// The sum of an element over all ranks, in their order: each rank's is rounded, and sent to all others.
struct RankSum {
  int place;
  u32 number;  // of the launch
  const u64* received;
  u64* to[8];

  __device__ __forceinline__ size_t word(int sender, int element) const {
    return ((size_t)(number & 1) * RANKS + sender) * SENT_WORDS + element;
  }
  __device__ __forceinline__ void send(int element, u16 own) const {
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++)
      if (peer != place) publish_to_peer(to[peer] + word(place, element), peer_word(own, number));
  }
  __device__ __forceinline__ float receive(int element, u16 own) const {
    u64 got[RANKS];
    bool is_missing = true;
    while (is_missing) {
      is_missing = false;
#pragma unroll
      for (int from = 0; from < RANKS; from++) {
        got[from] = from == place ? peer_word(own, number) : poll_peer(received + word(from, element));
        is_missing |= !is_of(got[from], number);
      }
      if (is_missing) wait_a_little();
    }
    float sum = 0.f;
#pragma unroll
    for (int from = 0; from < RANKS; from++) sum += widen((u16)got[from]);
    return sum;
  }
};
#endif

struct Down {
#if SUMS
  RankSum ranks;
#endif
  const u16 *b2, *residual, *next_weight;
  u16 *out, *scaled;
  float2* stats_out;
  int live;
#if W8 || W4
  DownScales scales;
#endif
  DownPlace at, ahead;
  DownSums sums;
  float added = 0.f, weight = 0.f;  // of this thread's element
#if SUMS
  float stream = 0.f;  // of it, the residual; `added` is what this rank adds to its own sums
  // Of the element of the tile before, whose sums were sent.
  int sent_tile = -1;
  float sent_stream = 0.f, sent_weight = 0.f;
  u16 sent_own = 0;
#endif
  u32 parity = 0;

  __device__ __forceinline__ float* totals() const {
    return (float*)(shared + TOTALS_AT) + parity * ROWS * TILE;
  }
  __device__ __forceinline__ static int stride(int expert) {
    return (SHARED && expert >= EXPERTS ? SHARED : 1) * DOWN_WIDTH;
  }
  template <int WHICH>
  __device__ __forceinline__ void load(Loaded& into) {
    if (ahead.tile >= TILES || live == 0) return;
    const Slot* of_row = slots() + ahead.row * SLOTS;
    const int column = ahead.tile * TILE + ahead.in_tile();
    const Vectors<ROW_VECTORS, LOADS> row(ahead.step, WHICH);
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (row.has(u)) {
        // A lane's slot is the first lane's or, of slots that are not shorter than a warp, the next one.
        const int begin = row.first(u) / INNER_VECTORS;
        const int slot = INNER_VECTORS < 32 ? row.of(u) / INNER_VECTORS
                                            : begin + (row.of(u) >= (begin + 1) * INNER_VECTORS);
        const int first = row.first(u) - slot * INNER_VECTORS;  // of the slot, without the lane
        const Weight* of_column = of_row[slot].down + (size_t)column * stride(of_row[slot].expert);
        into[u] = load_weights(of_column + threadIdx.x % 32 * VECTOR_WIDTH + first * VECTOR_WIDTH);
#if W8 || W4
        into.scale[u] = scales.of(of_row[slot].expert, column, first);
#endif
      } else if (DOWN_ON_TENSOR_CORES && row.has_some(u)) {
        clear(into, u);
      }
    ahead.advance<WHICH>(live);
  }

  template <int WHICH>
  __device__ __forceinline__ void use(const Loaded& from) {
    if (at.tile >= TILES) return;
    const u32 x = shared_address(shared + ACTIVATED_AT) + at.row * ROW_WORDS * 2;
    const Vectors<ROW_VECTORS, LOADS> row(at.step, WHICH);
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (DOWN_ON_TENSOR_CORES ? row.has_some(u) : row.has(u))
        sums.add<1, true>(from, u, 0, load_inputs<ROW_VECTORS>(x, row.last_or(u)));
    const DownPlace done = at;
    if (!at.advance<WHICH>(live)) return;
    const float total = sums.total(0);
    sums.clear();
    if (threadIdx.x % 32 == 0) totals()[live_rows()[done.row] * TILE + done.in_tile()] = total;
    if (at.tile != done.tile) finish(done.tile);
  }

  // What is added to this thread's element of a tile, ahead of its sum.
  __device__ __forceinline__ void prepare(int tile) {
    const int row = threadIdx.x / TILE, column = tile * TILE + threadIdx.x % TILE;
    if (row >= ROWS || tile >= TILES) return;
#if SUMS
    added = 0.f, stream = widen(load_l2(residual + row * H + column));
#else
    added = residual ? widen(load_l2(residual + row * H + column)) : 0.f;
#endif
    if (next_weight) weight = widen(next_weight[column]);
    if (!b2) return;
    for (int place = 0; place < live; place++)
      if (live_rows()[place] == row)
        for (int k = 0; k < TOP_K; k++) {
          const Slot& slot = slots()[place * SLOTS + k];
          added += slot.weight * widen(b2[(size_t)slot.expert * H + column]);
        }
  }

  // Puts this thread's element of a tile into the stream, with the tile's statistics; of the first warps.
  __device__ __forceinline__ void put(int tile, float v, float weight) {
    const int row = threadIdx.x / TILE, column = threadIdx.x % TILE;
    const bool is_own = row < ROWS;
    const u16 rounded = narrow(v);
    v = widen(rounded);
    const size_t element = (size_t)row * H + tile * TILE + column;
    if (is_own) out[element] = rounded;
    if (stats_out) {
      const float mean = next_weight ? 0.f : sum_of_warp(v, TILE) / (float)TILE;
      const float square = sum_of_warp((v - mean) * (v - mean), TILE);
      if (is_own && next_weight) scaled[element] = narrow(v * weight);
      if (is_own && column == 0) stats_out[row * TILES + tile] = make_float2(mean, square);
    }
  }

  // All warps have put their columns' totals of a tile down.
  __device__ __forceinline__ void finish(int tile) {
    __syncthreads();
    const int row = threadIdx.x / TILE, column = threadIdx.x % TILE;
    if (threadIdx.x < (ROWS * TILE + 31) / 32 * 32) {
      const float v = row < ROWS ? totals()[row * TILE + column] + added : 0.f;
#if SUMS
      if (row < ROWS) ranks.send(row * H + tile * TILE + column, narrow(v));
      add_up();
      sent_tile = tile, sent_own = narrow(v), sent_stream = stream, sent_weight = weight;
#else
      put(tile, v, weight);
#endif
    }
    prepare(tile + CTAS);
    parity ^= 1;
  }

#if SUMS
  // What was sent last, with what the other ranks have sent of it.
  __device__ __forceinline__ void add_up() {
    const int row = threadIdx.x / TILE, element = row * H + sent_tile * TILE + threadIdx.x % TILE;
    if (sent_tile < 0) return;
    put(sent_tile, row < ROWS ? ranks.receive(element, sent_own) + sent_stream : 0.f, sent_weight);
  }
#endif

  __device__ __forceinline__ void run(const u32* activated, u32 launch) {
    at.tile = ahead.tile = blockIdx.x;
    Loaded a, b;
    load<0>(a);
    load<1>(b);
    sums.clear();
    prepare(blockIdx.x);
    for (int i = threadIdx.x; i < 2 * ROWS * TILE; i += THREADS)
      ((float*)(shared + TOTALS_AT))[i] = 0.f;  // what dead rows have
    await_activations(activated, launch);
    __syncthreads();
    if (live == 0)
      for (int tile = blockIdx.x; tile < TILES; tile += CTAS) finish(tile);
    else
      while (at.tile < TILES) {
        use<0>(a);
        load<0>(a);
        use<1>(b);
        load<1>(b);
      }
#if SUMS
    if (threadIdx.x < (ROWS * TILE + 31) / 32 * 32) add_up();
#endif
  }

  // Those of live rows into shared memory.
  __device__ __forceinline__ void await_activations(const u32* activated, u32 launch) const {
    constexpr int EACH = ROW_WORDS / 4;
    const int all = live * EACH;
    auto words = [&](int i) { return activated + live_rows()[i / EACH] * ROW_WORDS + i % EACH * 4; };
    for (int first = threadIdx.x; first < all && blockIdx.x < TILES; first += THREADS * POLLS) {
      Vec v[POLLS];
#pragma unroll
      for (int k = 0; k < POLLS; k++)
        if (first + k * THREADS < all) v[k] = poll_vec(words(first + k * THREADS));
#pragma unroll
      for (int k = 0; k < POLLS; k++) {
        const int i = first + k * THREADS;
        if (i >= all) continue;
        while (!has_arrived(v[k], launch)) wait_a_little(), v[k] = poll_vec(words(i));
        put_activations(i / EACH, i % EACH, upper_halves(v[k].x, v[k].y), upper_halves(v[k].z, v[k].w));
      }
    }
  }
};
