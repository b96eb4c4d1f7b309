// The emulator behind emulated_intrinsics.hpp: the threads of a cluster are fibers of one thread,
// which run in random order from one point where they wait for each other to the next. It is meant to
// be stricter than a GPU:
//
//   - an asynchronous copy takes place when it is issued or when it is awaited, at random, and so does
//     what a block sends to a peer;
//   - wgmma reads its operands when it is issued or when it is awaited, at random for each block, and
//     what a thread stored to shared memory only if that thread has published it since;
//   - blocks of a cluster begin late and fall behind, at random; nothing may be sent before all have
//     begun, nor to one that has ended;
//   - what the kernel before writes is garbage until all threads of the first cluster wait for it;
//   - shared memory begins as NaN, and every address is checked against what the kernel was given;
//   - what is published to another rank is there later, at random;
//   - threads that wait for each other in vain are an error.
//
// Blocks of different clusters run one after another, in random order.

emulator::Index gridDim;

namespace emulator {

Place* place;

float number_of(u32 bits, int exponent, int mantissa, int bias);
float float_of_half(u32 bits);
namespace {

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  alignas(16) char lanes[2][32][MOST_SHOWN];  // what the lanes show each other, in turn
};

struct Copy {
  char* into;
  const char* from;  // null: zeros
  size_t size = 16;
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
  u32 threads = 1, missing = 1;  // that arrive in each phase, where that is not one with bytes
  unsigned parity = 0;
  std::vector<Copy> under_way;
  std::vector<Delivery> sent;
};

struct Cluster;

struct Block {
  Index index;
  std::map<unsigned, Transfer> transfers;  // by address
  std::vector<char> memory;
  Barrier barrier, predecessor;
  std::vector<Warp> warps;
  std::vector<Barrier> warpgroups;
  std::map<int, Barrier> named;
  int running = 0;  // threads
  int held = 0;     // rounds for which no thread goes on
  Cluster* cluster = nullptr;
  u32 word = ~0u;  // of shared memory, static
  bool multiplies_early = false;  // products at once, where none before them is still to come
  std::vector<u32> stored;     // of each word who stored it last, and when: see mark_stored
  std::vector<u32> published;  // by thread: how often it has published what it stored
};

struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
};

// What one thread has of four warps' wgmma.
struct Product {
  float* sums;
  int columns;
  unsigned a, b;
  const u32* own = nullptr;  // in place of a: registers, read when the product is awaited
  bool e4m3 = false;         // 32 columns of bytes, in place of 16 of bfloat16
  bool adds = true;          // to what the sums are
  bool half = false;         // float16, in place of bfloat16
  unsigned apart = 0;        // of b[16 x columns], not transposed: bytes from 64 columns to the next
};

// Where a fiber runs. Making one takes system calls, so that one fiber after another has it.
struct Stack {
  static constexpr size_t size = 64 << 10;
  ucontext_t begin;
  jmp_buf place;  // where its fiber goes on
  bool entered = false;
  std::unique_ptr<char[]> memory{new char[size]};
};

struct Fiber : Place {
  Block* block;
  std::unique_ptr<Stack> stack;
  const unsigned* awaited = nullptr;  // the generation of what it waits for
  unsigned seen = 0;                  // what that was
  std::vector<Product> products;
  std::vector<std::vector<Product>> product_groups;
  bool has_begun = false;  // products, since it last awaited some and had their registers
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

// What was published to a peer; it is there as a whole.
struct Word {
  char* at;
  u64 bits;
  size_t size;
};

std::map<unsigned, Barrier> ranks;  // by number: all blocks of one that run
Fiber* fiber;  // is `place`
jmp_buf scheduler;
std::vector<std::unique_ptr<Stack>> idle;
std::mt19937 random_bits;
std::string error;
std::vector<Range> memory;  // what the kernel may touch
std::vector<std::pair<Range, std::vector<char>>> late;  // what the kernel before writes
std::vector<Word> sent_to_peers;  // and not there yet
unsigned long events;
unsigned late_begin, late_count;  // of blocks that begin after so many rounds
int late_rounds;
void (*body)();

// Unlike swapcontext, these two make no system call.
[[gnu::noinline]] void give_way() {
  if (!_setjmp(fiber->stack->place)) _longjmp(scheduler, 1);
}
[[gnu::noinline]] void go_on() {
  if (_setjmp(scheduler)) return;
  Stack& stack = *fiber->stack;
  if (stack.entered) _longjmp(stack.place, 1);
  stack.entered = true;
  setcontext(&stack.begin);
}

void wait_while(const unsigned& generation, unsigned seen) {
  fiber->awaited = &generation, fiber->seen = seen;
  while (generation == seen) give_way();
  fiber->awaited = nullptr;
}
bool waits(const Fiber& f) { return f.awaited && *f.awaited == f.seen; }

void arrive_and_wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.generation++;
    events++;
    return;
  }
  wait_while(barrier.generation, generation);
}

