// First linear layers and activation of rows of the chosen experts' weights, gated pairs of rows: items.
// The first of them are dealt out, to each CTA the same number, and each of its warps takes one after
// the other. The last CLAIMED sixteenths go to who comes first: a warp whose own are over adds one to a
// counter, at its loads of an item for the next one. Two steps of loads are on their way, from one item
// to the next as well. Who computes an item does not change its bits.

// A step of an item.
struct UpPlace {
  int item, step;
};

struct Up {
  const u16* b1;
  float limit, offset;
  u32 *activated, *claims, launch;
  int all, dealt_out, own_end;  // items: of the launch, of them not claimed, and where this CTA's end
  UpPlace ahead;           // what is loaded next
  u32 claim;               // lane 0's, perhaps on its way
  const Weight* row_ahead;
  size_t half_ahead;       // from a row of the gate to that of the other half
  UpSums sums;  // of the gate and of the other half
  float gate_bias, other_bias;
#if W8 || W4
  UpScales scales;
#endif


  __device__ __forceinline__ void claim_next() {
    if (CLAIMED && threadIdx.x % 32 == 0) claim = add_one(claims);
  }
  __device__ __forceinline__ int claimed() {
    return CLAIMED ? min(dealt_out + (int)__shfl_sync(~0u, claim, 0), all) : all;
  }

  // Loads a step, and says which.
  template <int WHICH>
  __device__ __forceinline__ UpPlace load(Loaded& into) {
    const UpPlace loaded = ahead;
    if (loaded.item >= all) return loaded;
    const bool has_own = loaded.item + WARPS < own_end;
    if (UP_STEPS == 2 ? WHICH == 0 : loaded.step == 0) {
      const Slot& slot = slots()[loaded.item / INNER];
      row_ahead = slot.up + (size_t)(loaded.item % INNER) * UP_WIDTH;
      half_ahead = (size_t)(SHARED && slot.expert >= EXPERTS ? SHARED * INNER : INNER) * UP_WIDTH;
#if W8 || W4
      scales.begin(slot.expert, loaded.item % INNER);
#endif
      if (!has_own) claim_next();
    }
    const Vectors<UP_VECTORS, DEPTH> row(loaded.step, WHICH);
    const Weight* own = row_ahead + threadIdx.x % 32 * VECTOR_WIDTH;
#pragma unroll
    for (int u = 0; u < DEPTH; u++)
      if (row.has(u)) {
        into[u] = load_weights(own + row.first(u) * VECTOR_WIDTH);
        if (GATED) into[(LOADS - DEPTH) + u] = load_weights(own + half_ahead + row.first(u) * VECTOR_WIDTH);
#if W8 || W4
        if (UP_BY_ROW && u) continue;  // the first is that of all
        into.scale[u] = scales.of(row.first(u), false);
        if (GATED) into.scale[(LOADS - DEPTH) + u] = scales.of(row.first(u), true);
#endif
      } else if (UP_ON_TENSOR_CORES && row.has_some(u)) {
        clear(into, u);
        if (GATED) clear(into, (LOADS - DEPTH) + u);
      }
    if (UP_STEPS == 2 ? WHICH : ++ahead.step == UP_STEPS)
      ahead.step = 0, ahead.item = has_own ? loaded.item + WARPS : claimed();
    return loaded;
  }

  template <int WHICH>
  __device__ __forceinline__ void use(const Loaded& from, UpPlace at) {
    if (at.item >= all) return;
    const Slot& slot = slots()[at.item / INNER];
    const int row = ROWS == 1 ? 0 : live_rows()[at.item / ROW_WORDS], i = at.item % INNER;
    if (UP_STEPS == 2 ? WHICH == 0 : at.step == 0) {
      sums.clear();
      gate_bias = other_bias = 0.f;
      if (b1 && slot.expert < EXPERTS) {
        const u16* of_expert = b1 + (size_t)slot.expert * (1 + GATED) * INNER + i;
        gate_bias = widen(of_expert[0]);
        if (GATED) other_bias = widen(of_expert[INNER]);
      }
    }
    const u32 x = shared_address(shared + X_AT) + row * H * 2;
    const Vectors<UP_VECTORS, DEPTH> of_row(at.step, WHICH);
#pragma unroll
    for (int u = 0; u < DEPTH; u++)
      if (UP_ON_TENSOR_CORES ? of_row.has_some(u) : of_row.has(u)) {
        const Inputs normed = load_inputs<UP_VECTORS>(x, of_row.last_or(u));
        sums.add<1 + GATED, !UP_BY_ROW>(from, u, (LOADS - DEPTH) + u, normed);
      }
    if (UP_STEPS == 2 ? WHICH == 0 : at.step + 1 < UP_STEPS) return;
    float out = sums.total(0), factor = 1.f;
    if (GATED) factor = sums.total(1);
#if W8
    if (UP_BY_ROW) out *= from.scale[0];
    if (UP_BY_ROW && GATED) factor *= from.scale[LOADS - DEPTH];
#endif
    out += gate_bias;
    if (GATED) factor += other_bias;
    if (HAS_LIMIT) {
      out = at_most(out, limit);
      factor = GATED ? at_most(at_least(factor, -limit), limit) : factor;
    }
    out = activate(out) * (GATED ? factor + offset : 1.f) * slot.weight;
    if (threadIdx.x % 32 == 0)
      publish_activation(activated + (ROWS == 1 ? at.item : row * ROW_WORDS + at.item % ROW_WORDS), out,
                         launch);
  }

  // The first loads, before the weights of the slots are there.
  __device__ __forceinline__ void begin(int live, UpPlace& at_a, Loaded& a, UpPlace& at_b, Loaded& b) {
    all = live * ROW_WORDS, dealt_out = all - (int)((i64)all * CLAIMED / 16);
    own_end = (int)((i64)dealt_out * (blockIdx.x + 1) / CTAS);
    ahead.item = (int)((i64)dealt_out * blockIdx.x / CTAS) + (int)threadIdx.x / 32, ahead.step = 0;
    if (ahead.item >= own_end) claim_next(), ahead.item = claimed();
    at_a = load<0>(a);
    at_b = load<1>(b);
  }
  __device__ __forceinline__ void finish(UpPlace at_a, Loaded& a, UpPlace at_b, Loaded& b) {
    while (at_a.item < all) {
      use<0>(a, at_a);
      at_a = load<0>(a);
      use<1>(b, at_b);
      at_b = load<1>(b);
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
