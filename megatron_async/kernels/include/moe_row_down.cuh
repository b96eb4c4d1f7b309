// Second linear layers, added up over a row's experts and to the residual stream. A warp has a column of
// the output at a time, over all experts of a row; the first steps of its loads are on their way before
// the activations are there. A CTA has tiles blockIdx.x, blockIdx.x + CTAS, ... of TILE columns.

// Where a warp is among its columns: column by column, and each for all live rows.
struct DownPlace {
  int tile, column = 0, row = 0, step = 0;
  __device__ __forceinline__ void advance(int live) {
    if (++step < DOWN_STEPS) return;
    step = 0;
    if (++row < live) return;
    row = 0;
    if (++column < WARP_COLUMNS) return;
    column = 0;
    tile += CTAS;
  }
  __device__ __forceinline__ int in_tile() const { return column * WARPS + (int)threadIdx.x / 32; }
};

struct Down {
  const u16 *b2, *residual, *next_weight;
  u16 *out, *scaled;
  float2* stats_out;
  int live;
#if W8 || W4
  DownScales scales;
#endif
  DownPlace at, ahead;
  float sum = 0.f, added = 0.f, weight = 0.f;  // `added` and `weight` are of this thread's element
  u32 parity = 0;

  __device__ __forceinline__ float* totals() const {
    return (float*)(shared + TOTALS_AT) + parity * ROWS * TILE;
  }
  __device__ __forceinline__ static bool inside(int step, int u, int& vector) {
    vector = (step * LOADS + u) * 32 + (int)(threadIdx.x % 32);
    return ROW_VECTORS % (32 * LOADS) == 0 || vector < ROW_VECTORS;
  }

  __device__ __forceinline__ void load(Loaded& into) {
    if (ahead.tile >= TILES || live == 0) return;
    const Slot* of_row = slots() + ahead.row * SLOTS;
    const int column = ahead.tile * TILE + ahead.in_tile();
    int vector;
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (inside(ahead.step, u, vector)) {
        const Slot& slot = of_row[vector / INNER_VECTORS];
        const int stride = (SHARED && slot.expert >= EXPERTS ? SHARED : 1) * DOWN_WIDTH;
        into[u] =
            load_weights(slot.down + (size_t)column * stride + vector % INNER_VECTORS * VECTOR_WIDTH);
#if W8 || W4
        into.scale[u] = scales.of(slot.expert, column, vector % INNER_VECTORS);
#endif
      }
    ahead.advance(live);
  }

  __device__ __forceinline__ void use(const Loaded& from) {
    if (at.tile >= TILES) return;
    const u32 x = shared_address(shared + ACTIVATED_AT) + at.row * ROW_WORDS * 2;
    int vector;
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (inside(at.step, u, vector)) {
#if W8 || W4
        add_products(sum, from[u], from.scale[u], load_inputs(x + vector * IN_VECTOR * 2));
#else
        add_products(sum, from[u], load_shared(x + vector * 16));
#endif
      }
    const DownPlace done = at;
    at.advance(live);
    if (at.step != 0) return;
    const float total = sum_of_warp(sum);
    sum = 0.f;
    if (threadIdx.x % 32 == 0) totals()[live_rows()[done.row] * TILE + done.in_tile()] = total;
    if (at.tile != done.tile) finish(done.tile);
  }

  // What is added to this thread's element of a tile, ahead of its sum.
  __device__ __forceinline__ void prepare(int tile) {
    const int row = threadIdx.x / TILE, column = tile * TILE + threadIdx.x % TILE;
    if (row >= ROWS || tile >= TILES) return;
    added = residual ? widen(load_l2(residual + row * H + column)) : 0.f;
    if (next_weight) weight = widen(next_weight[column]);
    if (!b2) return;
    for (int place = 0; place < live; place++)
      if (live_rows()[place] == row)
        for (int k = 0; k < TOP_K; k++) {
          const Slot& slot = slots()[place * SLOTS + k];
          added += slot.weight * widen(b2[(size_t)slot.expert * H + column]);
        }
  }

  // All warps have put their columns' totals of a tile down.
  __device__ __forceinline__ void finish(int tile) {
    __syncthreads();
    const int row = threadIdx.x / TILE, column = threadIdx.x % TILE;
    if (threadIdx.x < (ROWS * TILE + 31) / 32 * 32) {
      const bool is_own = row < ROWS;
      float v = is_own ? totals()[row * TILE + column] + added : 0.f;
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
    prepare(tile + CTAS);
    parity ^= 1;
  }

  __device__ __forceinline__ void run(const u32* activated, u32 launch) {
    at.tile = ahead.tile = blockIdx.x;
    Loaded a, b;
    load(a);
    load(b);
    prepare(blockIdx.x);
    for (int i = threadIdx.x; i < 2 * ROWS * TILE; i += THREADS)
      ((float*)(shared + TOTALS_AT))[i] = 0.f;  // what dead rows have
    await_activations(activated, launch);
    __syncthreads();
    if (live == 0)
      for (int tile = blockIdx.x; tile < TILES; tile += CTAS) finish(tile);
    else
      while (at.tile < TILES) {
        use(a);
        load(a);
        use(b);
        load(b);
      }
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
        u32* into = (u32*)(shared + ACTIVATED_AT) + i * 2;
        into[0] = v[k].x >> 16 | (v[k].y & 0xffff0000u);
        into[1] = v[k].z >> 16 | (v[k].w & 0xffff0000u);
      }
    }
  }
};