Warp& warp() { return fiber->block->warps[fiber->thread.x / 32]; }

// An address in a peer has the peer's rank + 1 in its upper byte.
Block& block_of(unsigned at) {
  if (at >> 24 == 0) return *fiber->block;
  Block& block = *fiber->block->cluster->blocks[(at >> 24) - 1];
  if (!fiber->saw_cluster) fail("a peer that may not have begun");
  if (block.running == 0) fail("a peer that has ended");
  return block;
}

// A thread has stored here, which wgmma does not see before it publishes that.
void mark_stored(const char* into, size_t size) {
  Block& block = *fiber->block;
  const u32 thread = fiber->thread.x, mark = (thread + 1) << 20 | (block.published[thread] & 0xfffff);
  const size_t begin = into - block.memory.data();
  for (size_t word = begin / 4; word < (begin + size + 3) / 4; word++) block.stored[word] = mark;
}
void demand_published(unsigned at) {
  const Block& block = *fiber->block;
  const u32 mark = block.stored[(at ^ (at >> 7 & 7) << 4) / 4];
  if (mark && (block.published[(mark >> 20) - 1] & 0xfffff) == (mark & 0xfffff))
    fail("wgmma reads what was stored and not published");
}

void copy(const Copy& c) {
  if (c.from)
    std::memcpy(c.into, c.from, c.size);
  else
    std::memset(c.into, 0, c.size);
}
Transfer& transfer(unsigned barrier) {
  auto& all = block_of(barrier).transfers;
  if (!all.count(barrier & 0xffffff)) fail("a barrier that nobody initialised");
  return all[barrier & 0xffffff];
}
void arrive(Transfer& t, long long bytes) {
  t.bytes -= bytes;
  if (!t.announced || t.bytes != 0) return;
  t.announced = false;
  t.parity ^= 1;
  events++;
}
void load_tile(unsigned into, const u64* map, std::vector<int> at, unsigned barrier) {
  const u64 *sizes = map + 1, *strides = map + 5, *tile = map + 9;
  auto& t = transfer(barrier);
  if (map[13] != at.size() || into % 1024) fail("a TMA tile of another kind, or misplaced");
  long long rows = 1;
  for (size_t d = 1; d < at.size(); d++) rows *= tile[d];
  for (long long row = 0; row < rows; row++)
    for (int chunk = 0; chunk < 8; chunk++) {
      const int first = at[0] + chunk * (16 / (int)strides[0]);  // elements, of so many bytes
      const char* from = (const char*)map[0] + first * strides[0];
      bool inside = first >= 0 && first < (long long)sizes[0];
      long long rest = row;
      for (size_t d = 1; d < at.size(); rest /= tile[d], d++) {
        const long long i = at[d] + rest % (long long)tile[d];
        inside = inside && i >= 0 && i < (long long)sizes[d];
        from += i * strides[d];
      }
      const unsigned to = into + row * 128 + chunk * 16, place = to ^ (to >> 7 & 7) << 4;
      std::fill_n(block_of(place).stored.begin() + (place & 0xffffff) / 4, 4, 0);
      Copy c{shared_at(place, 16),
             inside ? (const char*)checked(from, 16) : nullptr};
      if (random_bits() & 1)
        copy(c), arrive(t, 16);
      else
        t.under_way.push_back(c);
    }
}
void take(const Delivery& d, Transfer& t) {
  std::memcpy(d.into, d.bytes.data(), d.bytes.size());
  arrive(t, d.bytes.size());
}
void issue(unsigned into, const void* from, size_t size = 16) {
  Copy c{shared_at(into, size), (const char*)(from ? checked(from, size) : nullptr), size};
  if (random_bits() & 1)
    copy(c), mark_stored(c.into, size);
  else
    fiber->issued.push_back(c);
}

