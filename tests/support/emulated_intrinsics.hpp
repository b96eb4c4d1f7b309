// What kernels/include/intrinsics.cuh means, in plain C++, for tests without a GPU: the threads of a
// cluster are fibers of one thread, which run in random order from one point where they wait for
// each other to the next. It is meant to be stricter than a GPU:
//
//   - an asynchronous copy takes place when it is issued or when it is awaited, at random, and so does
//     what a block sends to a peer;
//   - blocks of a cluster begin late and fall behind, at random; nothing may be sent before all have
//     begun, nor to one that has ended;
//   - what the kernel before writes is garbage until all threads of the first cluster wait for it;
//   - shared memory begins as NaN, and every address is checked against what the kernel was given;
//   - threads that wait for each other in vain are an error.
//
// Blocks of different clusters run one after another, in random order.

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(x, y, z)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

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

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  alignas(16) char lanes[2][32][48];  // what the lanes show each other, in turn
};

struct Copy {
  char* into;
  const char* from;  // null: zeros
};

// What a block was sent by a peer.
struct Delivery {
  char* into;
  std::vector<char> bytes;
};

// What bulk copies and peers report to.
struct Transfer {
  long long bytes = 0;  // announced and not there yet
  bool announced = false;
  unsigned parity = 0;
  std::vector<Copy> under_way;
  std::vector<Delivery> sent;
};

struct Block {
  Index index;
  std::map<unsigned, Transfer> transfers;  // by address
  std::vector<char> memory;
  Barrier barrier, predecessor;
  std::vector<Warp> warps;
  std::vector<Barrier> warpgroups;
  int running = 0;  // threads
  int held = 0;     // rounds for which no thread goes on
};

struct Cluster {
  std::vector<Block> blocks;
  Barrier barrier;
};

// What one thread has of four warps' wgmma.
struct Product {
  float* sums;
  int columns;
  unsigned a, b;
};

struct Fiber {
  ucontext_t context;
  std::vector<Product> products;
  Index thread;
  Block* block;
  std::vector<char> stack;
  std::vector<Copy> issued;
  std::vector<std::vector<Copy>> groups;
  bool in_cluster = false;  // has arrived, and not waited yet
  bool saw_cluster = false;
  unsigned cluster_generation = 0;
  bool done = false;
};

struct Range {
  const char* begin;
  size_t size;
};

inline Cluster* cluster;
inline Fiber* fiber;
inline ucontext_t scheduler;
inline std::mt19937 random_bits;
inline std::string error;
inline std::vector<Range> memory;  // what the kernel may touch
inline std::vector<std::pair<Range, std::vector<char>>> late;  // what the kernel before writes
inline unsigned long events;

inline void give_way() { swapcontext(&fiber->context, &scheduler); }

inline void fail(const std::string& what) {
  if (error.empty()) {
    const Index b = fiber->block->index;
    error = what + " (block " + std::to_string(b.x) + "," + std::to_string(b.y) + "," +
            std::to_string(b.z) + " thread " + std::to_string(fiber->thread.x) + ")";
  }
  for (;;) give_way();
}

inline void arrive_and_wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.generation++;
    events++;
    return;
  }
  while (barrier.generation == generation) give_way();
}

inline Warp& warp() { return fiber->block->warps[fiber->thread.x / 32]; }

// All lanes show `value`; returns what lane `of` of them shows, for any number of `of`.
template <typename T>
const T* show(const T& value) {
  static_assert(sizeof(T) <= sizeof(Warp::lanes[0][0]), "too large");
  Warp& w = warp();
  const unsigned turn = w.barrier.generation & 1;
  std::memcpy(w.lanes[turn][fiber->thread.x % 32], &value, sizeof(T));
  arrive_and_wait(w.barrier);
  return (const T*)w.lanes[turn];
}
template <typename T>
const T& of_lane(const T* shown, unsigned lane) {
  return *(const T*)((const char*)shown + lane % 32 * sizeof(Warp::lanes[0][0]));
}

