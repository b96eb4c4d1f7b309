// Products of rows of weights with what lies in shared memory, normed rows and activations. Vectors of the
// two halves of a gated weight, of the same columns, are multiplied by the same.

#ifndef UP_BY_ROW
#define UP_BY_ROW 0
#endif
#ifndef UP_ON_TENSOR_CORES
#define UP_ON_TENSOR_CORES 0
#endif
#ifndef DOWN_ON_TENSOR_CORES
#define DOWN_ON_TENSOR_CORES 0
#endif

// Of a row of OF_ROW vectors those of this lane in a step, of which each has EACH. Where two steps or one are
// a row, `which` of two loads in turn says it, and is known at compile time.
template <int OF_ROW, int EACH>
struct Vectors {
  int step;
  __device__ __forceinline__ Vectors(int step, int which)
      : step(OF_ROW <= 32 * EACH ? 0 : OF_ROW <= 64 * EACH ? which : step) {}
  __device__ __forceinline__ int first(int u) const { return (step * EACH + u) * 32; }
  __device__ __forceinline__ int of(int u) const { return first(u) + (int)(threadIdx.x % 32); }
  __device__ __forceinline__ bool has(int u) const { return OF_ROW % 32 ? of(u) < OF_ROW : has_some(u); }
  // Whether this is one of the row for some lane of the warp, and for others the row's last one.
  __device__ __forceinline__ bool has_some(int u) const {
    return OF_ROW % (32 * EACH) == 0 || first(u) < OF_ROW;
  }
  __device__ __forceinline__ int last_or(int u) const { return OF_ROW % 32 ? min(of(u), OF_ROW - 1) : of(u); }
};

// Vector u as one of zeros.
__device__ __forceinline__ void clear(Loaded& loaded, int u) {
  loaded[u] = Vec{0, 0, 0, 0};
#if W8 || W4
  loaded.scale[u] = 0;
#endif
}

// A row of shared memory has the first eight numbers of each vector, then the next eight of each, and so
// on: eight lanes that read them meet in no bank. What a vector is multiplied by, of a row that begins at
// an address and has OF_ROW vectors:
template <int OF_ROW>
__device__ __forceinline__ Inputs load_inputs(u32 row, int vector) {
  Inputs x;
#pragma unroll
  for (int k = 0; k < PARTS; k++) x.part[k] = load_shared(row + (k * OF_ROW + vector) * 16);
  return x;
}
// Where numbers 8 * eight to 8 * eight + 7 of a row begin.
template <int OF_ROW>
__device__ __forceinline__ char* inputs_at(char* row, int eight) {
  return row + (eight % PARTS * OF_ROW + eight / PARTS) * 16;
}