float number(u32 bits, bool half) { return half ? float_of_half(bits) : __uint_as_float(bits << 16); }
float swizzled_number(unsigned at, bool half) {
  return number(*(const u16*)shared_at(at ^ (at >> 7 & 7) << 4, 2), half);
}
float swizzled(unsigned matrix, int row, int k, bool half) {
  return swizzled_number(matrix + row / 8 * 1024 + row % 8 * 128 + k * 2, half);
}
float swizzled_e4m3(unsigned matrix, int row, int k) {
  const unsigned at = matrix + row / 8 * 1024 + row % 8 * 128 + k;
  static const std::vector<float> numbers = [] {
    std::vector<float> made;
    for (u32 byte = 0; byte < 256; byte++)
      made.push_back((byte & 0x7f) == 0x7f ? std::nanf("") : number_of(byte, 4, 3, 7));
    return made;
  }();
  return numbers[*(const unsigned char*)shared_at(at ^ (at >> 7 & 7) << 4, 1)];
}
float swizzled_column(unsigned matrix, int column, int k, unsigned apart, bool half) {
  return swizzled_number(matrix + column / 64 * apart + k * 128 + column % 64 * 2, half);
}
struct Registers {
  u32 a[4];
};
// That all of a product's operands in shared memory are published; each lane looks at some of them.
void demand_published(const Product& p) {
  const int lane = fiber->thread.x % 32, warp = fiber->thread.x / 32 % 4;
  auto demand = [](unsigned matrix, int row, int word) {
    demand_published(matrix + row / 8 * 1024 + row % 8 * 128 + word * 4);
  };
  for (int word = lane % 2 * 4; p.own == nullptr && word < lane % 2 * 4 + 4; word++)
    demand(p.a, warp * 16 + lane / 2, word);
  for (int i = lane; i < p.columns * 8; i += 32)
    if (p.apart) {
      const int pair = i % (p.columns / 2), k = i / (p.columns / 2);
      demand_published(p.b + pair / 32 * p.apart + k * 128 + pair % 32 * 4);
    } else {
      demand(p.b, i / 8, i % 8);
    }
}
// `own`: of all lanes of the warp, if the left matrix is in registers.
void multiply(const Product& p, const Registers* own) {
  const int lane = fiber->thread.x % 32, warp = fiber->thread.x / 32 % 4;
  for (int j = 0; j < p.columns / 2; j++) {
    const int row = warp * 16 + lane / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + lane % 4 * 2 + j % 2;
    if (!p.adds) p.sums[j] = 0.f;
    for (int k = 0; p.e4m3 && k < 32; k++)
      p.sums[j] += swizzled_e4m3(p.a, row, k) * swizzled_e4m3(p.b, column, k);
    if (p.e4m3) continue;
    for (int k = 0; k < 16; k++) {
      float v;
      if (own == nullptr) {
        v = swizzled(p.a, row, k, p.half);
      } else {
        const u32 pair = of_lane(own, lane / 4 * 4 + k % 8 / 2).a[j % 4 / 2 + k / 8 * 2];
        v = number(k % 2 ? pair >> 16 : pair & 0xffff, p.half);
      }
      p.sums[j] += v * (p.apart ? swizzled_column(p.b, column, k, p.apart, p.half)
                                : swizzled(p.b, column, k, p.half));
    }
  }
}