template <typename T>
const T* checked(const T* p, size_t size = sizeof(T)) {
  if ((uintptr_t)p % std::min<size_t>(size, 16)) fail("misaligned access to memory");
  for (const Range& range : memory)
    if ((const char*)p >= range.begin && (const char*)p + size <= range.begin + range.size) return p;
  fail("access to memory of nobody");
  return p;
}

// An address in a peer has the peer's rank + 1 in its upper byte.
inline Block& block_of(unsigned at) {
  if (at >> 24 == 0) return *fiber->block;
  Block& block = cluster->blocks[(at >> 24) - 1];
  if (!fiber->saw_cluster) fail("a peer that may not have begun");
  if (block.running == 0) fail("a peer that has ended");
  return block;
}
inline char* shared_memory(unsigned at, unsigned size) {
  Block& block = block_of(at);
  at &= 0xffffff;
  if (at % size) fail("misaligned access to shared memory");
  if (at + size > block.memory.size()) fail("access beyond shared memory");
  return block.memory.data() + at;
}

inline void copy(const Copy& c) {
  if (c.from)
    std::memcpy(c.into, c.from, 16);
  else
    std::memset(c.into, 0, 16);
}
inline Transfer& transfer(unsigned barrier) {
  auto& all = block_of(barrier).transfers;
  if (!all.count(barrier & 0xffffff)) fail("a barrier that nobody initialised");
  return all[barrier & 0xffffff];
}
inline void arrive(Transfer& t, long long bytes) {
  t.bytes -= bytes;
  if (!t.announced || t.bytes != 0) return;
  t.announced = false;
  t.parity ^= 1;
  events++;
}
inline void tma_load(unsigned into, const u64* map, std::vector<int> at, unsigned barrier) {
  const u64 *sizes = map + 1, *strides = map + 5, *tile = map + 9;
  auto& t = transfer(barrier);
  if (map[13] != at.size() || into % 1024) fail("a TMA tile of another kind, or misplaced");
  long long rows = 1;
  for (size_t d = 1; d < at.size(); d++) rows *= tile[d];
  for (long long row = 0; row < rows; row++)
    for (int chunk = 0; chunk < 8; chunk++) {
      const char* from = (const char*)map[0] + (at[0] + chunk * 8) * 2;
      bool inside = at[0] + chunk * 8 < (long long)sizes[0];
      long long rest = row;
      for (size_t d = 1; d < at.size(); rest /= tile[d], d++) {
        const long long i = at[d] + rest % (long long)tile[d];
        inside = inside && i < (long long)sizes[d];
        from += i * strides[d];
      }
      const unsigned to = into + row * 128 + chunk * 16;
      Copy c{shared_memory(to ^ (to >> 7 & 7) << 4, 16), inside ? checked(from, 16) : nullptr};
      if (random_bits() & 1)
        copy(c), arrive(t, 16);
      else
        t.under_way.push_back(c);
    }
}
inline void take(const Delivery& d, Transfer& t) {
  std::memcpy(d.into, d.bytes.data(), d.bytes.size());
  arrive(t, d.bytes.size());
}
inline void send(unsigned into, const void* value, unsigned size, unsigned barrier) {
  if (into >> 24 != barrier >> 24) fail("bytes for one block, reported to another");
  auto& t = transfer(barrier);
  Delivery d{shared_memory(into, size), {(const char*)value, (const char*)value + size}};
  if (random_bits() & 1)
    take(d, t);
  else
    t.sent.push_back(std::move(d)), events++;
}
inline void issue(unsigned into, const void* from) {
  Copy c{shared_memory(into, 16), (const char*)(from ? checked((const char*)from, 16) : nullptr)};
  if (random_bits() & 1)
    copy(c);
  else
    fiber->issued.push_back(c);
}

}  // namespace emulator

