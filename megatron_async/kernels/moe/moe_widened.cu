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
//   THREADS, ST   of a CTA; steps of 2,048 bytes that each warp has on their way
//
// Rows of the step that one expert has are next to each other in shared memory. A product of a row has all its columns in one warp, in order, so its bits do not depend on other rows.

#include "moe_activation.cuh"
#if W8
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
#define SCALE_TILES (ST / STEPS + 2)  // those that are on their way, and the one that is used
#define RING_AT (PASS * X_ROW)
#define SCALES_AT (RING_AT + WARPS * ST * 2048)
#define SCHEDULE_AT (SCALES_AT + WARPS * SCALE_TILES * SCALE_TILE)

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
// Numbers n and n + 4 of a word, for n = 0, 1, 2, 3: their bits, in place. A product has them twice, once
// with the sign where it belongs, and once with exponent and mantissa.
__device__ __forceinline__ void widen_word(u32 word, u32 factor, u32 (&wide)[4]) {
  const u32 upper = word >> 8;
  wide[0] = mul2((word & 0x000f000fu) * 0x1040u & 0x81c081c0u, factor);
  wide[1] = mul2((word & 0x00f000f0u) * 0x104u & 0x81c081c0u, factor);
  wide[2] = mul2((upper & 0x000f000fu) * 0x1040u & 0x81c081c0u, factor);
  wide[3] = mul2((upper & 0x00f000f0u) * 0x104u & 0x81c081c0u, factor);
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

// A warp's loads of weights, ST steps ahead of their use.
struct Loads {
  Cursor at;
  const char *own, *below;  // what is loaded next of the lane's rows of the tile
  int step, stage, buffer;
  u32 ring, scales;

  // Row `g` of the tile, counted in rows of all experts; what is below it is `apart` rows on.
  __device__ __forceinline__ static size_t first_row(const Schedule& s, const Cursor& at, int g) {
    const size_t expert = s.experts[s.units[at.unit] & 0xffff];
    return expert * (OUT * (1 + HAS_HALVES)) + (size_t)at.tile_of_unit() * OF_TILE + g;
  }
  static const int apart = HAS_HALVES ? INNER : 8;

  __device__ __forceinline__ void next(const Arguments& given, const Schedule& s) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (at.is_there()) {
      if (step == 0) {
        own = given.w + first_row(s, at, g) * ROW_BYTES + t * 16, below = own + (size_t)apart * ROW_BYTES;
        const char* from = (const char*)given.scale + first_row(s, at, 0) * SCALE_BYTES;
        const u32 into = scales + buffer * SCALE_TILE;
        for (int i = lane; i < SCALE_TILE / 16; i += 32) {
          const bool is_below = i >= SCALE_TILE / 32;
          const int of_half = (is_below ? i - SCALE_TILE / 32 : i) * 16;
          copy16(into + i * 16, from + (is_below ? (size_t)apart * SCALE_BYTES : 0) + of_half);
        }
        buffer = buffer == SCALE_TILES - 1 ? 0 : buffer + 1;
      }
      const u32 into = ring + stage * 2048 + lane * 16;
#pragma unroll
      for (int v = 0; v < 2; v++) {
        const bool inside = has_vector(step, v);
        copy16_or_zero(into + v * 1024, own + v * 64, inside);
        copy16_or_zero(into + v * 1024 + 512, below + v * 64, inside);
      }
      own += 128, below += 128;
      stage = stage == ST - 1 ? 0 : stage + 1;
      if (++step == STEPS) step = 0, at.next();
    }
    commit_copies();
  }
};

// What a warp has read, and where it goes on.
struct Reads {
  Cursor at;
  int stage, buffer;
};

// The tiles of a unit that a warp has, for NT times eight rows, from row `first` of shared memory on, of
// which `count` are there.
template <int NT>
__device__ __forceinline__ void multiply_unit(const Arguments& given, const Schedule& s, Loads& loads,
                                              Reads& reads, int unit, int first, int count) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 x = shared_address(shared) + (first + g) * X_ROW;
