// First linear layers and activation: each CTA has the same number of rows of the chosen experts'
// weights, gated pairs of rows, and each of its warps takes one after the other. Two steps of loads are
// on their way, from one row to the next as well.

__device__ __forceinline__ float activate(float v) {
#if FUNCTION == 0
  return v / (1.f + __expf(-v));
#elif FUNCTION == 1
  return v / (1.f + __expf(-1.702f * v));
#elif FUNCTION == 2
  return 0.5f * v * (1.f + erff(v * 0.7071067811865476f));
#elif FUNCTION == 3
  const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + (1.f - 2.f / (__expf(2.f * inner) + 1.f)));
#else
  v = v < 0.f ? 0.f : v;
  return FUNCTION == 4 ? v * v : v;
#endif
}

// Where a warp is among its rows of weights.
struct UpPlace {
  int item, step = 0;
  __device__ __forceinline__ bool advance() {  // whether it goes on to another row
    const bool ends = ++step == UP_STEPS;
    if (ends) step = 0, item += WARPS;
    return ends;
  }
};

struct Up {
  const u16* b1;
  float limit, offset;
  u32 *activated, launch;
  int last;
  UpPlace at, ahead;       // what is computed, and what is loaded
  const u16* row_ahead;
  size_t half_ahead;       // from a row of the gate to that of the other half
  float gate, other, gate_bias, other_bias;

  __device__ __forceinline__ static bool inside(int step, int u, int& vector) {
    vector = (step * DEPTH + u) * 32 + (int)(threadIdx.x % 32);
    return VECTORS % (32 * DEPTH) == 0 || vector < VECTORS;
  }

  __device__ __forceinline__ void load(Vec (&v)[LOADS]) {
    if (ahead.item >= last) return;
    if (ahead.step == 0) {
      const Slot& slot = slots()[ahead.item / INNER];
      row_ahead = slot.up + (size_t)(ahead.item % INNER) * H;
      half_ahead = (size_t)(SHARED && slot.expert >= EXPERTS ? SHARED * INNER : INNER) * H;
    }
    int vector;
#pragma unroll
    for (int u = 0; u < DEPTH; u++)
      if (inside(ahead.step, u, vector)) {
        v[u] = load_weights(row_ahead + vector * 8);
        if (GATED) v[(LOADS - DEPTH) + u] = load_weights(row_ahead + half_ahead + vector * 8);
      }
    ahead.advance();
  }

  __device__ __forceinline__ void use(const Vec (&v)[LOADS]) {
    if (at.item >= last) return;
    const Slot& slot = slots()[at.item / INNER];
    const int row = live_rows()[at.item / ROW_WORDS], i = at.item % INNER;
    if (at.step == 0) {
      gate = other = gate_bias = other_bias = 0.f;
      if (b1 && slot.expert < EXPERTS) {
        const u16* of_expert = b1 + (size_t)slot.expert * (1 + GATED) * INNER + i;
        gate_bias = widen(of_expert[0]);
        if (GATED) other_bias = widen(of_expert[INNER]);
      }
    }
    const u32 x = shared_address(shared + X_AT) + row * H * 2;
    int vector;
#pragma unroll
    for (int u = 0; u < DEPTH; u++)
      if (inside(at.step, u, vector)) {
        const Vec normed = load_shared(x + vector * 16);
        add_products(gate, v[u], normed);
        if (GATED) add_products(other, v[(LOADS - DEPTH) + u], normed);
      }
    const int item = at.item;
    if (!at.advance()) return;
    float out = sum_of_warp(gate) + gate_bias, factor = 1.f;
    if (GATED) factor = sum_of_warp(other) + other_bias;
    if (HAS_LIMIT) {
      out = min(out, limit);
      factor = GATED ? min(max(factor, -limit), limit) : factor;
    }
    out = activate(out) * (GATED ? factor + offset : 1.f) * slot.weight;
    if (threadIdx.x % 32 == 0)
      publish_activation(activated + row * ROW_WORDS + item % ROW_WORDS, out, launch);
  }

  // The first loads, before the weights of the slots are there.
  __device__ __forceinline__ void begin(int live, Vec (&a)[LOADS], Vec (&b)[LOADS]) {
    const i64 all = (i64)live * ROW_WORDS;
    last = (int)(all * (blockIdx.x + 1) / CTAS);
    at.item = ahead.item = (int)(all * blockIdx.x / CTAS) + (int)threadIdx.x / 32;
    load(a);
    load(b);
  }
  __device__ __forceinline__ void finish(Vec (&a)[LOADS], Vec (&b)[LOADS]) {
    while (at.item < last) {
      use(a);
      load(a);
      use(b);
      load(b);
    }
  }
};

// Dead rows have words too.
__device__ __forceinline__ void publish_dead_rows(u32* activated, u32 live_mask, u32 launch) {
  for (int row = 0; row < ROWS; row++)
    if (!(live_mask >> row & 1))
      for (int i = blockIdx.x * THREADS + threadIdx.x; i < ROW_WORDS; i += CTAS * THREADS)
        publish_activation(activated + row * ROW_WORDS + i, 0.f, launch);
}
