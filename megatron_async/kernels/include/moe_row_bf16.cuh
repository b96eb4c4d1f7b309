// Products with weights of experts in bfloat16, eight of a vector.

#define UP_ON_TENSOR_CORES TENSOR_CORES
#define DOWN_ON_TENSOR_CORES TENSOR_CORES
#define MISSING 1.f
#define CHAINS 1

__device__ __forceinline__ void add_vector(float& sum, const Loaded& from, int u, const Inputs& x) {
  add_products(sum, from[u], x.part[0]);
}
// As DiagonalSums says, of inputs whose words are in its order.
__device__ __forceinline__ void multiply(float (&c)[2][4], const Vec& w, const Inputs& x) {
  const Vec& a = x.part[0];
  mma(c[0], a.x, a.y, a.z, a.w, w.x, w.y);
  mma(c[1], a.x, a.y, a.z, a.w, w.z, w.w);
}
