// What kernels/include/intrinsics.cuh means, in plain C++, for tests without a GPU. Here is what a
// kernel sees; what it does stands in emulated_intrinsics.cpp, which is compiled once.

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(x, y, z)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Of a thread.
struct Place {
  Index thread, index;  // its own, and its block's
  char* shared_memory;
  unsigned* word;
};
extern Place* place;  // of the one that runs
}  // namespace emulator
extern emulator::Index gridDim;
namespace emulator {

void fail(const char* what);
const void* checked(const void* p, size_t size);
template <typename T>
const T* checked(const T* p) {
  return (const T*)checked((const void*)p, sizeof(T));
}

constexpr size_t MOST_SHOWN = 48;
// All lanes of a warp show a value of `size` bytes; returns what the first one shows.
const char* show(const void* value, size_t size);
template <typename T>
const T* show(const T& value) {
  static_assert(sizeof(T) <= MOST_SHOWN, "too large");
  return (const T*)show(&value, sizeof(T));
}
// What lane `lane` of them shows, for any number.
template <typename T>
const T& of_lane(const T* shown, unsigned lane) {
  return *(const T*)((const char*)shown + lane % 32 * MOST_SHOWN);
}

void await_copies(size_t pending);
void wgmma(float* sums, int columns, u32 a, u32 b);
void wgmma(float* sums, int columns, const u32* a, u32 b);
void wgmma_e4m3(float* sums, int columns, u32 a, u32 b, bool adds);
void wgmma_or_set(float* sums, int columns, u32 a, u32 b, bool adds, bool half);
void wgmma_of_columns(float* sums, int columns, const u32* a, u32 b, u32 apart, bool half);
void begin_wgmma();
void end_wgmma();
void await_wgmma(size_t pending);
void send(u32 into, const void* value, u32 size, u32 barrier);
char* shared_at(u32 at, u32 size);
void store(u32 at, const void* value, u32 size);
void publish(void* at, const void* value, size_t size);

// Runs `body` in each thread of a grid, in clusters of blocks next to each other in x; as many as have
// `at_once` blocks run at once, or one. It may touch `ranges` ranges of memory, of which those with `is_late`
// are still being written.
const char* run(void (*body)(), const int* grid, int threads, int cluster_size, int at_once,
                int shared_bytes, int ranges, void** begins, const long long* sizes, const int* is_late,
                unsigned seed);

// The blocks of a rank wait until all of them are here.
void await_rank(unsigned rank, unsigned blocks);

// `values` are the addresses of the kernel's arguments, of one rank after the other, each of which has
// `width` of the grid's blocks in x. A rank has `launches` of them, one after the other.
template <typename... Arguments, size_t... I, typename... Rest>
const char* launch(void (*kernel)(Arguments...), void** values, unsigned width, unsigned launches,
                   std::index_sequence<I...>, Rest... rest) {
  static void (*called)(Arguments...);
  static void** passed;
  static unsigned each, count;
  called = kernel, passed = values, each = width, count = launches;
  return run(
      [] {
        const unsigned rank = place->index.x / each;
        place->index.x %= each, gridDim.x = each;
        for (unsigned n = 0; n < count; n++) {
          if (n) await_rank(rank, each);
          void** own = passed + (rank * count + n) * sizeof...(Arguments);
          called(*(std::decay_t<Arguments>*)own[I]...);
        }
      },
      rest...);
}

}  // namespace emulator

#define threadIdx (emulator::place->thread)
#define blockIdx (emulator::place->index)
#define shared (emulator::place->shared_memory)

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
// Of NaN and a number these are the number, as a GPU's.
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float power_of_two(float v) { return std::exp2(v); }
inline float flushed_power_of_two(float v) { return v < -126.f ? 0.f : std::exp2(v); }
inline float quotient(float a, float b) { return a / b; }
inline float square_root(float v) { return std::sqrt(v); }
inline float __uint_as_float(u32 v) {
  float r;
  std::memcpy(&r, &v, 4);
  return r;
}
inline u32 __float_as_uint(float v) {
  u32 r;
  std::memcpy(&r, &v, 4);
  return r;
}
void __syncthreads();
void __syncwarp();
inline u32 add_one_in_order(u32* at) { return (*(u32*)emulator::checked(at))++; }
inline u32 add_one(u32* at) { return add_one_in_order(at); }
inline u32 take_number(u32* at) { return add_one_in_order(at); }
template <typename T>
T __shfl_xor_sync(unsigned, T v, int lanes) {
  return emulator::of_lane(emulator::show(v), threadIdx.x ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, unsigned lanes) {
  const T* all = emulator::show(v);
  const unsigned lane = threadIdx.x % 32;
  return emulator::of_lane(all, lane < lanes ? lane : lane - lanes);
}
template <typename T>
T __shfl_sync(unsigned, T v, int lane) {
  return emulator::of_lane(emulator::show(v), lane);
}
bool __any_sync(unsigned, bool v);
u32 __reduce_add_sync(unsigned, u32 v);
u32 __reduce_max_sync(unsigned, u32 v);
u32 __reduce_min_sync(unsigned, u32 v);
u32 __ballot_sync(unsigned, bool v);
inline int __popc(u32 v) { return __builtin_popcount(v); }

void wait_for_predecessor();
inline void release_successor() {}

u32 permute(u32 word, u32 which);
float4 widen_four(u32 word);
u32 pack(float lo, float hi);
u32 mul2(u32 a, u32 b);
void halves_of_e4m3(u32 word, u32& first, u32& second);
u32 narrow_e4m3(float lo, float hi);
u32 pack_half(float lo, float hi);

inline void touch(const void* p) { emulator::checked((const u32*)p); }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared); }
void copy16(u32 into, const void* from);
void copy16_or_zero(u32 into, const void* from, bool keep);
namespace emulator {
void copy_few(u32 into, const void* from, size_t size);
}
template <int BYTES>
void copy_few(u32 into, const void* from) {
  emulator::copy_few(into, from, BYTES);
}
void commit_copies();
template <int PENDING>
void await_copies() {
  emulator::await_copies(PENDING);
}

