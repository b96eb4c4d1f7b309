// Arithmetic on bfloat16, alone and in pairs.

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 narrow(float v) { return (u16)(pack(v, 0.f) & 0xffffu); }