u32 round_to_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  if (std::isnan(v)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace

void fail(const char* what) {
  if (error.empty()) {
    const Index b = fiber->block->index;
    error = std::string(what) + " (block " + std::to_string(b.x) + "," + std::to_string(b.y) + "," +
            std::to_string(b.z) + " thread " + std::to_string(fiber->thread.x) + ")";
  }
  for (;;) give_way();
}

const void* checked(const void* p, size_t size) {
  if ((uintptr_t)p % std::min<size_t>(size, 16)) fail("misaligned access to memory");
  for (const Range& range : memory)
    if ((const char*)p >= range.begin && (const char*)p + size <= range.begin + range.size) return p;
  fail("access to memory of nobody");
  return p;
}

void await_rank(unsigned rank, unsigned blocks) {
  Barrier& barrier = ranks[rank];
  barrier.expected = blocks * fiber->block->barrier.expected;
  arrive_and_wait(barrier);
}

const char* show(const void* value, size_t size) {
  Warp& w = warp();
  const unsigned turn = w.barrier.generation & 1;
  std::memcpy(w.lanes[turn][fiber->thread.x % 32], value, size);
  arrive_and_wait(w.barrier);
  return w.lanes[turn][0];
}

char* shared_at(u32 at, u32 size) {
  Block& block = block_of(at);
  at &= 0xffffff;
  if (at % size) fail("misaligned access to shared memory");
  if (at + size > block.memory.size()) fail("access beyond shared memory");
  return block.memory.data() + at;
}

void store(u32 at, const void* value, u32 size) {
  char* into = shared_at(at, size);
  std::memcpy(into, value, size);
  if (at >> 24 == 0) mark_stored(into, size);
}

void send(u32 into, const void* value, u32 size, u32 barrier) {
  if (into >> 24 != barrier >> 24) fail("bytes for one block, reported to another");
  auto& t = transfer(barrier);
  Delivery d{shared_at(into, size), {(const char*)value, (const char*)value + size}};
  if (random_bits() & 1)
    take(d, t);
  else
    t.sent.push_back(std::move(d)), events++;
}

void await_copies(size_t pending) {
  auto& groups = fiber->groups;
  while (groups.size() > pending) {
    for (const auto& c : groups.front()) copy(c), mark_stored(c.into, c.size);
    groups.erase(groups.begin());
  }
}

void copy_few(u32 into, const void* from, size_t size) { issue(into, from, size); }

void publish(void* at, const void* value, size_t size) {
  checked(at, size);
  if (std::memcmp(at, value, size)) events++;
  std::memcpy(at, value, size);
}

namespace {
void issue_product(const Product& p) {
  if (!fiber->has_begun) fail("wgmma without the fence in front of it");
  fiber->products.push_back(p);
}
}  // namespace

void begin_wgmma() { fiber->has_begun = true; }
void wgmma(float* sums, int columns, u32 a, u32 b) {
  if (a % 1024 >= 128 || b % 1024 >= 128 || a % 32 || b % 32) fail("misaligned matrix");
  issue_product({sums, columns, a, b});
}
void wgmma(float* sums, int columns, const u32* a, u32 b) {
  if (b % 1024 >= 128 || b % 32) fail("misaligned matrix");
  issue_product({sums, columns, 0, b, a});
}
void wgmma_e4m3(float* sums, int columns, u32 a, u32 b, bool adds) {
  wgmma(sums, columns, a, b);
  fiber->products.back().e4m3 = true, fiber->products.back().adds = adds;
}
void wgmma_or_set(float* sums, int columns, u32 a, u32 b, bool adds, bool half) {
  wgmma(sums, columns, a, b);
  fiber->products.back().adds = adds, fiber->products.back().half = half;
}
void wgmma_of_columns(float* sums, int columns, const u32* a, u32 b, u32 apart, bool half) {
  if (b % 1024 || apart % 1024) fail("misaligned matrix");
  issue_product({sums, columns, 0, b, a});
  fiber->products.back().apart = apart, fiber->products.back().half = half;
}
namespace {
void multiply_all(std::vector<Product>& products) {
  for (const auto& p : products) {
    const Registers* own = nullptr;
    if (p.own != nullptr) own = show(Registers{{p.own[0], p.own[1], p.own[2], p.own[3]}});
    demand_published(p);
    multiply(p, own);
  }
  products.clear();
}
}  // namespace

void end_wgmma() {
  auto& groups = fiber->product_groups;
  const bool are_first =
      std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.empty(); });
  groups.push_back(std::move(fiber->products));
  fiber->products.clear();
  if (fiber->block->multiplies_early && are_first) multiply_all(groups.back());
}
void await_wgmma(size_t pending) {
  auto& groups = fiber->product_groups;
  // They take their time, in which others may write over what they read.
  const bool is_late = !fiber->block->multiplies_early && groups.size() > pending;
  for (u32 turns = is_late ? random_bits() % 4 : 0; turns; turns--) events++, give_way();
  while (groups.size() > pending) {
    multiply_all(groups.front());
    groups.erase(groups.begin());
  }
  fiber->has_begun = false;
  // It is over for all four warps at once.
  arrive_and_wait(fiber->block->warpgroups[fiber->thread.x / 128]);
}

}  // namespace emulator

