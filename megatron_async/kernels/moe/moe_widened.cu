// One of the two linear layers of a decode step's experts, whose weights are e4m3 or MXFP4, and are widened
// in registers, or bfloat16: mma m16n8k16 takes 16 rows of the weight and eight rows of a step. A thread loads 16 bytes
// of a row of the weight, and the numbers in them are its part of the operand: products have their columns
// in another order than memory has, the same for both operands. So a weight goes from memory to the thread
// that multiplies it, and no other sees it.
//
//   H, INNER   hidden size, and an expert's; HELD experts are here, a row has TOP_K places for experts
//   DOWN       0: out[place] = activation(x[row] w1^T + b1) * the expert's weight, bfloat16 [places, INNER]
//              1: out[place] = x[place] w2^T, fp32 [places, H]
//   W8, W4     1: e4m3, with an fp32 scale for SCALE_COLUMNS of a row; or MXFP4; else bfloat16
//   GATED, FUNCTION, HAS_LIMIT   see ExpertActivation; FUNCTION is in moe_activation.cuh
//   ROWS       of the step, at most; PASS of them are in shared memory at once; of an expert with
//              more the others come in further passes
//   THREADS, ST   of a CTA; steps of 2,048 bytes that each warp has on their way, at most those of a tile
//
// Rows of the step that one expert has are next to each other in shared memory. A product of a row has all its columns in one warp, in order, so its bits do not depend on other rows.

#include "moe_activation.cuh"
#if W4
#include "mxfp4.cuh"
#elif W8
#include "e4m3.cuh"
#endif

#define WARPS (THREADS / 32)
#define K (DOWN ? INNER : H)
#define OUT (DOWN ? H : INNER)
#define HAS_HALVES (!DOWN && GATED)
#define OF_TILE (HAS_HALVES ? 8 : 16)  // columns of the output: of gate and other half eight rows each
#define TILES (OUT / OF_TILE)
#define VALUES (W4 ? 32 : W8 ? 16 : 8)  // numbers in 16 bytes
#define ROW_BYTES (K / VALUES * 16)
#define ROW_VECTORS (ROW_BYTES / 16)
#define STEPS ((ROW_VECTORS + 7) / 8)  // a lane has two of these of each of its rows
#define X_ROW (STEPS * 8 * VALUES * 2)
#define SCALE_BYTES (W4 ? K / 32 : W8 ? K / SCALE_COLUMNS * 4 : 0)  // of a row
#define ONE_SCALE (W8 && SCALE_COLUMNS == K)
#define HALF_COLUMNS (4 * VALUES)  // of half a step, a vector of each lane
#define MOST_UNITS ((HELD < ROWS * TOP_K ? HELD : ROWS * TOP_K) + ROWS * TOP_K / PASS)
#define SCALE_TILE (16 * SCALE_BYTES)
#define AHEAD (ST < STEPS ? ST : STEPS)
#define RING_AT (PASS * X_ROW)
#define SCALES_AT (RING_AT + WARPS * AHEAD * 2048)
#define SCHEDULE_AT (SCALES_AT + WARPS * 2 * SCALE_TILE)  // of the tile that is used, and the next one

static_assert(!(W8 && W4) && K % (W4 ? 64 : 16) == 0 && OUT % 16 == 0 && PASS % 8 == 0 && PASS <= 32,
              "sizes");
static_assert(!W8 || ONE_SCALE || SCALE_COLUMNS % HALF_COLUMNS == 0, "columns that share a scale");

extern __shared__ __align__(16) char shared[];

#include "moe_widened_schedule.cuh"

#define SHARED_BYTES (SCHEDULE_AT + HELD * 12 + MOST_UNITS * 4 + ROWS * TOP_K * 8 + PASS * 12 + 16)
extern "C" __device__ const int shared_bytes = SHARED_BYTES;
static_assert(sizeof(Schedule) <= SHARED_BYTES - SCHEDULE_AT, "room for the schedule");

#if W4
typedef unsigned char Scale;
typedef u32 Factor;
#else
typedef float Scale;
typedef float Factor;
#endif
#if DOWN
typedef float Out;
#else
typedef u16 Out;
#endif

