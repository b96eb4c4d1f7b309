// The experts of a row, in every CTA alike. ROW_WARPS warps choose for it: each has all its logits, lane l
// those of experts l, l + 32, ..., and ranks some of the experts.

// Orders as the values do, NaN highest; 0 is below every value's, and one more is no overflow.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // no negative zero
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xfffffffeu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The highest key; the first expert that has it is taken out.
__device__ __forceinline__ u32 take_best(u32 (&keys)[LANE_EXPERTS]) {
  const u32 lane = threadIdx.x % 32;
  u32 own = 0, expert = ~0u;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    if (keys[j] > own) own = keys[j], expert = j * 32 + lane;
  const u32 best = __reduce_max_sync(~0u, own);
  const u32 first = __reduce_min_sync(~0u, own == best ? expert : ~0u);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    if (j * 32 + lane == first) keys[j] = 0;
  return best;
}

// Minus infinity for the experts of groups that are not among the KEPT with the highest scores.
__device__ __forceinline__ void keep_groups(u32 (&keys)[LANE_EXPERTS]) {
  constexpr int OF_GROUP = EXPERTS / GROUPS;
  const int lane = threadIdx.x % 32;
  u32 score = 0;  // of group `lane`
  for (int group = 0; group < GROUPS; group++) {
    u32 of_group[LANE_EXPERTS];
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
      of_group[j] = (j * 32 + lane) / OF_GROUP == group ? keys[j] : 0;
    float sum = 0.f;
    for (int i = 0; i < SUMMED; i++) sum += value_of(take_best(of_group));
    if (lane == group) score = key_of(sum);
  }
  u32 kept = 0;
  for (int i = 0; i < KEPT; i++) {
    const u32 best = __reduce_max_sync(~0u, score);
    const u32 group = __reduce_min_sync(~0u, score == best ? (u32)lane : ~0u);
    kept |= 1u << group;
    if (lane == (int)group) score = 0;
  }
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    const int expert = j * 32 + lane;
    if (expert < EXPERTS && !(kept >> expert / OF_GROUP & 1)) keys[j] = key_of(-__uint_as_float(0x7f800000u));
  }
}

// What weights are made of, in place of logits; minus infinity where there is no expert.
__device__ __forceinline__ void score(float (&logits)[LANE_EXPERTS]) {
  if (SIGMOID) {
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) logits[j] = __fdividef(1.f, 1.f + __expf(-logits[j]));
  } else if (PRE_SOFTMAX) {
    u32 own = 0;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) own = max(own, key_of(logits[j]));
    const float most = value_of(__reduce_max_sync(~0u, own));
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) logits[j] = __expf(logits[j] - most), sum += logits[j];
    sum = sum_of_warp(sum);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) logits[j] = __fdividef(logits[j], sum);
  }
}

// All rows' logits into shared memory.
__device__ __forceinline__ void await_logits(const u64* logits, u32 launch) {
  for (int i = threadIdx.x; i < ROWS * LOGITS; i += THREADS) {
    u64 word = poll(logits + i);
    while (!has_arrived(word, launch)) wait_a_little(), word = poll(logits + i);
    ((float*)(shared + LOGITS_AT))[i] = __uint_as_float((u32)word);
  }
}

// Puts the experts of live row `row`, the `place`-th, into its slots, and what weights are made of next to
// them. An expert's place is the number of those that come before it.
__device__ __forceinline__ void choose(int row, int place, int mine, const float* expert_bias,
                                       const Weight* w1, const Weight* w2) {
  const int lane = threadIdx.x % 32;
  const float* logits = (const float*)(shared + LOGITS_AT) + row * LOGITS;
  float scores[LANE_EXPERTS];
  u32 keys[LANE_EXPERTS], least = 0;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    scores[j] = j * 32 + lane < EXPERTS ? logits[j * 32 + lane] : -__uint_as_float(0x7f800000u);
  score(scores);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    const int expert = j * 32 + lane;
    keys[j] = expert >= EXPERTS ? 0 : key_of(expert_bias ? scores[j] + expert_bias[expert] : scores[j]);
    if (mine == 0 && expert < EXPERTS) ((float*)(shared + SCORES_AT))[row * EXPERTS + expert] = scores[j];
  }
  if (KEPT < GROUPS) keep_groups(keys);
  if (LANE_EXPERTS > 4) {  // 32 experts and more reach the least of the lanes' best: no other is chosen
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) least = max(least, keys[j]);
    least = __reduce_min_sync(~0u, least);
  }
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
#pragma unroll 2
    for (int i = 0; i < 32 / ROW_WARPS; i++) {
      const int owner = i * ROW_WARPS + mine, expert = j * 32 + owner;
      const u32 key = __shfl_sync(~0u, keys[j], owner);
      if (expert >= EXPERTS || (LANE_EXPERTS > 4 && key < least)) continue;
      u32 before = 0;
#pragma unroll
      for (int k = 0; k < LANE_EXPERTS; k++)
        before += keys[k] + (k < j || (k == j && lane < owner) ? 1 : 0) > key;
      before = __reduce_add_sync(~0u, before);
      if (lane == 0 && before < TOP_K)
        slots()[place * SLOTS + before] = Slot{w1 + (size_t)expert * (1 + GATED) * INNER * UP_WIDTH,
                                               w2 + (size_t)expert * H * DOWN_WIDTH, 0.f, expert};
    }
}
__device__ __forceinline__ void add_shared_experts(int place, const Weight* w1, const Weight* w2) {
  const int number = (int)(threadIdx.x % 32) - TOP_K;
  if (number >= 0 && number < SHARED)
    slots()[place * SLOTS + TOP_K + number] =
        Slot{w1 + (size_t)number * INNER * H, w2 + number * INNER, 0.f, EXPERTS + number};
}

// Routing weights of a row's slots: lane l returns that of slot l.
__device__ __forceinline__ float weigh(int row, int place, float scaling) {
  const int lane = threadIdx.x % 32;
  const bool is_place = lane < TOP_K;
  float found = 0.f;
  if (is_place)
    found = ((const float*)(shared + SCORES_AT))[row * EXPERTS + slots()[place * SLOTS + lane].expert];
  float weight = found;
  if (!SIGMOID && !PRE_SOFTMAX) {
    const float most = value_of(__reduce_max_sync(~0u, is_place ? key_of(found) : 0));
    weight = is_place ? __expf(found - most) : 0.f;
    weight = __fdividef(weight, sum_of_warp(weight));
  }
  if (NORMALIZE) weight /= sum_of_warp(weight) + 1e-20f;
  weight *= scaling;
  if (is_place) return weight;
  const float gate = GATE ? ((const float*)(shared + LOGITS_AT))[row * LOGITS + EXPERTS] : 0.f;
  return GATE ? __fdividef(1.f, 1.f + __expf(-gate)) : 1.f;
}