using namespace emulator;

extern "C" void let_blocks_be_late(unsigned begin, unsigned count, int rounds) {
  late_begin = begin, late_count = count, late_rounds = rounds;
}

void __syncthreads() { arrive_and_wait(fiber->block->barrier); }
void __syncwarp() { arrive_and_wait(warp().barrier); }
bool __any_sync(unsigned, bool v) {
  const bool* all = show(v);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= of_lane(all, lane);
  return any;
}
u32 __reduce_add_sync(unsigned, u32 v) {
  const u32* all = show(v);
  u32 sum = 0;
  for (int lane = 0; lane < 32; lane++) sum += of_lane(all, lane);
  return sum;
}
u32 __reduce_max_sync(unsigned, u32 v) {
  const u32* all = show(v);
  u32 most = 0;
  for (int lane = 0; lane < 32; lane++) most = std::max(most, of_lane(all, lane));
  return most;
}
u32 __reduce_min_sync(unsigned, u32 v) { return ~__reduce_max_sync(~0u, ~v); }
u32 __ballot_sync(unsigned, bool v) {
  const bool* all = show(v);
  u32 bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (u32)of_lane(all, lane) << lane;
  return bits;
}

void publish_to_peer(u64* at, u64 a, u64 b) {
  checked((const void*)at, 16);
  sent_to_peers.push_back({(char*)at, a, 8}), sent_to_peers.push_back({(char*)(at + 1), b, 8});
}

void publish_to_peer(u64* at, u64 a) {
  checked((const void*)at, 8);
  sent_to_peers.push_back({(char*)at, a, 8});
}

void publish_to_peer(u32* at, Vec v) {
  checked((const void*)at, 16);
  for (u32 word : {v.x, v.y, v.z, v.w}) sent_to_peers.push_back({(char*)at++, word, 4});
}

void wait_a_little() { give_way(); }

void publish_stores() { fiber->block->published[fiber->thread.x]++; }

void sync_named(int which, int threads) {
  Barrier& barrier = fiber->block->named[which];
  barrier.expected = threads;
  arrive_and_wait(barrier);
}
void arrive_named(int which, int threads) {
  Barrier& barrier = fiber->block->named[which];
  barrier.expected = threads;
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  barrier.generation++;
  events++;
}

void wait_for_predecessor() {
  arrive_and_wait(fiber->block->predecessor);
  for (auto& [range, bytes] : late) std::memcpy((char*)range.begin, bytes.data(), bytes.size());
  late.clear();
}

u32 permute(u32 word, u32 which) {
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 digit = which >> 4 * i, byte = word >> 8 * (digit & 3) & 0xff;
    r |= (digit & 8 ? byte >> 7 ? 0xff : 0 : byte) << 8 * i;
  }
  return r;
}
float4 widen_four(u32 word) {
  auto widen = [&](int at) {
    const int bits = word >> 8 * at & 0xff, exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return bits & 0x80 ? -size : size;
  };
  return make_float4(widen(0), widen(1), widen(2), widen(3));
}
u32 pack(float lo, float hi) { return round_to_bf16(lo) | round_to_bf16(hi) << 16; }
u32 mul2(u32 a, u32 b) {
  auto product = [](u32 a, u32 b) { return __uint_as_float(a << 16) * __uint_as_float(b << 16); };
  return pack(product(a & 0xffff, b & 0xffff), product(a >> 16, b >> 16));
}

