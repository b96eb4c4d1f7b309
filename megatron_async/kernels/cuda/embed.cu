// The rows of the embedding, with the learned positions where a model has them, into the residual
// stream, with the partial statistics that the first norm reads: one block a row.
//
//   H hidden size, PER_TILE elements of a partial statistic, POSITIONS 1: add position embeddings
//   STATS 1 for RMSNorm, with the stream times the norm's weight beside it, 2 for LayerNorm

#define THREADS 256

extern "C" __device__ const int shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
    embed(const i64* token_ids, const i64* position_ids, const u16* table, const u16* positions,
          u16* hidden, const u16* next_weight, u16* scaled, float2* stats_out) {
  wait_for_predecessor();
  release_successor();
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  const u16* from = table + (size_t)load_l2(token_ids + row) * H;
  const u16* position = positions + (POSITIONS ? (size_t)load_l2(position_ids + row) * H : 0);
  for (int tile = threadIdx.x / 32; tile < H / PER_TILE; tile += THREADS / 32) {
    float v[(PER_TILE + 31) / 32], mean = 0.f, square = 0.f;
#pragma unroll
    for (int j = 0; j < (PER_TILE + 31) / 32; j++) {
      int i = tile * PER_TILE + lane + 32 * j;
      v[j] = 0.f;
      if (lane + 32 * j < PER_TILE) {
        v[j] = widen(from[i]);
        if (POSITIONS) v[j] += widen(position[i]);
        u16 rounded = narrow(v[j]);
        v[j] = widen(rounded);
        hidden[(size_t)row * H + i] = rounded;
        if (STATS == 1) scaled[(size_t)row * H + i] = narrow(v[j] * widen(next_weight[i]));
        mean += v[j];
      }
    }
    if (STATS == 2) {
#pragma unroll
      for (int d = 16; d; d >>= 1) mean += __shfl_xor_sync(~0u, mean, d);
      mean /= PER_TILE;
    } else {
      mean = 0.f;
    }
#pragma unroll
    for (int j = 0; j < (PER_TILE + 31) / 32; j++)
      if (lane + 32 * j < PER_TILE) square += (v[j] - mean) * (v[j] - mean);
#pragma unroll
    for (int d = 16; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
    if (lane == 0) stats_out[(size_t)row * (H / PER_TILE) + tile] = make_float2(mean, square);
  }
}