__device__ __forceinline__ u32 lower_halves(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
__device__ __forceinline__ u32 upper_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

// Eight normed numbers.
__device__ __forceinline__ void put_normed(int row, int eight, Vec v) {
#if UP_FACTOR
  v = Vec{mul2(v.x, UP_FACTOR), mul2(v.y, UP_FACTOR), mul2(v.z, UP_FACTOR), mul2(v.w, UP_FACTOR)};
#endif
#if W4  // pairs, as those of a word of weights
  v = Vec{lower_halves(v.x, v.z), upper_halves(v.x, v.z), lower_halves(v.y, v.w), upper_halves(v.y, v.w)};
#elif !W8  // in the order of DiagonalSums
  v = Vec{v.x, v.z, v.y, v.w};
#endif
  store_shared(shared_address(inputs_at<UP_VECTORS>(shared + X_AT + row * H * 2, eight)), v);
}
// Four activations of the row in place `place` of the live ones.
__device__ __forceinline__ void put_activations(int place, int four, u32 a, u32 b) {
#if DOWN_FACTOR
  a = mul2(a, DOWN_FACTOR), b = mul2(b, DOWN_FACTOR);
#endif
  char* eight = inputs_at<ROW_VECTORS>(shared + ACTIVATED_AT + place * ROW_WORDS * 2, four / 2);
#if W4
  u16* into = (u16*)eight + four % 2;
  into[0] = (u16)a, into[2] = (u16)(a >> 16), into[4] = (u16)b, into[6] = (u16)(b >> 16);
#elif !W8
  u32* into = (u32*)eight + four % 2;
  into[0] = a, into[2] = b;
#else
  u32* into = (u32*)eight + four % 2 * 2;
  into[0] = a, into[1] = b;
#endif
}

#if W8
// In fp32, one product after the other: of groups of columns that four lanes do not have in common.
struct LaneSums {
  float v[2];

  __device__ __forceinline__ void clear() { v[0] = v[1] = 0.f; }
  template <int HALVES, bool>
  __device__ __forceinline__ void add(const Loaded& from, int u, int other, const Inputs& x) {
    add_vector(v[0], from, u, x);
    if (HALVES == 2) add_vector(v[1], from, other, x);
  }
  __device__ __forceinline__ float total(int half) const { return sum_of_warp(v[half]); }
};
#endif

// By mma. What a lane multiplies goes to no other. Of a step of 16 in K a lane has four numbers of row l / 4
// of the first operand, four of a row eight below, and four of column l / 4 of the second. So element n of
// a diagonal of the result is the products of lanes 4n to 4n + 3. What else comes out is of one lane's
// weights and of another's inputs, perhaps not finite, and is never added to these. Lanes 4n + n / 2 have the
// diagonal, and exclusive or with 4, 9 and 18 leads from each of them to all others, and from others to none
// of them. All lanes take part, with zeros where they have no vector.

// What lanes of a diagonal have of their two columns' sums, added up in all of them.
__device__ __forceinline__ float sum_of_diagonal(float even, float odd) {
  float sum = threadIdx.x / 4 % 2 ? odd : even;
  sum += __shfl_xor_sync(~0u, sum, 4);
  sum += __shfl_xor_sync(~0u, sum, 9);
  sum += __shfl_xor_sync(~0u, sum, 18);
  return sum * MISSING;
}

// A half at a time: rows of the first operand are a lane's inputs, the first and third word of sixteen bytes,
// and eight below the second and fourth. Weights of the former count in the upper eight rows of one result,
// of the latter in the lower ones of another.
struct DiagonalSums {
  float v[1 + GATED][2 * CHAINS][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half <= GATED; half++)
#pragma unroll
      for (int i = 0; i < 8 * CHAINS; i++) v[half][i / 4][i % 4] = 0.f;
  }
  // SCALED by what the four lanes of an element have in common.
  template <int HALVES, bool SCALED>
  __device__ __forceinline__ void add(const Loaded& from, int u, int other, const Inputs& x) {
    add_half<SCALED>(v[0], from, u, x);
    if (HALVES == 2) add_half<SCALED>(v[HALVES - 1], from, other, x);
  }
  __device__ __forceinline__ float total(int half) const {
    const auto& c = v[half];
    float even = c[0][0] + c[1][2], odd = c[0][1] + c[1][3];
    if (CHAINS == 2) {
      even += c[CHAINS][0] + c[CHAINS + 1][2];
      odd += c[CHAINS][1] + c[CHAINS + 1][3];
    }
    return sum_of_diagonal(even, odd);
  }

  template <bool SCALED>
  __device__ __forceinline__ static void add_half(float (&c)[2 * CHAINS][4], const Loaded& from, int u,
                                                  const Inputs& x) {
#if W8
    if (SCALED) {
      float part[2][4] = {};
      multiply(part, from[u], x);
      const float scale = from.scale[u];
      c[0][0] += scale * part[0][0], c[0][1] += scale * part[0][1];
      c[1][2] += scale * part[1][2], c[1][3] += scale * part[1][3];
      return;
    }
    multiply(c, from[u], x);
#elif W4
    multiply(c, from[u], factor_of(from.scale[u]), x);
#else
    multiply(c, from[u], x);
#endif
  }
};

#if GATED && (W8 || W4)
// Two halves of a gated weight: rows of the first operand are the one's numbers, eight below the other's,
// and columns of the second are inputs. That is half the instructions, where numbers are widened into
// registers next to each other.
struct GatedSums {
  static constexpr int LAST = CHAINS == 2 || UP_BY_ROW ? 1 : 0;  // of two chains, where they are long
  float v[LAST + 1][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * (LAST + 1); i++) v[i / 4][i % 4] = 0.f;
  }
  template <int HALVES, bool SCALED>
  __device__ __forceinline__ void add(const Loaded& from, int u, int other, const Inputs& x) {
#if W8
    if (SCALED) {
      float part[4] = {};
      multiply(part, part, from[u], from[other], x);
      v[0][0] += from.scale[u] * part[0], v[0][1] += from.scale[u] * part[1];
      v[0][2] += from.scale[other] * part[2], v[0][3] += from.scale[other] * part[3];
      return;
    }
    multiply(v[0], v[LAST], from[u], from[other], x);
#else
    multiply(v[0], v[LAST], from[u], from[other], factor_of(from.scale[u]), factor_of(from.scale[other]), x);
#endif
  }
  __device__ __forceinline__ float total(int half) const {
    float even = v[0][half * 2], odd = v[0][half * 2 + 1];
    if (LAST) even += v[LAST][half * 2], odd += v[LAST][half * 2 + 1];
    return sum_of_diagonal(even, odd);
  }
};
#else
typedef DiagonalSums GatedSums;
#endif

#if UP_ON_TENSOR_CORES
typedef GatedSums UpSums;
#else
typedef LaneSums UpSums;
#endif
#if DOWN_ON_TENSOR_CORES
typedef DiagonalSums DownSums;
#else
typedef LaneSums DownSums;
#endif