#if W4
  const u32 swizzle = t / 2 | g % 2 * 2;
#elif W8
  const u32 swizzle = g % 2;
#else
  const u32 swizzle = g % 2 * 4;
#endif
  while (reads.at.unit == unit && reads.at.is_there()) {
    const size_t row = Loads::first_row(s, reads.at, g);
    const int column = reads.at.tile_of_unit() * OF_TILE + g;
    float bias[2] = {0.f, 0.f};
    if (!DOWN && given.bias) {
      bias[0] = widen(given.bias[row]);
      bias[1] = widen(given.bias[row + Loads::apart]);
    }
    const u32 own_scales = loads.scales + reads.buffer * SCALE_TILE + g * SCALE_BYTES;
    float sums[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; i++) (&sums[0][0][0])[i] = 0.f;
#if W8
    float total[NT][4];  // of scaled sums
#pragma unroll
    for (int i = 0; i < NT * 4; i++) (&total[0][0])[i] = 0.f;
    auto scale_up = [&](int group) {
      const Scale* of_row = (const Scale*)(shared + (own_scales - shared_address(shared)));
      const float above = of_row[group], under = of_row[group + 8 * SCALE_BYTES / 4];
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          total[nt][j] += (j < 2 ? above : under) * (sums[0][nt][j] + sums[1][nt][j]);
          sums[0][nt][j] = sums[1][nt][j] = 0.f;
        }
    };
#endif
    for (int step = 0; step < STEPS; step++) {
      await_copies<ST - 1>();
      if (step == 0) __syncwarp();  // the scales are there, which other lanes have loaded
      const u32 from = loads.ring + reads.stage * 2048 + lane * 16;
      Vec of[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) of[i / 2][i % 2] = load_shared(from + i * 512);
      reads.stage = reads.stage == ST - 1 ? 0 : reads.stage + 1;
      loads.next(given, s);
#pragma unroll
      for (int v = 0; v < 2; v++) {
        if (v && ROW_VECTORS % 8 && step * 8 + 4 >= ROW_VECTORS) break;  // nobody has a second one
        const Vec &above = of[v][0], &under = of[v][1];
        const u32 words[2][4] = {{above.x, above.y, above.z, above.w}, {under.x, under.y, under.z, under.w}};
#if W4
        const Scale* of_row = (const Scale*)(shared + (own_scales - shared_address(shared)));
        u32 factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = half * 8 * SCALE_BYTES + step * 8 + v * 4 + t;
          factor[half] = factor_of(has_vector(step, v) ? of_row[at] : 0);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
          u32 a[4], b[4];
          widen_word(words[0][p], factor[0], a);
          widen_word(words[1][p], factor[1], b);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            const Vec xs = load_shared(x + nt * 8 * X_ROW + (step * 32 + v * 16 + t * 4 + (p ^ swizzle)) * 16);
            mma(sums[p % 2][nt], a[0], b[0], a[1], b[1], xs.x, xs.y);
            mma(sums[p % 2][nt], a[2], b[2], a[3], b[3], xs.z, xs.w);
          }
        }
#elif !W8
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          const Vec xs = load_shared(x + nt * 8 * X_ROW + (step * 8 + (v * 4 + t ^ swizzle)) * 16);
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
            const Vec xs = load_shared(x + nt * 8 * X_ROW + (step * 16 + v * 8 + t * 2 + (p ^ swizzle)) * 16);
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
    reads.buffer = reads.buffer == SCALE_TILES - 1 ? 0 : reads.buffer + 1;
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
  Loads loads{begin, nullptr, nullptr, 0, 0, 0, base + RING_AT + warp * ST * 2048,
              base + SCALES_AT + warp * SCALE_TILES * SCALE_TILE};
  Reads reads{begin, 0, 0};
  for (int i = 0; i < ST; i++) loads.next(given, s);
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