#define threadIdx (emulator::fiber->thread)
#define blockIdx (emulator::fiber->block->index)
#define shared (emulator::fiber->block->memory.data())
inline emulator::Index gridDim;

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
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
inline void __syncthreads() { emulator::arrive_and_wait(emulator::fiber->block->barrier); }
inline void __syncwarp() { emulator::arrive_and_wait(emulator::warp().barrier); }
inline u32 add_one_in_order(u32* at) { return (*(u32*)emulator::checked(at))++; }
template <typename T>
T __shfl_xor_sync(unsigned, T v, int lanes) {
  return emulator::of_lane(emulator::show(v), emulator::fiber->thread.x ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, unsigned lanes) {
  const T* all = emulator::show(v);
  const unsigned lane = emulator::fiber->thread.x % 32;
  return emulator::of_lane(all, lane < lanes ? lane : lane - lanes);
}
template <typename T>
T __shfl_sync(unsigned, T v, int lane) {
  return emulator::of_lane(emulator::show(v), lane);
}
inline bool __any_sync(unsigned, bool v) {
  const bool* all = emulator::show(v);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= emulator::of_lane(all, lane);
  return any;
}

inline u32 __reduce_add_sync(unsigned, u32 v) {
  const u32* all = emulator::show(v);
  u32 sum = 0;
  for (int lane = 0; lane < 32; lane++) sum += emulator::of_lane(all, lane);
  return sum;
}
inline u32 __ballot_sync(unsigned, bool v) {
  const bool* all = emulator::show(v);
  u32 bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (u32)emulator::of_lane(all, lane) << lane;
  return bits;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }

inline void wait_for_predecessor() {
  using namespace emulator;
  arrive_and_wait(fiber->block->predecessor);
  for (auto& [range, bytes] : late) std::memcpy((char*)range.begin, bytes.data(), bytes.size());
  late.clear();
}
inline void release_successor() {}

inline u32 round_to_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  if (std::isnan(v)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float lo, float hi) { return round_to_bf16(lo) | round_to_bf16(hi) << 16; }
inline u32 mul2(u32 a, u32 b) {
  auto product = [](u32 a, u32 b) { return __uint_as_float(a << 16) * __uint_as_float(b << 16); };
  return pack(product(a & 0xffff, b & 0xffff), product(a >> 16, b >> 16));
}

inline void touch(const void* p) { emulator::checked((const u32*)p); }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared); }
inline void copy16(u32 into, const void* from) { emulator::issue(into, from); }
inline void copy16_or_zero(u32 into, const void* from, bool keep) {
  emulator::issue(into, keep ? from : nullptr);
}
inline void commit_copies() {
  auto& f = *emulator::fiber;
  f.groups.push_back(std::move(f.issued));
  f.issued.clear();
}
template <int PENDING>
void await_copies() {
  auto& groups = emulator::fiber->groups;
  while (groups.size() > PENDING) {
    for (const auto& c : groups.front()) emulator::copy(c);
    groups.erase(groups.begin());
  }
}

inline void init_barrier(u32 barrier) {
  emulator::shared_memory(barrier, 8);
  emulator::fiber->block->transfers[barrier] = {};
}
inline void publish_barriers() {}
inline void expect_bytes(u32 barrier, u32 bytes) {
  auto& t = emulator::transfer(barrier);
  if (t.announced) emulator::fail("bytes announced twice in a phase");
  t.announced = true;
  t.bytes += bytes;
  emulator::arrive(t, 0);
}
inline void await_bytes(u32 barrier, u32 parity) {
  for (;;) {
    auto& t = emulator::transfer(barrier);
    if (t.parity != parity) return;
    const auto copies = std::move(t.under_way);
    const auto sent = std::move(t.sent);
    t.under_way.clear(), t.sent.clear();
    for (const auto& c : copies) emulator::copy(c), emulator::arrive(t, 16);
    for (const auto& d : sent) emulator::take(d, t);
    if (t.parity == parity) emulator::give_way();
  }
}
inline void await_sent(u32 barrier, u32 parity) { await_bytes(barrier, parity); }
inline void send(u32 at, float4 v, u32 barrier) { emulator::send(at, &v, 16, barrier); }
inline void send(u32 at, float2 v, u32 barrier) { emulator::send(at, &v, 8, barrier); }
inline void tma_load(u32 into, const TensorMap& map, int a, int b, u32 barrier) {
  emulator::tma_load(into, map.opaque, {a, b}, barrier);
}
inline void tma_load(u32 into, const TensorMap& map, int a, int b, int c, int d, u32 barrier) {
  emulator::tma_load(into, map.opaque, {a, b, c, d}, barrier);
}
inline void prefetch_tensor_map(const TensorMap&) {}

