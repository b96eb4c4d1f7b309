// What all CUDA kernels of this folder share. No headers: they are compiled by NVRTC as they are.
//
// Every kernel is launched with programmatic stream serialization. It may start while the kernel
// before it still runs, and must not touch what that kernel writes before `wait_for_predecessor`.
// It lets its successor start only after that, so when a kernel starts, all kernels but its
// direct predecessor have ended: what they wrote may be read at once. Two kernels let it start before:
// the second linear layers of moe_widened.cu, whose successor waits before anything else, and peer_sum.cu
// with SENT.

typedef unsigned short u16;  // the bits of a bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(16) Vec {
  u32 x, y, z, w;
};
struct __align__(64) TensorMap {
  u64 opaque[16];
};

// The last parameters of a kernel that writes to the memory of other ranks, and an array of them.
#define PEERS \
  u64 *to_0, u64 *to_1, u64 *to_2, u64 *to_3, u64 *to_4, u64 *to_5, u64 *to_6, u64 *to_7
#define ALL_PEERS {to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7}
