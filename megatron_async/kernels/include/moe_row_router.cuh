// Norm and logits. A thread has vectors threadIdx.x, threadIdx.x + THREADS, ... of each row, and the CTA
// the logits of experts blockIdx.x, blockIdx.x + CTAS, ...; behind the experts is the shared experts' gate.

// Parameters, which nobody writes: read before the kernel in front has ended.
struct RouterWeights {
  Vec norm[OWN_VECTORS], bias[OWN_VECTORS], experts[OWN_LOGITS][OWN_VECTORS];

  __device__ __forceinline__ void load(const u16* norm_weight, const u16* norm_bias, const u16* router,
                                       const u16* gate) {
#pragma unroll
    for (int k = 0; k < OWN_VECTORS; k++) {
      const int at = (threadIdx.x + k * THREADS) * 8;
      if (at >= H) continue;
      norm[k] = load_weights(norm_weight + at);
      if (norm_bias) bias[k] = load_weights(norm_bias + at);
#pragma unroll
      for (int l = 0; l < OWN_LOGITS && ROUTES; l++) {
        const int expert = blockIdx.x + l * CTAS;
        if (expert < EXPERTS) experts[l][k] = load_weights(router + (size_t)expert * H + at);
        else if (expert < LOGITS) experts[l][k] = load_weights(gate + at);
      }
    }
  }
};

__device__ __forceinline__ u32 norm_pair(u32 x, float mean, float scale, u32 weight, u32 bias) {
  return pack((low(x) - mean) * scale * low(weight) + low(bias),
              (high(x) - mean) * scale * high(weight) + high(bias));
}
__device__ __forceinline__ Vec norm_vector(Vec x, float mean, float scale, Vec w, Vec b) {
  return Vec{norm_pair(x.x, mean, scale, w.x, b.x), norm_pair(x.y, mean, scale, w.y, b.y),
             norm_pair(x.z, mean, scale, w.z, b.z), norm_pair(x.w, mean, scale, w.w, b.w)};
}

// Normed rows into shared memory, and this CTA's logits to all.
__device__ __forceinline__ void norm_and_route(const RouterWeights& weights, const u16* x,
                                               const float2* stats_in, int stats_tiles, float eps,
                                               bool has_bias, const u16* router_bias, u64* logits,
                                               u32 launch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Vec own[ROWS][OWN_VECTORS];
  float2 stats[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    stats[row] = make_float2(0.f, 0.f);
#pragma unroll
    for (int k = 0; k < OWN_VECTORS; k++) {
      const int at = (threadIdx.x + k * THREADS) * 8;
      if (at < H) own[row][k] = load_l2_vec(x + row * H + at);
    }
  }
  for (int tile = threadIdx.x; tile < stats_tiles; tile += THREADS) {
    float2 of_tile[ROWS];  // all on their way at once
#pragma unroll
    for (int row = 0; row < ROWS; row++) of_tile[row] = load_l2(stats_in + row * stats_tiles + tile);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const float2 v = of_tile[row];
      stats[row].x += v.x;
      stats[row].y += CENTER ? v.y + v.x * v.x * (float)(H / stats_tiles) : v.y;
    }
  }
  float2* parts = (float2*)(shared + STATS_AT);
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const float mean = CENTER ? sum_of_warp(stats[row].x) : 0.f, square = sum_of_warp(stats[row].y);
    if (lane == 0) parts[row * WARPS + warp] = make_float2(mean, square);
  }
  __syncthreads();

  float* sums = (float*)(shared + SUMS_AT);
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float mean = 0.f, square = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) mean += parts[row * WARPS + w].x, square += parts[row * WARPS + w].y;
    mean /= (float)stats_tiles;
    const float scale = rsqrtf(square / (float)H - mean * mean + eps);
    float logit[OWN_LOGITS];
#pragma unroll
    for (int l = 0; l < OWN_LOGITS; l++) logit[l] = 0.f;
#pragma unroll
    for (int k = 0; k < OWN_VECTORS; k++) {
      const int at = threadIdx.x + k * THREADS;
      if (at >= VECTORS) continue;
      const Vec bias = has_bias ? weights.bias[k] : Vec{0, 0, 0, 0};
      const Vec normed = norm_vector(own[row][k], mean, scale, weights.norm[k], bias);
      put_normed(row, at, normed);
#pragma unroll
      for (int l = 0; l < OWN_LOGITS && ROUTES; l++)
        if (blockIdx.x + l * CTAS < LOGITS) add_products(logit[l], weights.experts[l][k], normed);
    }
#pragma unroll
    for (int l = 0; l < OWN_LOGITS && ROUTES; l++) {
      const float sum = sum_of_warp(logit[l]);
      if (lane == 0) sums[(row * OWN_LOGITS + l) * WARPS + warp] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * OWN_LOGITS && ROUTES; i += THREADS) {
    const int row = i / OWN_LOGITS, expert = blockIdx.x + i % OWN_LOGITS * CTAS;
    if (expert >= LOGITS) continue;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[i * WARPS + w];
    if (router_bias && expert < EXPERTS) sum += widen(router_bias[expert]);
    publish_logit(logits + row * LOGITS + expert, sum, launch);
  }
}
