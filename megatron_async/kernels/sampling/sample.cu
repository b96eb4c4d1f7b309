// The token of each row of logits: bit for bit what sampling/sample.py says.
//
//   WIDE 1: fp32 logits, 0: bf16    VECTORS pieces of eight logits for each thread of a cluster
//   C blocks of THREADS threads (a cluster), G of them for each row
//   WINDOW rows in turn share an entry of the index and have positions in turn
//   TAKE 1: the last block of a row that is done writes its token, of a row with a NaN 0, to where the
//   row's place and to where its slot is
//
// A row without a filter is shared by all its clusters, and nothing is exchanged. One with a filter is
// done by the first of them: it keeps the row in shared memory, as keys that order like the logits, and
// searches for the thresholds of top-k and top-p among keys, with integer counts and masses of what
// reaches each of a few cuts, so that no order of sums matters; each round is one exchange within the
// cluster. Noise is made for what is kept. Each block leaves its best id.
//
// Floats are added and multiplied one by one: nothing of a score or a mass may become an FMA.

#define WARPS (THREADS / 32)
#define OWN_VECTORS ((VECTORS + G - 1) / G)     // of a row without a filter
#define AHEAD (OWN_VECTORS < 4 ? OWN_VECTORS : 4)
#define CUTS 4                                  // of a round
#define PARTS_AT 0                              // [WARPS][CUTS]: of this block
#define SENT_AT (PARTS_AT + WARPS * CUTS * 16)  // [2][C][CUTS]: of the cluster; one round's may come
                                                // while that of the round before is read
#define ALL_SENT_AT (SENT_AT + 2 * C * CUTS * 16)
#define KEYS_AT (ALL_SENT_AT + 16)              // [VECTORS][THREADS][8], of bf16 the upper halves
#define SHARED_BYTES (KEYS_AT + VECTORS * THREADS * 8 * (WIDE ? 4 : 2))

#define MASS_BITS 43
#define TOP_P_BITS 30
#define LEAST_KEY (-2147483647 - 1)  // below that of every float that is not NaN
#define MOST_KEY 2147483647          // above it
#define KEY_SHIFT (WIDE ? 0 : 16)    // the lower halves of keys of bf16 are zero
#define SCALED_LIMIT 1.2676506002282294e30f
#define INFINITE_KEY ((int)(WIDE ? 0x807fffffu : 0x807f0000u))  // that of minus infinity

static_assert(C >= 2 && C <= 8 && CUTS * 8 == 32, "a lane for each cut and block");
static_assert(WARPS <= 32, "a lane for each warp");

extern "C" __device__ const int shared_bytes = SHARED_BYTES;

extern __shared__ __align__(128) char shared[];

struct __align__(16) Part {
  i64 mass;
  int count, unused;
};
__device__ __forceinline__ float4 message(Part p) {
  return floats(Vec{(u32)p.mass, (u32)(p.mass >> 32), (u32)p.count, 0});
}

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }

// Both ways: floats to keys that order alike.
__device__ __forceinline__ u32 flip(u32 bits) { return bits ^ ((u32)((int)bits >> 31) & 0x7fffffffu); }
__device__ __forceinline__ int key_of(float v) { return v == 0.f ? 0 : (int)flip(__float_as_uint(v)); }
// Of logits: NaN is above all others, and so is its score, which is NaN; its row gives NAN_PACKED.
#define NAN_PACKED ((i64)0x7fffffffffffffff)  // above what any score is packed to
#define NAN_KEY (MOST_KEY & (int)KEPT)
__device__ __forceinline__ bool is_nan(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_nan_key(int key) { return key > 0x7f800000; }
#define KEPT (WIDE ? 0xffffffffu : 0xffff0000u)
__device__ __forceinline__ int logit_key(float v) {
  return is_nan(__float_as_uint(v)) ? NAN_KEY : (int)(key_of(v) & KEPT);
}
__device__ __forceinline__ float logit_of(int key) { return __uint_as_float(flip((u32)key) & KEPT); }

// Between shifted keys, and the least key that reaches it.
template <bool IS_WIDE>
struct Cuts {
  typedef i64 Cut;
};
template <>
struct Cuts<false> {
  typedef int Cut;
};
typedef Cuts<WIDE>::Cut Cut;
__device__ __forceinline__ int reaching(Cut cut) {
  return cut >= (Cut)(MOST_KEY >> KEY_SHIFT) ? MOST_KEY : (int)(cut * (1 << KEY_SHIFT));
}

__device__ __forceinline__ float scaled_by(float v, float factor) {
  v = mul(v, factor);
  return v > SCALED_LIMIT ? SCALED_LIMIT : v < -SCALED_LIMIT ? -SCALED_LIMIT : v;
}

// exact_math.log
__device__ __forceinline__ float exact_log(float v) {
  const int bits = (int)__float_as_uint(v), exponent = (bits - 0x3f3504f3) >> 23;
  const float f = add(__uint_as_float((u32)(bits - exponent * (1 << 23))), -1.f);
  const float e = (float)exponent, square = mul(f, f);
  float q = add(mul(0x1.646952p-4f, f), -0x1.243b5ap-3f);
  q = add(mul(q, f), 0x1.31765ap-3f);
  q = add(mul(q, f), -0x1.538162p-3f);
  q = add(mul(q, f), 0x1.98d7b2p-3f);
  q = add(mul(q, f), -0x1.000384p-2f);
  q = add(mul(q, f), 0x1.5556dap-2f);
  q = add(mul(mul(q, f), square), mul(e, -0x1.bd0106p-13f));
  q = add(add(q, -mul(square, 0.5f)), f);
  return add(q, mul(e, 0x1.63p-1f));
}
// exact_math.exp2_mass
__device__ __forceinline__ i64 exp2_mass(float v) {
  v = v < -60.f ? -60.f : v;
  const int whole = (int)v;
  const float r = add(v, -(float)whole);
  float p = add(mul(0x1.c946bap-14f, r), 0x1.4e2ae6p-10f);
  p = add(mul(p, r), 0x1.39e3fcp-7f);
  p = add(mul(p, r), 0x1.c6948ep-5f);
  p = add(mul(p, r), 0x1.ebfac0p-3f);
  p = add(mul(p, r), 0x1.62e42cp-1f);
  p = add(mul(p, r), 1.f);
  return ((i64)(int)mul(p, 16777216.f) << (MASS_BITS - 24)) >> -whole;
}
// noise.gumbel_from_bits
__device__ __forceinline__ float gumbel(u32 bits) {
  // (2 bits + 1) / 2^33, rounded once. Where two bits and more are rounded off, the added half only
  // keeps a tie from being one, as does the lowest bit.
  const bool is_small = bits < 1u << 25;
  float v = mul((float)(is_small ? bits * 2 + 1 : bits | 1), is_small ? 0x1p-33f : 0x1p-32f);
  v = v > 0x1.fffffep-1f ? 0x1.fffffep-1f : v;
  const float w = add(-v, 1.f);
  return -exact_log(-add(exact_log(w), add(-v, -add(w, -1.f))));
}
// philox.philox4x32
__device__ __forceinline__ void noise_bits(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)c[0] * 0xd2511f53u, b = (u64)c[2] * 0xcd9e8d57u;
    c[0] = (u32)(b >> 32) ^ c[1] ^ k0, c[1] = (u32)b;
    c[2] = (u32)(a >> 32) ^ c[3] ^ k1, c[3] = (u32)a;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
}

