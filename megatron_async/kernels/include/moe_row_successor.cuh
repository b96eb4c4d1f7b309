// What the next kernel in the stream reads from memory, brought into L2 while this one waits for words. A
// CTA has every CTAS-th part, and asks for some of them at each point of NEXT_POINTS, so that what others
// wait for does not queue behind all of it.

#define PART_VECTORS 256
#define POINTS(mask) (((mask) & 1) + ((mask) >> 1 & 1) + ((mask) >> 2 & 1) + ((mask) >> 3 & 1) + ((mask) >> 4 & 1))

struct Successor {
  const u16* weight;
  int vectors;

  template <int POINT>
  __device__ __forceinline__ void prefetch() const {
    if (!(NEXT_POINTS >> POINT & 1) || !weight || threadIdx.x / 32 != WARPS - 1) return;
    constexpr int points = NEXT_POINTS ? POINTS(NEXT_POINTS) : 1, before = POINTS(NEXT_POINTS & ((1 << POINT) - 1));
    const int parts = (vectors + PART_VECTORS - 1) / PART_VECTORS, own = (parts + CTAS - 1) / CTAS;
    for (int i = own * before / points + (int)(threadIdx.x % 32); i < own * (before + 1) / points; i += 32) {
      const int first = (i * CTAS + blockIdx.x) * PART_VECTORS;
      if (first < vectors)
        prefetch_l2(weight + (size_t)first * 8, (u32)min(PART_VECTORS, vectors - first) * 16);
    }
  }
};
