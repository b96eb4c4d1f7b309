// The rows of the embedding, with the learned positions where a model has them, into the residual
// stream, with the partial statistics that the first norm reads: one CTA a row.
//
//   H hidden size, PER_TILE elements of a partial statistic, POSITIONS 1: add position embeddings
//   STATS 1 for RMSNorm, and the stream times the norm's weight goes to `scaled`, 2 for LayerNorm

#define THREADS 512
#define TILES (H / PER_TILE)
#define OWN ((TILES + THREADS / 32 - 1) / (THREADS / 32))  // tiles of a warp
#define EACH ((PER_TILE + 31) / 32)                        // elements of a tile for each lane

extern "C" __device__ const int shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
    embed(const i64* token_ids, const i64* position_ids, const u16* table, const u16* positions,
          u16* hidden, const u16* next_weight, u16* scaled, float2* stats_out) {
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (STATS == 1)
    for (int i = threadIdx.x * 64; i < H; i += THREADS * 64) touch(next_weight + i);
  wait_for_predecessor();
  release_successor();
  const u16* from = table + (size_t)load_l2(token_ids + row) * H;
  const u16* position = positions + (POSITIONS ? (size_t)load_l2(position_ids + row) * H : 0);
  // All of a warp's tiles at once: each is a trip to memory.
  float v[OWN][EACH];
#pragma unroll
  for (int k = 0; k < OWN; k++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int tile = warp + k * (THREADS / 32), i = tile * PER_TILE + lane + 32 * j;
      v[k][j] = 0.f;
      if (tile >= TILES || lane + 32 * j >= PER_TILE) continue;
      v[k][j] = widen(from[i]);
      if (POSITIONS) v[k][j] += widen(position[i]);
    }
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    const int tile = warp + k * (THREADS / 32);
    if (tile >= TILES) break;
    float mean = 0.f, square = 0.f;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = tile * PER_TILE + lane + 32 * j;
      if (lane + 32 * j >= PER_TILE) continue;
      const u16 rounded = narrow(v[k][j]);
      v[k][j] = widen(rounded);
      hidden[(size_t)row * H + i] = rounded;
      if (STATS == 1) scaled[(size_t)row * H + i] = narrow(v[k][j] * widen(next_weight[i]));
      mean += v[k][j];
    }
    if (STATS == 2) {
#pragma unroll
      for (int d = 16; d; d >>= 1) mean += __shfl_xor_sync(~0u, mean, d);
      mean /= PER_TILE;
    } else {
      mean = 0.f;
    }
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (lane + 32 * j < PER_TILE) square += (v[k][j] - mean) * (v[k][j] - mean);
#pragma unroll
    for (int d = 16; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
    if (lane == 0) stats_out[(size_t)row * TILES + tile] = make_float2(mean, square);
  }
}
