// Products with weights of experts in bfloat16, eight of a vector.

#define UP_ON_TENSOR_CORES 1
#define DOWN_ON_TENSOR_CORES 1
#define MISSING 1.f
#define CHAINS 1

// As DiagonalSums says, of inputs whose words are in its order.
__device__ __forceinline__ void multiply(float (&c)[2][4], const Vec& w, const Inputs& x) {
  const Vec& a = x.part[0];
  mma(c[0], a.x, a.y, a.z, a.w, w.x, w.y);
  mma(c[1], a.x, a.y, a.z, a.w, w.z, w.w);
}