void init_barrier(u32 barrier, u32 arrivals = 1);
void arrive_at(u32 barrier);
inline void publish_barriers() {}
void expect_bytes(u32 barrier, u32 bytes);
void await_bytes(u32 barrier, u32 parity);
inline void await_sent(u32 barrier, u32 parity) { await_bytes(barrier, parity); }
inline void send(u32 at, float4 v, u32 barrier) { emulator::send(at, &v, 16, barrier); }
inline void send(u32 at, float2 v, u32 barrier) { emulator::send(at, &v, 8, barrier); }
void tma_load(u32 into, const TensorMap& map, int a, int b, u32 barrier);
void tma_load(u32 into, const TensorMap& map, int a, int b, int c, int d, u32 barrier);
void tma_multicast(u32 into, const TensorMap& map, int a, int b, u32 barrier, u32 mask);
inline void prefetch_tensor_map(const TensorMap&) {}

inline u32 load_shared_pair(u32 at) { return *(u16*)emulator::shared_at(at, 2); }
inline Vec load_shared(u32 at) { return *(Vec*)emulator::shared_at(at, 16); }
inline void store_shared(u32 at, Vec v) { emulator::store(at, &v, 16); }
inline u32 load_shared_word(u32 at) { return *(u32*)emulator::shared_at(at, 4); }
inline void store_shared_word(u32 at, u32 v) { emulator::store(at, &v, 4); }
inline Vec load_l2_vec(const void* p) { return *emulator::checked((const Vec*)p); }
template <typename T>
T load_l2(const T* p) {
  return *emulator::checked(p);
}
inline Vec load_weights(const void* p) { return *emulator::checked((const Vec*)p); }

inline void publish(u32* at, u32 v) { emulator::publish(at, &v, 4); }
inline void publish(u64* at, u64 v) { emulator::publish(at, &v, 8); }
inline u64 poll(const u64* at) { return *emulator::checked(at); }
inline Vec poll_vec(const u32* at) { return *emulator::checked((const Vec*)at); }
void publish_to_peer(u64* at, u64 a, u64 b);
void publish_to_peer(u64* at, u64 a);
void publish_to_peer(u32* at, Vec v);
inline void poll_peer(const u64* at, u64& a, u64& b) {
  emulator::checked((const Vec*)at);
  a = at[0], b = at[1];
}
inline u64 poll_peer(const u64* at) { return *emulator::checked(at); }
inline Vec poll_peer(const u32* at) { return *emulator::checked((const Vec*)at); }
void wait_a_little();

void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <int COLUMNS>
void wgmma(float (&d)[COLUMNS / 2], u32 a, u32 b) {
  emulator::wgmma(d, COLUMNS, a, b);
}
template <int COLUMNS>
void wgmma(float (&d)[COLUMNS / 2], u32 (&a)[4], u32 b) {
  emulator::wgmma(d, COLUMNS, a, b);
}
template <int COLUMNS>
void wgmma_e4m3(float (&d)[COLUMNS / 2], u32 a, u32 b, bool adds) {
  emulator::wgmma_e4m3(d, COLUMNS, a, b, adds);
}
#ifndef HALF
#define HALF 0
#endif
template <int COLUMNS>
void wgmma_or_set(float (&d)[COLUMNS / 2], u32 a, u32 b, bool adds) {
  emulator::wgmma_or_set(d, COLUMNS, a, b, adds, HALF);
}
template <int COLUMNS>
void wgmma_of_columns(float (&d)[COLUMNS / 2], u32 (&a)[4], u32 b, u32 apart) {
  emulator::wgmma_of_columns(d, COLUMNS, a, b, apart, HALF);
}
void sync_named(int which, int threads);
void arrive_named(int which, int threads);
void publish_stores();
template <int LEFT>
void give_registers() {}
template <int WANTED>
void take_registers() {}
inline void keep(u32 (&)[4]) {}
inline void begin_wgmma() { emulator::begin_wgmma(); }
inline void end_wgmma() { emulator::end_wgmma(); }
template <int COLUMNS, int PENDING = 0>
void await_wgmma(float (&d)[COLUMNS / 2]) {
  emulator::await_wgmma(PENDING);
}
void load_matrices(u32 (&r)[4], u32 at);
void load_transposed(u32 (&r)[4], u32 at);
u32 transpose(u32 pair);

void arrive_in_cluster();
void await_cluster();
inline u32 peer_address(u32 at, u32 rank) { return at | (rank + 1) << 24; }
