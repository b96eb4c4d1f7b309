// Which work a CTA of moe_widened.cu has. An expert and up to PASS of its rows are a unit; a unit has TILES
// tiles of the weight, and all tiles, unit by unit, are divided evenly among the CTAs. Of its tiles a CTA's
// warps take one after the other. Rows of as many units as there is room for, PASS rows in eights, are in
// shared memory at once, so that nobody waits between these.

struct Schedule {
  u32 rows_low[HELD], rows_high[HELD];  // of each expert on the list, a bit for each row
  u32 experts[HELD];
  u32 units[MOST_UNITS];  // number on the list, and the pass times 65,536
  int places[ROWS * TOP_K];
  float weights[ROWS * TOP_K];
  // Of the rows in shared memory: places in the table of chosen experts, rows, and what they weigh. Between
  // the last row of a unit and the next eight are some that are none, -1.
  int place_of[PASS], row_of[PASS];
  float weight_of[PASS];
  int unit_count;
};

__device__ __forceinline__ int rows_of(const Schedule& s, int number) {
  return __popc(s.rows_low[number]) + __popc(s.rows_high[number]);
}

// All threads read; the first warp counts units.
__device__ __forceinline__ void read_schedule(Schedule& s, const u32* experts, const i64* bits,
                                              const u32* found, const u32* ids, const float* weights) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int listed = (int)load_l2(found);
  for (int i = threadIdx.x; i < HELD; i += THREADS) {
    const u64 rows = (u64)load_l2(bits + i);
    s.experts[i] = load_l2(experts + i);
    s.rows_low[i] = (u32)rows, s.rows_high[i] = (u32)(rows >> 32);
  }
  for (int i = threadIdx.x; i < ROWS * TOP_K; i += THREADS) {
    s.places[i] = (int)load_l2(ids + i);
    s.weights[i] = __uint_as_float(load_l2((const u32*)weights + i));
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < listed; first += 32) {
      const int i = first + lane, passes = i < listed ? (rows_of(s, i) + PASS - 1) / PASS : 0;
      int end = passes;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int more = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += more;
      }
      for (int pass = 0; pass < passes; pass++)
        s.units[before + end - passes + pass] = (u32)i | (u32)pass << 16;
      before += __shfl_sync(~0u, end, 31);
    }
    if (lane == 0) s.unit_count = before;
  }
  __syncthreads();
}

__device__ __forceinline__ int rows_of_unit(const Schedule& s, int unit) {
  return min(rows_of(s, s.units[unit] & 0xffff) - (int)(s.units[unit] >> 16) * PASS, PASS);
}
__device__ __forceinline__ int in_eights(int rows) { return (rows + 7) / 8 * 8; }

// The rows of a unit, in order, from row `into` of shared memory on. All threads call it.
__device__ __forceinline__ void take_rows(Schedule& s, int unit, int into) {
  const int number = s.units[unit] & 0xffff, first = (int)(s.units[unit] >> 16) * PASS;
  for (int row = threadIdx.x; row < ROWS; row += THREADS) {
    const u32 low = s.rows_low[number], high = s.rows_high[number], bit = 1u << row % 32;
    const bool has = (row < 32 ? low : high) & bit;
    const int below = __popc((row < 32 ? low : high) & (bit - 1)) + (row < 32 ? 0 : __popc(low)) - first;
    if (has && below >= 0 && below < PASS) {
      int place = row * TOP_K;
      for (int i = 0; i < TOP_K; i++)
        if (s.places[row * TOP_K + i] == (int)s.experts[number]) place = row * TOP_K + i;
      const int at = into + below;
      s.row_of[at] = row, s.place_of[at] = place, s.weight_of[at] = s.weights[place];
    }
  }
}

// The tiles of a warp, one after the other.
struct Cursor {
  int unit, tile, unit_end, end, warp;  // tiles count from the first unit on

  __device__ __forceinline__ void to_where_there_are_tiles() {
    while (tile >= unit_end && unit_end < end)
      unit++, tile = unit_end + warp, unit_end = min(unit_end + TILES, end);
  }
  __device__ __forceinline__ Cursor(int first, int end_, int warp_) : end(end_), warp(warp_) {
    unit = first / TILES, tile = first + warp, unit_end = min((unit + 1) * TILES, end);
    to_where_there_are_tiles();
  }
  __device__ __forceinline__ void next() {
    tile += WARPS;
    to_where_there_are_tiles();
  }
  __device__ __forceinline__ bool is_there() const { return tile < unit_end; }
  __device__ __forceinline__ int tile_of_unit() const { return tile - unit * TILES; }
};
