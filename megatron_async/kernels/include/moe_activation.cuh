// What is between an expert's linear layers, by FUNCTION: 0 SiLU, 1 quick GELU, 2 GELU (erf), 3 GELU (tanh),
// 4 squared ReLU, 5 ReLU.

// GPUs' own minimum of NaN and a number is the number: here NaN stays.
__device__ __forceinline__ float at_most(float v, float high) { return v > high ? high : v; }
__device__ __forceinline__ float at_least(float v, float low) { return v < low ? low : v; }

__device__ __forceinline__ float activate(float v) {
#if FUNCTION == 0
  return v / (1.f + __expf(-v));
#elif FUNCTION == 1
  return v / (1.f + __expf(-1.702f * v));
#elif FUNCTION == 2
  return 0.5f * v * (1.f + erff(v * 0.7071067811865476f));
#elif FUNCTION == 3
  const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + (1.f - 2.f / (__expf(2.f * inner) + 1.f)));
#else
  v = v < 0.f ? 0.f : v;
  return FUNCTION == 4 ? v * v : v;
#endif
}