// Eight logits as they are.
struct Piece {
  Vec part[WIDE ? 2 : 1];
};
__device__ __forceinline__ Piece load_piece(const char* row, bool aligned, int id, int vocabulary) {
  Piece piece;
#pragma unroll
  for (int part = 0; part < (WIDE ? 2 : 1); part++) {
    if (aligned && id + 8 <= vocabulary) {
      piece.part[part] = load_l2_vec(row + (i64)id * (WIDE ? 4 : 2) + part * 16);
      continue;
    }
    auto logit = [&](int j) {
      const int at = min(id + j, vocabulary - 1);
      return WIDE ? load_l2((const u32*)row + at) : (u32)load_l2((const u16*)row + at);
    };
    auto word = [&](int j) {
      return WIDE ? logit(part * 4 + j) : logit(j * 2) | logit(j * 2 + 1) << 16;
    };
    piece.part[part] = Vec{word(0), word(1), word(2), word(3)};
  }
  return piece;
}
// In place: bits of logits become keys.
__device__ __forceinline__ void take_keys(Piece& piece, int id, int vocabulary) {
#pragma unroll
  for (int part = 0; part < (WIDE ? 2 : 1); part++) {
    Vec& v = piece.part[part];
    auto key = [&](u32 bits, int j) {
      return (u32)(id + j < vocabulary ? logit_key(__uint_as_float(bits)) : LEAST_KEY);
    };
    auto keys = [&](u32 word, int j) {
      return WIDE ? key(word, part * 4 + j) : key(word << 16, j * 2) >> 16 | key(word & KEPT, j * 2 + 1);
    };
    v = Vec{keys(v.x, 0), keys(v.y, 1), keys(v.z, 2), keys(v.w, 3)};
  }
}
__device__ __forceinline__ int key_at(const Piece& piece, int j) {
  const Vec& v = piece.part[WIDE ? j / 4 : 0];
  const int number = WIDE ? j % 4 : j / 2;
  const u32 word = number == 0 ? v.x : number == 1 ? v.y : number == 2 ? v.z : v.w;
  return (int)(WIDE ? word : j % 2 ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ u32 piece_at(u32 base, int number, int part) {
  return base + KEYS_AT + ((number * (WIDE ? 2 : 1) + part) * THREADS + threadIdx.x) * 16;
}
// Calls `body` with the keys that this thread keeps, eight in turn, and the first one's id.
template <typename BODY>
__device__ __forceinline__ void for_pieces(u32 base, int first, BODY body) {
#pragma unroll 1
  for (int number = 0; number < VECTORS; number++) {
    Piece piece;
#pragma unroll
    for (int part = 0; part < (WIDE ? 2 : 1); part++)
      piece.part[part] = load_shared(piece_at(base, number, part));
    body(piece, first + number * (THREADS * C * 8));
  }
}

struct Cluster {
  u32 base;
  int rank, turn;
  u32 passed;  // turns of both barriers, by parity

  template <typename JOIN>
  static __device__ __forceinline__ Part join_lanes(Part p, int lanes, JOIN joined) {
#pragma unroll
    for (int d = 1; d < lanes; d *= 2)
      p = joined(p, Part{__shfl_xor_sync(~0u, p.mass, d), __shfl_xor_sync(~0u, p.count, d), 0});
    return p;
  }
  // From each warp's parts, which all its lanes have, to those of the row, which all threads get.
  template <typename JOIN>
  __device__ __forceinline__ void join(Part (&parts)[CUTS], JOIN joined, Part nothing) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Part* of_warps = (Part*)(shared + PARTS_AT);
#pragma unroll
    for (int cut = 0; cut < CUTS; cut++)
      if (lane == cut) of_warps[warp * CUTS + cut] = parts[cut];
    __syncthreads();
    const u32 sent = SENT_AT + turn * C * CUTS * 16, all_sent = base + ALL_SENT_AT + turn * 8;
    for (int cut = warp; cut < CUTS; cut += WARPS) {
      const Part p = join_lanes(lane < WARPS ? of_warps[lane * CUTS + cut] : nothing, 32, joined);
      if (lane < C)
        send(peer_address(base + sent + (rank * CUTS + cut) * 16, lane), message(p),
             peer_address(all_sent, lane));
    }
    await_sent(all_sent, passed);
    const Part* of_blocks = (const Part*)(shared + sent);
    const Part p =
        join_lanes(lane % 8 < C ? of_blocks[lane % 8 * CUTS + lane / 8] : nothing, 8, joined);
#pragma unroll
    for (int cut = 0; cut < CUTS; cut++)
      parts[cut] = Part{__shfl_sync(~0u, p.mass, cut * 8), __shfl_sync(~0u, p.count, cut * 8), 0};
    if (threadIdx.x == 0) expect_bytes(all_sent, C * CUTS * 16);
    turn ^= 1;
    passed ^= turn == 0;
  }
};

// Raises `low`, a shifted key that `low_count` keys reach, until weight(>= low) >= need > weight(>= high)
// with one key in between: all thresholds there keep the same ids. Weights are counts, or masses, of
// which a share of `top_p` is needed. `largest` of the row's logits.
template <bool MASSES>
__device__ __forceinline__ void search(Cluster& cluster, int first, i64 need, float top_p, float factor,
                                       float largest, Cut& low, int& low_count) {
  const float scaled_largest = scaled_by(largest, factor);
  Cut high = (Cut)(logit_key(largest) >> KEY_SHIFT) + 1;
  i64 high_mass = 0;
  int high_count = 0;
  // Of masses a first round finds that at `low`, and so what is needed. It goes by distance from the
  // largest logit, a few further rounds by logits, as keys crowd around zero; then keys see to an end.
  for (int round = 0; (MASSES && round == 0) || (high - low > 1 && low_count - high_count > 1); round++) {
    const float least = logit_of(reaching(low)), span = logit_of(reaching(high)) - least;
    const bool by_value = round == 0 || (round < 4 && span < SCALED_LIMIT);
    const Cut step = (high - low + CUTS) / (CUTS + 1);
    Cut cuts[CUTS];
    int reach[CUTS];
    const int beyond = reaching(high);
    Part parts[CUTS];
#pragma unroll
    for (int cut = 0; cut < CUTS; cut++) {
      const int number = MASSES ? cut - 1 : cut;
      const float distance = number < 1 ? 14.f : number < 2 ? 6.f : number < 3 ? 2.5f : 1.f;
      const float value = round == 0 ? largest - distance / factor : least + span * ((cut + 1) * 0.2f);
      cuts[cut] = by_value ? (Cut)(logit_key(value) >> KEY_SHIFT) : low + (cut + 1) * step;
      cuts[cut] = max((Cut)(low + 1), min(cuts[cut], (Cut)(high - 1)));
      if (MASSES && round == 0 && cut == 0) cuts[cut] = low;
      reach[cut] = reaching(cuts[cut]);
      parts[cut] = Part{0, 0, 0};
    }
    // Of the keys below `high`: what the others weigh is known.
    for_pieces(cluster.base, first, [&](const Piece& piece, int) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int key = key_at(piece, j);
        if (key < reach[0] || key >= beyond) continue;
        i64 mass = 0;
        if (MASSES)
          mass = exp2_mass(mul(add(scaled_by(logit_of(key), factor), -scaled_largest), 0x1.715476p+0f));
#pragma unroll
        for (int cut = 0; cut < CUTS; cut++)
          if (key >= reach[cut]) parts[cut].count++, parts[cut].mass += mass;
      }
    });
#pragma unroll
    for (int cut = 0; cut < CUTS; cut++) {
      parts[cut].count = (int)__reduce_add_sync(~0u, (u32)parts[cut].count);
      if (MASSES) {  // in two halves: a thread's has less than 2^51
        const u32 lower = __reduce_add_sync(~0u, (u32)parts[cut].mass & 0x1ffffffu);
        const u32 upper = __reduce_add_sync(~0u, (u32)(parts[cut].mass >> 25));
        parts[cut].mass = ((i64)upper << 25) + lower;
      }
    }
    cluster.join(
        parts, [](Part a, Part b) { return Part{a.mass + b.mass, a.count + b.count, 0}; },
        Part{0, 0, 0});
    if (MASSES && round == 0) {
      const i64 total = parts[0].mass, one = (i64)1 << TOP_P_BITS;
      const i64 units = max((i64)mul(top_p, (float)one), (i64)1);
      need = (total >> TOP_P_BITS) * units + (((total & (one - 1)) * units + (one - 1)) >> TOP_P_BITS);
    }
    const i64 mass_before = high_mass;
    const int count_before = high_count;
    bool found = false;
#pragma unroll
    for (int cut = CUTS - 1; cut >= 0; cut--) {
      const i64 mass = mass_before + parts[cut].mass;
      const int count = count_before + parts[cut].count;
      if (found) continue;
      found = (MASSES ? mass : (i64)count) >= need;
      if (found)
        low = cuts[cut], low_count = count;
      else if (cuts[cut] < high)
        high = cuts[cut], high_mass = mass, high_count = count;
    }
  }
}