#if W4
// What a row's numbers are multiplied by, twice: bits in place are 2^-126 of a number. Products are 2^32
// times too small, as factors would be too large where scales are above 2; see mxfp4_triton.py.
__device__ __forceinline__ u32 factor_of(u32 scale) { return min(scale + 94u, 255u) * 0x00800080u; }
// Numbers n and n + 4 of a word, for n = 0, 1, 2, 3.
__device__ __forceinline__ void widen_word(u32 word, u32 factor, u32 (&wide)[4]) {
  wide[0] = mul2(mxfp4_bits<0>(word), factor), wide[1] = mul2(mxfp4_bits<1>(word), factor);
  wide[2] = mul2(mxfp4_bits<2>(word), factor), wide[3] = mul2(mxfp4_bits<3>(word), factor);
}
#endif

// Whether a row has vector v of a step of this lane.
__device__ __forceinline__ bool has_vector(int step, int v) {
  return ROW_VECTORS % 8 == 0 || step * 8 + v * 4 + (int)(threadIdx.x % 4) < ROW_VECTORS;
}

struct Arguments {
  const char* w;
  const Scale* scale;
  const u16* bias;
  float limit, offset;
  Out* out;
};

// A warp's loads of weights, AHEAD steps ahead of their use: a tile's last ones are of the next tile.
struct Loads {
  Cursor at;
  const char* own;  // what is loaded next of the lane's first row of the tile
  bool is_there;    // a tile that is loaded
  u32 ring, scales;  // of the lane, and of the warp
  u32 buffer;        // where the tile's scales are, behind `scales`

  static const int apart = HAS_HALVES ? INNER : 8;  // rows to the lane's second one

  // Row `g` of the tile, counted in rows of all experts.
  __device__ __forceinline__ static u32 first_row(const Schedule& s, const Cursor& at, int g) {
    const u32 expert = s.experts[s.units[at.unit] & 0xffff];
    return expert * (OUT * (1 + HAS_HALVES)) + at.tile_of_unit() * OF_TILE + g;
  }

  // Asks for the tile's scales.
  __device__ __forceinline__ void begin(const Arguments& given, const Schedule& s) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    is_there = at.is_there();
    if (!is_there) return;
    const u32 row = first_row(s, at, 0);
    own = given.w + (size_t)(row + g) * ROW_BYTES + t * 16;
    const char* from = (const char*)given.scale + (size_t)row * SCALE_BYTES;
    buffer = SCALE_TILE - buffer;
    for (int i = lane; i < SCALE_TILE / 16; i += 32) {
      const size_t to_second = i >= SCALE_TILE / 32 ? (size_t)(apart - 8) * SCALE_BYTES : 0;
      copy16(scales + buffer + i * 16, from + to_second + i * 16);
    }
  }
  // Asks for a step of the tile, the next one.
  __device__ __forceinline__ void ask(int step, u32 slot) {
    if (is_there) {
#pragma unroll
      for (int v = 0; v < 2; v++) {
        const bool inside = has_vector(step, v);
        copy16_or_zero(slot + v * 1024, own + v * 64, inside);
        copy16_or_zero(slot + v * 1024 + 512, own + (size_t)apart * ROW_BYTES + v * 64, inside);
      }
      own += 128;
    }
    commit_copies();
  }
  __device__ __forceinline__ void next(const Arguments& given, const Schedule& s) {
    at.next();
    begin(given, s);
  }
};

// What a warp reads next.
struct Reads {
  Cursor at;
  u32 buffer, slot;  // of the tile's scales, and of the step, behind where the loads have these
};

// The tiles of a unit that a warp has, for NT times eight rows, from row `first` of shared memory on, of
// which `count` are there.
template <int NT>
__device__ __forceinline__ void multiply_unit(const Arguments& given, const Schedule& s, Loads& loads,
                                              Reads& reads, int unit, int first, int count) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 x = shared_address(shared) + (first + g) * X_ROW + t * (VALUES * 2);
#if W4
  const u32 swizzle = t / 2 | g % 2 * 2;
#elif W8
  const u32 swizzle = g % 2;
#else
  const u32 swizzle = g % 2 * 64;
#endif
  constexpr bool has_room = !W8 || ONE_SCALE || NT < 4;  // in registers
  constexpr int unrolled = STEPS % AHEAD == 0 && has_room ? AHEAD : 1;  // so that slots are constants
  while (reads.at.unit == unit && reads.at.is_there()) {
    const int column = reads.at.tile_of_unit() * OF_TILE + g;
    float bias[2] = {0.f, 0.f};
    if (!DOWN && given.bias) {
      const u32 row = Loads::first_row(s, reads.at, g);
      bias[0] = widen(given.bias[row]);
      bias[1] = widen(given.bias[row + Loads::apart]);
    }
    const u32 scales = loads.scales + reads.buffer + g * SCALE_BYTES;
    const Scale* own_scales = (const Scale*)(shared + (scales - shared_address(shared)));
    float sums[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; i++) (&sums[0][0][0])[i] = 0.f;
#if W8
    float total[NT][4];  // of scaled sums
#pragma unroll
    for (int i = 0; i < NT * 4; i++) (&total[0][0])[i] = 0.f;
    auto scale_up = [&](int group) {
      const float above = own_scales[group], under = own_scales[group + 8 * SCALE_BYTES / 4];
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          total[nt][j] += (j < 2 ? above : under) * (sums[0][nt][j] + sums[1][nt][j]);
          sums[0][nt][j] = sums[1][nt][j] = 0.f;
        }
    };