namespace emulator {
// A number of `exponent` bits with this bias, and `mantissa` bits behind them; subnormal ones too.
float number_of(u32 bits, int exponent, int mantissa, int bias) {
  const int power = bits >> mantissa & ((1 << exponent) - 1);
  const int digits = bits & ((1 << mantissa) - 1);
  const float size = std::ldexp((float)(power ? digits | 1 << mantissa : digits),
                                (power ? power : 1) - bias - mantissa);
  return bits >> (exponent + mantissa) & 1 ? -size : size;
}
// The nearest of them to v, ties to even, by steps between them; it may be one too large.
u32 nearest(float v, int exponent, int mantissa, int bias) {
  const u32 sign = std::signbit(v) ? 1u << (exponent + mantissa) : 0;
  if (v == 0.f) return sign;
  int power;
  std::frexp(v, &power);  // v is less than 2 ** power
  power = std::max(power, 2 - bias);
  const u32 steps = (u32)std::nearbyint(std::ldexp(std::fabs(v), mantissa + 1 - power));
  return sign | (((u32)(power + bias - 2) << mantissa) + steps);
}
float float_of_half(u32 bits) {
  bits &= 0xffff;
  if ((bits & 0x7c00) == 0x7c00) {
    if (bits & 0x3ff) return std::nanf("");
    return bits >> 15 ? -INFINITY : INFINITY;
  }
  return number_of(bits, 5, 10, 15);
}
u32 round_to_half(float v) {
  if (std::isnan(v)) return 0x7fff;
  const u32 sign = std::signbit(v) ? 0x8000 : 0;
  if (std::fabs(v) >= 65520.f) return sign | 0x7c00;
  return nearest(v, 5, 10, 15);
}
u32 round_to_e4m3(float v) {
  if (std::isnan(v)) return 0x7f;
  return nearest(std::min(std::max(v, -448.f), 448.f), 4, 3, 7);
}
u32 half_of_e4m3(u32 byte) {
  return (byte & 0x7f) == 0x7f ? 0x7fff : round_to_half(number_of(byte, 4, 3, 7));
}
}  // namespace emulator
void halves_of_e4m3(u32 word, u32& first, u32& second) {
  auto half = [&](int byte) { return half_of_e4m3(word >> 8 * byte & 0xff); };
  first = half(0) | half(1) << 16, second = half(2) | half(3) << 16;
}
u32 narrow_e4m3(float lo, float hi) { return round_to_e4m3(lo) | round_to_e4m3(hi) << 8; }
u32 pack_half(float lo, float hi) { return round_to_half(lo) | round_to_half(hi) << 16; }

void copy16(u32 into, const void* from) { issue(into, from); }
void copy16_or_zero(u32 into, const void* from, bool keep) { issue(into, keep ? from : nullptr); }
void commit_copies() {
  fiber->groups.push_back(std::move(fiber->issued));
  fiber->issued.clear();
}

void init_barrier(u32 barrier, u32 arrivals) {
  shared_at(barrier, 8);
  Transfer t;
  t.threads = t.missing = arrivals;
  fiber->block->transfers[barrier] = t;
}
void arrive_at(u32 barrier) {
  auto& t = transfer(barrier);
  if (--t.missing) return;
  t.missing = t.threads;
  t.parity ^= 1;
  events++;
}
void expect_bytes(u32 barrier, u32 bytes) {
  auto& t = transfer(barrier);
  if (t.announced) fail("bytes announced twice in a phase");
  t.announced = true;
  t.bytes += bytes;
  events++;  // what is on its way arrives when a thread looks for it
  arrive(t, 0);
}
void await_bytes(u32 barrier, u32 parity) {
  for (;;) {
    auto& t = transfer(barrier);
    if (t.parity != parity) return;
    const auto copies = std::move(t.under_way);
    const auto sent = std::move(t.sent);
    t.under_way.clear(), t.sent.clear();
    for (const auto& c : copies) copy(c), arrive(t, 16);
    for (const auto& d : sent) take(d, t);
    if (t.parity == parity) give_way();
  }
}
void tma_load(u32 into, const TensorMap& map, int a, int b, u32 barrier) {
  load_tile(into, map.opaque, {a, b}, barrier);
}
void tma_multicast(u32 into, const TensorMap& map, int a, int b, u32 barrier, u32 mask) {
  for (u32 rank = 0; rank < 16; rank++)
    if (mask >> rank & 1)
      load_tile(peer_address(into, rank), map.opaque, {a, b}, peer_address(barrier, rank));
}
void tma_load(u32 into, const TensorMap& map, int a, int b, int c, int d, u32 barrier) {
  load_tile(into, map.opaque, {a, b, c, d}, barrier);
}

