// The experts of a row, chosen by a warp: lane l has experts l, l + 32, ...

// Orders as the values do, NaN highest; 0 is below every value's.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // no negative zero
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The first expert with the highest key; it is taken out.
__device__ __forceinline__ int take_best(u32 (&keys)[LANE_EXPERTS], u32& best) {
  const int lane = threadIdx.x % 32;
  u32 own = 0, expert = ~0u;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    if (keys[j] > own) own = keys[j], expert = j * 32 + lane;
  best = __reduce_max_sync(~0u, own);
  const int first = (int)__reduce_min_sync(~0u, own == best ? expert : ~0u);
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    if (j * 32 + lane == first) keys[j] = 0;
  return first;
}

// Minus infinity for the experts of groups that are not among the KEPT with the highest scores.
__device__ __forceinline__ void keep_groups(u32 (&keys)[LANE_EXPERTS]) {
  constexpr int OF_GROUP = EXPERTS / GROUPS;
  const int lane = threadIdx.x % 32;
  u32 score[1] = {0};  // of group `lane`
  for (int group = 0; group < GROUPS; group++) {
    u32 of_group[LANE_EXPERTS];
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
      of_group[j] = (j * 32 + lane) / OF_GROUP == group ? keys[j] : 0;
    float sum = 0.f;
    for (int i = 0; i < SUMMED; i++) {
      u32 best;
      take_best(of_group, best);
      sum += value_of(best);
    }
    if (lane == group) score[0] = key_of(sum);
  }
  u32 kept = 0;
  for (int i = 0; i < KEPT; i++) {
    const u32 best = __reduce_max_sync(~0u, score[0]);
    const u32 group = __reduce_min_sync(~0u, score[0] == best ? (u32)lane : ~0u);
    kept |= 1u << group;
    if (lane == (int)group) score[0] = 0;
  }
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    const int expert = j * 32 + lane;
    if (expert < EXPERTS && !(kept >> expert / OF_GROUP & 1)) keys[j] = key_of(-__uint_as_float(0x7f800000u));
  }
}

// What weights are made of, in place of logits.
__device__ __forceinline__ void score(float (&logits)[LANE_EXPERTS]) {
  const int lane = threadIdx.x % 32;
  if (SIGMOID) {
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) logits[j] = 1.f / (1.f + __expf(-logits[j]));
  } else if (PRE_SOFTMAX) {
    float most = logits[0], sum = 0.f;
#pragma unroll
    for (int j = 1; j < LANE_EXPERTS; j++) most = max(most, logits[j]);
    most = most_of_warp(most);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) {
      logits[j] = j * 32 + lane < EXPERTS ? __expf(logits[j] - most) : 0.f;
      sum += logits[j];
    }
    sum = sum_of_warp(sum);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++) logits[j] /= sum;
  }
}

// Routing weights of the chosen experts' scores: lane l has that of place l.
__device__ __forceinline__ float routing_weight(float found, float scaling) {
  const bool is_place = threadIdx.x % 32 < TOP_K;
  float weight = is_place ? found : 0.f;
  if (!SIGMOID && !PRE_SOFTMAX) {
    const float most = most_of_warp(is_place ? found : -__uint_as_float(0x7f800000u));
    weight = is_place ? __expf(found - most) : 0.f;
    weight /= sum_of_warp(weight);
  }
  if (NORMALIZE) weight /= sum_of_warp(weight) + 1e-20f;
  return weight * scaling;
}

// The experts of a row whose logits are on their way: lane l returns that of place l, and its weight.
__device__ __forceinline__ int choose(const u64* logits, u32 launch, const float* expert_bias,
                                      float scaling, float& weight) {
  const int lane = threadIdx.x % 32;
  u64 words[LANE_EXPERTS], gate_word = 0;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++)
    if (j * 32 + lane < EXPERTS) words[j] = poll(logits + j * 32 + lane);
  if (GATE) gate_word = poll(logits + EXPERTS);
  float scores[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    const int expert = j * 32 + lane;
    scores[j] = -__uint_as_float(0x7f800000u);
    if (expert >= EXPERTS) continue;
    while (!has_arrived(words[j], launch)) wait_a_little(), words[j] = poll(logits + expert);
    scores[j] = __uint_as_float((u32)words[j]);
  }
  while (GATE && !has_arrived(gate_word, launch)) wait_a_little(), gate_word = poll(logits + EXPERTS);
  __syncwarp();
  score(scores);
  u32 keys[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; j++) {
    const int expert = j * 32 + lane;
    keys[j] = expert >= EXPERTS ? 0 : key_of(expert_bias ? scores[j] + expert_bias[expert] : scores[j]);
  }
  if (KEPT < GROUPS) keep_groups(keys);
  int own = EXPERTS + lane - TOP_K;
  float found = 0.f;
  for (int place = 0; place < TOP_K; place++) {
    u32 best;
    const int expert = take_best(keys, best);
    float of_expert = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; j++)
      if (expert / 32 == j) of_expert = scores[j];
    of_expert = __shfl_sync(~0u, of_expert, expert % 32);
    if (lane == place) own = expert, found = of_expert;
  }
  weight = routing_weight(found, scaling);
  if (lane >= TOP_K) weight = GATE ? 1.f / (1.f + __expf(-__uint_as_float((u32)gate_word))) : 1.f;
  return own;
}