#endif
    await_copies<AHEAD - 1>();
    __syncwarp();  // the scales are there, which other lanes have loaded
#pragma unroll unrolled
    for (int step = 0; step < STEPS; step++) {
      await_copies<AHEAD - 1>();
      const u32 slot = loads.ring + (STEPS % AHEAD == 0 ? step % AHEAD * 2048 : reads.slot);
      Vec of[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) of[i / 2][i % 2] = load_shared(slot + i * 512);
      if (step == STEPS - AHEAD) loads.next(given, s);
      loads.ask((step + AHEAD) % STEPS, slot);
      if (STEPS % AHEAD) reads.slot = reads.slot == (AHEAD - 1) * 2048 ? 0 : reads.slot + 2048;
#pragma unroll
      for (int v = 0; v < 2; v++) {
        if (v && STEPS * 8 - ROW_VECTORS >= 4 && step == STEPS - 1) break;  // nobody has a second one
        const Vec &above = of[v][0], &under = of[v][1];
        const u32 words[2][4] = {{above.x, above.y, above.z, above.w}, {under.x, under.y, under.z, under.w}};
#if W4
        u32 factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = half * 8 * SCALE_BYTES + step * 8 + v * 4 + t;
          factor[half] = factor_of(has_vector(step, v) ? own_scales[at] : 0);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
          u32 a[4], b[4];
          widen_word(words[0][p], factor[0], a);
          widen_word(words[1][p], factor[1], b);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            const Vec xs = load_shared(x + (p ^ swizzle) * 16 + nt * 8 * X_ROW + (step * 2 + v) * 256);
            mma(sums[p % 2][nt], a[0], b[0], a[1], b[1], xs.x, xs.y);
            mma(sums[p % 2][nt], a[2], b[2], a[3], b[3], xs.z, xs.w);
          }
        }
#elif !W8
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          const Vec xs = load_shared(x + nt * 8 * X_ROW + step * 128 + (v * 64 ^ swizzle));
          mma(sums[v][nt], words[0][0], words[1][0], words[0][1], words[1][1], xs.x, xs.y);
          mma(sums[v][nt], words[0][2], words[1][2], words[0][3], words[1][3], xs.z, xs.w);
        }
#else
#pragma unroll
        for (int p = 0; p < 2; p++) {
          u32 a[4], b[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            a[i] = widen_e4m3(words[0][p * 2 + i / 2], i % 2);
            b[i] = widen_e4m3(words[1][p * 2 + i / 2], i % 2);
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            const Vec xs = load_shared(x + (p ^ swizzle) * 16 + nt * 8 * X_ROW + (step * 2 + v) * 128);
            mma(sums[p][nt], a[0], b[0], a[1], b[1], xs.x, xs.y);
            mma(sums[p][nt], a[2], b[2], a[3], b[3], xs.z, xs.w);
          }
        }
        const int halves = SCALE_COLUMNS / HALF_COLUMNS;  // that share a scale
        if (!ONE_SCALE && (step * 2 + v + 1) % halves == 0) scale_up((step * 2 + v) / halves);
#endif
      }
    }
#if W8
    if (ONE_SCALE) scale_up(0);
#endif
    reads.buffer = SCALE_TILE - reads.buffer;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int n = nt * 8 + 2 * t + j;
        if (n >= count) continue;
#if W8
        const float value = total[nt][j], other = total[nt][2 + j];
#else
        const float missing = W4 ? 0x1p32f : 1.f;
        const float value = (sums[0][nt][j] + sums[1][nt][j]) * missing;
        const float other = (sums[0][nt][2 + j] + sums[1][nt][2 + j]) * missing;
#endif
        Out* out = given.out + (size_t)s.place_of[first + n] * OUT + column;
#if DOWN
        out[0] = value, out[8] = other;