template <typename Number>
void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Number number) {
  struct Operands {
    u32 a[4], b[2];
  };
  const Operands* all = show(Operands{{a0, a1, a2, a3}, {b0, b1}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto half = [&](u32 pair, int k) { return number(k % 2 ? pair >> 16 : pair & 0xffff); };
  for (int j = 0; j < 4; j++)
    for (int k = 0; k < 16; k++) {
      const Operands& x = of_lane(all, g * 4 + k % 8 / 2);
      const Operands& w = of_lane(all, (2 * t + j % 2) * 4 + k % 8 / 2);
      c[j] += half(x.a[j / 2 + k / 8 * 2], k) * half(w.b[k / 8], k);
    }
}

void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_add(c, a0, a1, a2, a3, b0, b1, [](u32 bits) { return __uint_as_float(bits << 16); });
}
void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_add(c, a0, a1, a2, a3, b0, b1, float_of_half);
}

void load_matrices(u32 (&r)[4], u32 at) {
  const u32* all = show(at);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const char* row = shared_at(of_lane(all, 8 * i + lane / 4), 16);
    std::memcpy(&r[i], row + lane % 4 * 4, 4);
  }
  __syncwarp();
}
void load_transposed(u32 (&r)[4], u32 at) {
  const u32* all = show(at);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    u16 pair[2];
    for (int j = 0; j < 2; j++) {
      const u32 row = of_lane(all, 8 * i + lane % 4 * 2 + j);
      std::memcpy(&pair[j], shared_at(row, 16) + lane / 4 * 2, 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
  __syncwarp();
}
u32 transpose(u32 pair) {
  const u32* all = show(pair);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto element = [&](int row, int column) {
    return of_lane(all, row * 4 + column / 2) >> column % 2 * 16 & 0xffff;
  };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

void arrive_in_cluster() {
  if (fiber->in_cluster) fail("arrived twice in the cluster");
  fiber->in_cluster = true;
  Barrier& barrier = fiber->block->cluster->barrier;
  fiber->cluster_generation = barrier.generation;
  if (++barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  barrier.generation++;
  events++;
}
void await_cluster() {
  if (!fiber->in_cluster) fail("waits for a cluster in which it has not arrived");
  fiber->in_cluster = false;
  fiber->saw_cluster = true;
  wait_while(fiber->block->cluster->barrier.generation, fiber->cluster_generation);
}

// --- launch --------------------------------------------------------------------------------------

namespace emulator {

namespace {

void enter() {
  for (;;) {
    body();
    fiber->done = true;
    fiber->block->running--;
    events++;
    give_way();
  }
}

std::unique_ptr<Stack> idle_stack() {
  if (!idle.empty()) {
    auto stack = std::move(idle.back());
    idle.pop_back();
    return stack;
  }
  auto stack = std::make_unique<Stack>();
  getcontext(&stack->begin);
  stack->begin.uc_stack.ss_sp = stack->memory.get();
  stack->begin.uc_stack.ss_size = Stack::size;
  stack->begin.uc_link = nullptr;
  makecontext(&stack->begin, enter, 0);
  return stack;
}

// Some of what was published to peers, or all of it; words of one address in their order.
void deliver(bool everything) {
  std::vector<Word> later;
  std::set<char*> held;
  for (const Word& word : sent_to_peers) {
    if (!everything && (held.count(word.at) || random_bits() % 4)) {
      held.insert(word.at), later.push_back(word);
      continue;
    }
    std::memcpy(word.at, &word.bits, word.size), events++;
  }
  sent_to_peers = std::move(later);
}

// Clusters that run at once, of `cluster_size` blocks each.
void run_clusters(const std::vector<Index>& indices, int cluster_size, int threads, int shared_bytes) {
  std::vector<Block> blocks(indices.size());
  std::vector<Cluster> clusters(indices.size() / cluster_size);
  ranks.clear();
  for (size_t i = 0; i < indices.size(); i++) {
    Block& block = blocks[i];
    block.index = indices[i];
    block.memory.assign(shared_bytes, (char)0xff);
    block.stored.assign(shared_bytes / 4 + 4, 0), block.published.assign(threads, 0);
    block.barrier.expected = block.predecessor.expected = block.running = threads;
    if (indices.size() > 1) block.held = random_bits() % 20;
    if (block.index.x - late_begin < late_count) block.held = late_rounds;
    block.warps.resize(threads / 32);
    for (Warp& w : block.warps) w.barrier.expected = 32;
    block.multiplies_early = random_bits() & 1;
    block.warpgroups.resize(threads / 128);
    for (Barrier& group : block.warpgroups) group.expected = 128;
    block.cluster = &clusters[i / cluster_size];
    block.cluster->blocks.push_back(&block);
    block.cluster->barrier.expected = threads * cluster_size;
  }
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (Block& block : blocks)
    for (int thread = 0; thread < threads; thread++) {
      auto f = std::make_unique<Fiber>();
      f->thread.x = thread;
      f->index = block.index;
      f->shared_memory = block.memory.data();
      f->word = &block.word;
      f->block = &block;
      f->stack = idle_stack();
      fibers.push_back(std::move(f));
    }
  while (!fibers.empty() && error.empty()) {
    const unsigned long before = events;
    std::shuffle(fibers.begin(), fibers.end(), random_bits);
    bool held = false;
    for (Block& block : blocks) {
      const bool falls_behind = blocks.size() > 1 && random_bits() % 16 == 0;
      if (falls_behind) block.held = max(block.held, (int)(random_bits() % 20));
      held |= block.running > 0 && block.held-- > 0;
    }
    for (auto& f : fibers) {
      if (f->block->held >= 0 || waits(*f)) continue;
      place = fiber = f.get();
      go_on();
      if (!error.empty()) return;
      if (f->done) idle.push_back(std::move(f->stack));
    }
    const bool is_sending = !sent_to_peers.empty();
    deliver(false);
    if (events == before && !held && !is_sending) error = "threads wait for each other in vain";
    fibers.erase(std::remove_if(fibers.begin(), fibers.end(), [](auto& f) { return f->done; }),
                 fibers.end());
  }
  deliver(true);
}

}  // namespace

const char* run(void (*of_a_thread)(), const int* grid, int threads, int cluster_size, int at_once,
                int shared_bytes, int ranges, void** begins, const long long* sizes,
                const int* is_late, unsigned seed) {
  body = of_a_thread;
  error.clear(), memory.clear(), late.clear(), sent_to_peers.clear();
  random_bits.seed(seed);
  gridDim = Index{(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
  for (int i = 0; i < ranges; i++) {
    Range range{(const char*)begins[i], (size_t)sizes[i]};
    memory.push_back(range);
    if (!is_late[i]) continue;
    late.emplace_back(range, std::vector<char>(range.begin, range.begin + range.size));
  }
  for (auto& [range, bytes] : late) std::memset((char*)range.begin, 0xff, range.size);
  const int count = std::max(at_once, cluster_size);
  std::vector<std::vector<Index>> groups;
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x += count) {
        groups.emplace_back();
        for (int i = 0; i < count; i++)
          groups.back().push_back(Index{(unsigned)(x + i), (unsigned)y, (unsigned)z});
      }
  std::shuffle(groups.begin(), groups.end(), random_bits);
  for (const auto& indices : groups) {
    run_clusters(indices, cluster_size, threads, shared_bytes);
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}

}  // namespace emulator
