// The rows of a rank's share of the embedding, as its partial sum: a token that another rank has gives
// zeros. The residual stream begins with what all ranks have, the learned positions or zeros. One CTA a
// row.
//
//   H hidden size, a multiple of 8, POSITIONS 1: begin with position embeddings

#define THREADS 256

extern "C" __device__ const int shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
    embed_share(const i64* token_ids, const i64* position_ids, const u16* table, const u16* positions,
                u16* hidden, u16* partial, int first_id, int id_count) {
  const int row = blockIdx.x;
  wait_for_predecessor();
  release_successor();
  const i64 own = load_l2(token_ids + row) - first_id;
  const bool is_here = own >= 0 && own < id_count;
  const u16* from = table + (is_here ? (size_t)own * H : 0);
  const u16* position = positions + (POSITIONS ? (size_t)load_l2(position_ids + row) * H : 0);
  for (int i = threadIdx.x * 8; i < H; i += THREADS * 8) {
    const Vec zeros{0, 0, 0, 0};
    *(Vec*)(partial + (size_t)row * H + i) = is_here ? *(const Vec*)(from + i) : zeros;
    *(Vec*)(hidden + (size_t)row * H + i) = POSITIONS ? *(const Vec*)(position + i) : zeros;
  }
}
