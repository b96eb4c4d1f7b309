// Products with weights of experts in bfloat16, eight of a vector.

#define UP_ON_TENSOR_CORES TENSOR_CORES
#define DOWN_ON_TENSOR_CORES TENSOR_CORES
#define MISSING 1.f

__device__ __forceinline__ void add_vector(float& sum, const Loaded& from, int u, const Inputs& x) {
  add_products(sum, from[u], x.part[0]);
}
// Of a vector, and of one of the other half if there is one, as DiagonalSums says.
template <int HALVES>
__device__ __forceinline__ void multiply(float (&c)[4], const Loaded& from, int u, int other,
                                         const Inputs& x) {
  const Vec &w = from[u], o = HALVES == 2 ? from[other] : Vec{0, 0, 0, 0};
  mma(c, w.x, o.x, w.y, o.y, x.part[0].x, x.part[0].y);
  mma(c, w.z, o.z, w.w, o.w, x.part[0].z, x.part[0].w);
}