#else
        auto activated = [&](float v) { return activate(HAS_LIMIT ? at_most(v, given.limit) : v); };
        const float weight = s.weight_of[first + n];
        if (GATED) {
          float factor = other + bias[1];
          if (HAS_LIMIT) factor = at_most(at_least(factor, -given.limit), given.limit);
          out[0] = narrow(activated(value + bias[0]) * (factor + given.offset) * weight);
        } else {
          out[0] = narrow(activated(value + bias[0]) * weight);
          out[8] = narrow(activated(other + bias[1]) * weight);
        }
#endif
      }
    reads.at.next();
    __syncwarp();  // WAR: all lanes have read the scales that are filled again
  }
}

// Rows come into shared memory, their numbers in the order in which they are multiplied: of eight MXFP4 has
// n and n + 4 in a pair. What lies behind a row is zero.
__device__ __forceinline__ void load_rows(const u16* x, const Schedule& s, int count) {
  const u32 base = shared_address(shared);
  const int chunks = X_ROW / 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < count * chunks; i += THREADS) {
    const int row = i / chunks, chunk = i % chunks;
    if (s.row_of[row] < 0) continue;
    Vec v{0, 0, 0, 0};
    if (X_ROW == K * 2 || chunk < K / 8)
      v = load_l2_vec(x + (size_t)(DOWN ? s.place_of[row] : s.row_of[row]) * K + chunk * 8);
#if W4
    const Vec as_loaded = v;
    v.x = (as_loaded.x & 0xffffu) | as_loaded.z << 16, v.y = as_loaded.x >> 16 | (as_loaded.z & 0xffff0000u);
    v.z = (as_loaded.y & 0xffffu) | as_loaded.w << 16, v.w = as_loaded.y >> 16 | (as_loaded.w & 0xffff0000u);
    const int swizzle = (chunk >> 3 & 1) | row % 2 * 2;
#elif W8
    const int swizzle = row % 2;
#else
    const int swizzle = row % 2 * 4;
#endif
    store_shared(base + row * X_ROW + (chunk ^ swizzle) * 16, v);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_widened(const u16* x, const char* w, const Scale* scale, const u16* bias, const u32* experts,
                const i64* bits, const u32* found, const u32* ids, const float* weights, float limit,
                float offset, Out* out) {
  const int warp = threadIdx.x / 32;
  Schedule& s = *(Schedule*)(shared + SCHEDULE_AT);
  // The first layer's CTAs have all waited for the router before one of the second's begins.
  if (!DOWN) wait_for_predecessor();
  release_successor();
  read_schedule(s, experts, bits, found, ids, weights);
  const i64 all = (i64)s.unit_count * TILES;
  const int first = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
  if (first == end) {
    if (DOWN) wait_for_predecessor();  // who comes next may write what the first layer reads
    return;
  }

  const Arguments given{w, scale, bias, limit, offset, out};
  const Cursor begin(first, end, warp);
  const u32 base = shared_address(shared);
  Loads loads{begin, nullptr, false, base + RING_AT + warp * AHEAD * 2048 + threadIdx.x % 32 * 16,
              base + SCALES_AT + warp * 2 * SCALE_TILE, SCALE_TILE};
  Reads reads{begin, 0, 0};
  loads.begin(given, s);
  for (int step = 0; step < AHEAD; step++) loads.ask(step, loads.ring + step * 2048);
  if (DOWN) wait_for_predecessor();
  for (int unit = first / TILES; unit * TILES < end;) {
    for (int i = threadIdx.x; i < PASS; i += THREADS) s.row_of[i] = -1;
    __syncthreads();  // WAR: all have multiplied the rows that were there
    int behind = unit, count = 0;
    for (; behind * TILES < end && count + in_eights(rows_of_unit(s, behind)) <= PASS; behind++) {
      take_rows(s, behind, count);
      count += in_eights(rows_of_unit(s, behind));
    }
    __syncthreads();
    load_rows(x, s, count);
    __syncthreads();
    for (count = 0; unit < behind; unit++) {
      const int rows = rows_of_unit(s, unit);
      if (rows <= 8) multiply_unit<1>(given, s, loads, reads, unit, count, rows);
#if PASS >= 16
      else if (rows <= 16) multiply_unit<2>(given, s, loads, reads, unit, count, rows);
#endif
#if PASS >= 24
      else if (rows <= 24) multiply_unit<3>(given, s, loads, reads, unit, count, rows);
#endif
#if PASS >= 32
      else multiply_unit<4>(given, s, loads, reads, unit, count, rows);
#endif
      count += in_eights(rows);
    }
  }
}