inline Vec load_shared(u32 at) { return *(const Vec*)emulator::shared_memory(at, 16); }
inline void store_shared(u32 at, Vec v) { *(Vec*)emulator::shared_memory(at, 16) = v; }
inline Vec load_l2_vec(const void* p) { return *emulator::checked((const Vec*)p); }
template <typename T>
T load_l2(const T* p) {
  return *emulator::checked(p);
}

inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  struct Operands {
    u32 a[4], b[2];
  };
  const Operands* all = emulator::show(Operands{{a0, a1, a2, a3}, {b0, b1}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto half = [](u32 pair, int k) { return __uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16); };
  for (int j = 0; j < 4; j++)
    for (int k = 0; k < 16; k++) {
      const Operands& x = emulator::of_lane(all, g * 4 + k % 8 / 2);
      const Operands& w = emulator::of_lane(all, (2 * t + j % 2) * 4 + k % 8 / 2);
      c[j] += half(x.a[j / 2 + k / 8 * 2], k) * half(w.b[k / 8], k);
    }
}

namespace emulator {

inline float swizzled(unsigned matrix, int row, int k) {
  const unsigned at = matrix + row / 8 * 1024 + row % 8 * 128 + k * 2;
  return __uint_as_float((u32) * (const u16*)shared_memory(at ^ (at >> 7 & 7) << 4, 2) << 16);
}
inline void multiply(const Product& p) {
  const int lane = fiber->thread.x % 32, warp = fiber->thread.x / 32 % 4;
  for (int j = 0; j < p.columns / 2; j++) {
    const int row = warp * 16 + lane / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; k++) p.sums[j] += swizzled(p.a, row, k) * swizzled(p.b, column, k);
  }
}

}  // namespace emulator

template <int COLUMNS>
void wgmma(float (&d)[COLUMNS / 2], u32 a, u32 b) {
  if (a % 1024 >= 128 || b % 1024 >= 128 || a % 32 || b % 32) emulator::fail("misaligned matrix");
  emulator::fiber->products.push_back({d, COLUMNS, a, b});
}
inline void begin_wgmma() {}
inline void end_wgmma() {}
template <int COLUMNS>
void await_wgmma(float (&d)[COLUMNS / 2]) {
  for (const auto& p : emulator::fiber->products) emulator::multiply(p);
  emulator::fiber->products.clear();
  // It is over for all four warps at once.
  emulator::arrive_and_wait(emulator::fiber->block->warpgroups[emulator::fiber->thread.x / 128]);
}