// The best score so far, of equal ones that of the lowest id.
struct Best {
  int key, id;

  __device__ __forceinline__ void consider(int candidate, int its_id) {
    if (candidate > key) key = candidate, id = its_id;
  }
  __device__ __forceinline__ void consider(const Piece& piece, int its_id) {
#pragma unroll
    for (int j = 0; j < 8; j++) consider(key_at(piece, j), its_id + j);
  }
  // With the noise of (seed, position, id), of the keys that reach the threshold.
  __device__ __forceinline__ void consider(const Piece& piece, int its_id, int threshold, float factor,
                                           i64 seed, i64 position) {
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      bool any = false;
      int keys[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        keys[j] = key_at(piece, four + j);
        any |= keys[j] >= threshold && keys[j] > INFINITE_KEY;
      }
      u32 noise[4] = {(u32)(its_id + four) / 4, (u32)position, (u32)(position >> 32), 0x746f6b65u};
      int scores[4];
#pragma unroll
      for (int j = 0; j < 4; j++)  // not in the vocabulary; not kept
        scores[j] = keys[j] == LEAST_KEY ? LEAST_KEY : INFINITE_KEY;
      if (any) {
        noise_bits(noise, (u32)seed, (u32)(seed >> 32));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int score = key_of(add(scaled_by(logit_of(keys[j]), factor), gumbel(noise[j])));
          if (keys[j] >= threshold && keys[j] > INFINITE_KEY) scores[j] = score;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) consider(scores[j], its_id + four + j);
    }
  }
};

extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const char* logits, int row_stride, int vocabulary, const float* inverse_temperature,
           const int* top_k, const float* top_p, const i64* seeds, const i64* positions,
           const int* index, int index_stride, i64* best_out
#if TAKE
           , u32* arrivals, i64* tokens, int tokens_stride, const i64* slots, i64* by_slot,
           int by_slot_stride
#endif
    ) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % C, group = blockIdx.x / C % G, row = blockIdx.x / C / G;
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; turn++) init_barrier(base + ALL_SENT_AT + turn * 8);
    publish_barriers();
    for (int turn = 0; turn < 2; turn++) expect_bytes(base + ALL_SENT_AT + turn * 8, C * CUTS * 16);
  }
  __syncwarp();
  arrive_in_cluster();  // peers may send
  wait_for_predecessor();
  release_successor();

  // Eight ids in turn, then THREADS * C * 8 further ones.
  const int first = (rank * THREADS + threadIdx.x) * 8;
  auto id_of = [&](int piece) { return first + piece * (THREADS * C * 8); };
  const char* from = logits + (i64)row * row_stride * (WIDE ? 4 : 2);
  const bool aligned = (u64)from % 16 == 0;
  Piece ahead[AHEAD];  // on their way while the parameters are
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    ahead[i] = load_piece(from, aligned, id_of(i * G + group), vocabulary);
  const int entry = row / WINDOW;
  const int at = index == nullptr ? entry : index[(i64)entry * index_stride];
  const float temperature = inverse_temperature[at];
  const bool sampled = temperature > 0.f;
  const float factor = temperature > SCALED_LIMIT ? SCALED_LIMIT : temperature;
  const int k = top_k[at];
  const float p = top_p[at];
  const i64 seed = seeds[at], position = positions[at] + row % WINDOW;
  const bool by_count = sampled && k > 0 && k < vocabulary;
  const bool by_mass = sampled && p > 0.f && p < 1.f;

  Best best{LEAST_KEY, 0};
  if (!by_count && !by_mass) {
#pragma unroll 1
    for (int i = 0; i < OWN_VECTORS; i += AHEAD) {
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const int id = id_of((i + j) * G + group);
        if (i > 0) ahead[j] = load_piece(from, aligned, id, vocabulary);
        take_keys(ahead[j], id, vocabulary);
        if (sampled)
          best.consider(ahead[j], id, LEAST_KEY, factor, seed, position);
        else
          best.consider(ahead[j], id);
      }
    }
  } else if (group == 0) {
    int largest = LEAST_KEY;
#pragma unroll(VECTORS < 4 ? VECTORS : 4)
    for (int number = 0; number < VECTORS; number++) {
      Piece piece = load_piece(from, aligned, id_of(number), vocabulary);
      take_keys(piece, id_of(number), vocabulary);
#pragma unroll
      for (int part = 0; part < (WIDE ? 2 : 1); part++)
        store_shared(piece_at(base, number, part), piece.part[part]);
#pragma unroll
      for (int j = 0; j < 8; j++) largest = max(largest, key_at(piece, j));
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    Part most[CUTS];
#pragma unroll
    for (int cut = 0; cut < CUTS; cut++) most[cut] = Part{0, largest, 0};
    Cluster cluster{base, rank, 0, 0};
    await_cluster();
    cluster.join(
        most, [](Part a, Part b) { return Part{0, max(a.count, b.count), 0}; },
        Part{0, LEAST_KEY, 0});
    const float largest_logit = logit_of(most[0].count);
    Cut low = INFINITE_KEY >> KEY_SHIFT;
    int low_count = vocabulary;
    const bool failed = is_nan_key(most[0].count);  // no threshold is above NaN, which is kept
    if (by_count && !failed) search<false>(cluster, first, k, 0.f, factor, largest_logit, low, low_count);
    if (by_mass && !failed) search<true>(cluster, first, 0, p, factor, largest_logit, low, low_count);
    const int threshold = reaching(low);
    for_pieces(base, first, [&](const Piece& piece, int id) {
      best.consider(piece, id, threshold, factor, seed, position);
    });
  }

  i64 packed = (i64)((u64)(u32)best.key << 32 | (u32)(best.id ^ MOST_KEY));
  if (is_nan_key(best.key)) packed = NAN_PACKED;
  auto largest_of = [&](i64 v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v = max(v, __shfl_xor_sync(~0u, v, d));
    return v;
  };
  packed = largest_of(packed);
  i64* of_warps = (i64*)(shared + PARTS_AT);  // parts of the last round have been sent
  if (lane == 0) of_warps[warp] = packed;
  __syncthreads();
  if (warp > 0) return;
  packed = largest_of(lane < WARPS ? of_warps[lane] : packed);
  if (lane == 0) best_out[blockIdx.x] = packed;
#if TAKE
  u32 before = 0;
  if (lane == 0) before = add_one_in_order(arrivals + row);
  __syncwarp();
  if (__shfl_sync(~0u, before, 0) != G * C - 1) return;
  for (int block = lane; block < G * C; block += 32)
    packed = max(packed, load_l2(best_out + row * (G * C) + block));
  packed = largest_of(packed);
  if (lane > 0) return;
  arrivals[row] = 0;  // for the next launch
  const i64 token = packed == NAN_PACKED ? 0 : (packed & MOST_KEY) ^ MOST_KEY;
  tokens[(i64)row * tokens_stride] = token;
  by_slot[slots[row] * by_slot_stride] = token;
#endif
}