inline void load_matrices(u32 (&r)[4], u32 at) {
  const u32* all = emulator::show(at);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const char* row = emulator::shared_memory(emulator::of_lane(all, 8 * i + lane / 4), 16);
    std::memcpy(&r[i], row + lane % 4 * 4, 4);
  }
  __syncwarp();
}
inline void load_transposed(u32 (&r)[4], u32 at) {
  const u32* all = emulator::show(at);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    u16 pair[2];
    for (int j = 0; j < 2; j++) {
      const u32 row = emulator::of_lane(all, 8 * i + lane % 4 * 2 + j);
      std::memcpy(&pair[j], emulator::shared_memory(row, 16) + lane / 4 * 2, 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
  __syncwarp();
}

inline u32 transpose(u32 pair) {
  const u32* all = emulator::show(pair);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto element = [&](int row, int column) {
    return emulator::of_lane(all, row * 4 + column / 2) >> column % 2 * 16 & 0xffff;
  };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

inline void arrive_in_cluster() {
  using namespace emulator;
  if (fiber->in_cluster) fail("arrived twice in the cluster");
  fiber->in_cluster = true;
  fiber->cluster_generation = cluster->barrier.generation;
  if (++cluster->barrier.arrived < cluster->barrier.expected) return;
  cluster->barrier.arrived = 0;
  cluster->barrier.generation++;
  events++;
}
inline void await_cluster() {
  using namespace emulator;
  if (!fiber->in_cluster) fail("waits for a cluster in which it has not arrived");
  fiber->in_cluster = false;
  fiber->saw_cluster = true;
  while (cluster->barrier.generation == fiber->cluster_generation) give_way();
}
inline u32 peer_address(u32 at, u32 rank) { return at | (rank + 1) << 24; }

// --- launch --------------------------------------------------------------------------------------

namespace emulator {

inline void (*body)();

inline void enter() {
  body();
  fiber->done = true;
  fiber->block->running--;
  events++;
  give_way();
}

inline void run_cluster(std::vector<Index> indices, int threads, int shared_bytes) {
  Cluster all;
  all.barrier.expected = threads * (int)indices.size();
  for (const Index& index : indices) {
    Block block{index};
    block.memory.assign(shared_bytes, (char)0xff);
    block.barrier.expected = block.predecessor.expected = block.running = threads;
    if (indices.size() > 1) block.held = random_bits() % 20;
    block.warps.resize(threads / 32);
    for (Warp& w : block.warps) w.barrier.expected = 32;
    block.warpgroups.resize(threads / 128);
    for (Barrier& group : block.warpgroups) group.expected = 128;
    all.blocks.push_back(std::move(block));
  }
  cluster = &all;
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (Block& block : all.blocks)
    for (int thread = 0; thread < threads; thread++) {
      auto f = std::make_unique<Fiber>();
      f->thread.x = thread;
      f->block = &block;
      f->stack.resize(64 << 10);
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.data();
      f->context.uc_stack.ss_size = f->stack.size();
      f->context.uc_link = nullptr;
      makecontext(&f->context, enter, 0);
      fibers.push_back(std::move(f));
    }
  while (!fibers.empty() && error.empty()) {
    const unsigned long before = events;
    std::shuffle(fibers.begin(), fibers.end(), random_bits);
    bool held = false;
    for (Block& block : all.blocks) {
      if (all.blocks.size() > 1 && random_bits() % 16 == 0) block.held = random_bits() % 20;
      held |= block.running > 0 && block.held-- > 0;
    }
    for (auto& f : fibers) {
      fiber = f.get();
      if (fiber->block->held >= 0) continue;
      swapcontext(&scheduler, &f->context);
      if (!error.empty()) return;
    }
    if (events == before && !held) error = "threads wait for each other in vain";
    fibers.erase(std::remove_if(fibers.begin(), fibers.end(), [](auto& f) { return f->done; }),
                 fibers.end());
  }
}

// Runs `kernel` on a grid, in clusters of blocks next to each other in x. `values` are its arguments'
// addresses; `ranges` what it may touch, of which those with `is_late` are still being written.
template <typename... Arguments, size_t... I>
const char* launch(void (*kernel)(Arguments...), void** values, std::index_sequence<I...>,
                   const int* grid, int threads, int cluster_size, int shared_bytes, int ranges,
                   void** begins, const long long* sizes, const int* is_late, unsigned seed) {
  static void (*called)(Arguments...);
  static void** passed;
  called = kernel, passed = values;
  body = [] { called(*(std::decay_t<Arguments>*)passed[I]...); };
  error.clear(), memory.clear(), late.clear();
  random_bits.seed(seed);
  gridDim = Index{(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
  for (int i = 0; i < ranges; i++) {
    Range range{(const char*)begins[i], (size_t)sizes[i]};
    memory.push_back(range);
    if (!is_late[i]) continue;
    late.emplace_back(range, std::vector<char>(range.begin, range.begin + range.size));
  }
  for (auto& [range, bytes] : late) std::memset((char*)range.begin, 0xff, range.size);
  std::vector<std::vector<Index>> clusters;
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x += cluster_size) {
        clusters.emplace_back();
        for (int i = 0; i < cluster_size; i++)
          clusters.back().push_back(Index{(unsigned)(x + i), (unsigned)y, (unsigned)z});
      }
  std::shuffle(clusters.begin(), clusters.end(), random_bits);
  for (auto& indices : clusters) {
    run_cluster(indices, threads, shared_bytes);
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}

}  // namespace emulator
