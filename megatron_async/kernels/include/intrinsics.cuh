// What needs instructions of its own: all inline assembly is here. The tests put plain C++ with the
// same meaning in its place (tests/support/emulated_intrinsics.hpp).

__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// A power of two and a quotient with the bits of Triton's exp2 and division: __expf and __fdividef let
// small numbers be 0.
__device__ __forceinline__ float power_of_two(float v) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// The same, but below 2^-126 it is 0: a third of the instructions.
__device__ __forceinline__ float flushed_power_of_two(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ float quotient(float a, float b) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// A square root with the bits of Triton's.
__device__ __forceinline__ float square_root(float v) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// Brings a line of constants near before anybody waits for it.
__device__ __forceinline__ void touch(const void* p) {
  u32 unused;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(unused) : "l"(p));
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(u32 into, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(into), "l"(from)
               : "memory");
}
// Copies 16 bytes, or writes zeros where `keep` is false.
__device__ __forceinline__ void copy16_or_zero(u32 into, const void* from, bool keep) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(into), "l"(from),
               "r"(keep ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#if W8
// Copies 4, 8 or 16 bytes.
template <int BYTES>
__device__ __forceinline__ void copy_few(u32 into, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(into), "l"(from), "n"(BYTES)
               : "memory");
}
// Bytes of a word, from the lowest on: a digit of `which` says which one, and with 8 more its sign bit
// eight times.
__device__ __forceinline__ u32 permute(u32 word, u32 which) {
  u32 r;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(word), "r"(which));
  return r;
}
// Four numbers in e4m3, from the lowest byte on, exactly.
__device__ __forceinline__ float4 widen_four(u32 word) {
  float4 v;
  asm("{\n.reg .b16 bytes<2>, half<4>;\n.reg .b32 pair<2>;\n"
      "mov.b32 {bytes0, bytes1}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 pair0, bytes0;\ncvt.rn.f16x2.e4m3x2 pair1, bytes1;\n"
      "mov.b32 {half0, half1}, pair0;\nmov.b32 {half2, half3}, pair1;\n"
      "cvt.f32.f16 %0, half0;\ncvt.f32.f16 %1, half1;\n"
      "cvt.f32.f16 %2, half2;\ncvt.f32.f16 %3, half3;\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(word));
  return v;
}
#endif
#if E4M3
// Four numbers of e4m3, a byte each, as float16: exactly, and NaN stays NaN.
__device__ __forceinline__ void halves_of_e4m3(u32 word, u32& first, u32& second) {
  asm("{\n.reg .b16 lower, upper;\nmov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\ncvt.rn.f16x2.e4m3x2 %1, upper;\n}"
      : "=r"(first), "=r"(second)
      : "r"(word));
}
// The nearest two of e4m3, at most 448 in size; NaN stays NaN.
__device__ __forceinline__ u32 narrow_e4m3(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
// Bytes of a word, from the lowest on, which a digit of `which` says.
__device__ __forceinline__ u32 permute(u32 word, u32 which) {
  u32 r;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(word), "r"(which));
  return r;
}
#endif
#if E4M3 || HALF
__device__ __forceinline__ u32 pack_half(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
#endif
#if E4M3
// c[16x8] += a[16x16] b[16x8], float16 in, fp32 out.
__device__ __forceinline__ void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// Bulk copies report the bytes that arrived to a barrier in shared memory. Its phases alternate in
// parity, from 0 on; one ends when all bytes that its one arrival announced are there.
__device__ __forceinline__ void init_barrier(u32 barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
#if MULTICAST || QUERY_TILES
// One whose phases end when so many threads of the cluster have arrived.
__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// In any block of the cluster. What was written before is there for threads of this block that await it, and
// for no others: an order in the whole cluster would take a microsecond.
__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#endif
#if MULTICAST
// The same TMA tile for all blocks of the cluster that `mask` has a bit of: each is written, and its barrier
// told, at these addresses in its own shared memory.
__device__ __forceinline__ void tma_multicast(u32 into, const TensorMap& map, int a, int b, u32 barrier,
                                              u32 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(into),
      "l"(&map), "r"(a), "r"(b), "r"(barrier), "h"((u16)mask)
      : "memory");
}
#endif
// Before the first copy reports to a barrier that this thread initialised.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void await_bytes(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A TMA tile of a tensor, swizzled by 128 bytes; what lies beyond the tensor becomes zeros. Coordinates
// begin with the innermost.
__device__ __forceinline__ void tma_load(u32 into, const TensorMap& map, int a, int b, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(into),
      "l"(&map), "r"(a), "r"(b), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load(u32 into, const TensorMap& map, int a, int b, int c, int d,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(into),
      "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ Vec load_shared(u32 at) {
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
// Two bytes, in the lower half of a word.
__device__ __forceinline__ u32 load_shared_pair(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(u32 at, Vec v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ u32 load_shared_word(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_word(u32 at, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
// Activations come from L2: another SM wrote them, perhaps after this kernel started.
__device__ __forceinline__ Vec load_l2_vec(const void* p) {
  Vec v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_l2(const float2* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ i64 load_l2(const i64* p) {
  i64 v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_l2(const u32* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u16 load_l2(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

// Weights that are read once, by one thread.
__device__ __forceinline__ Vec load_weights(const void* p) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// Words that another CTA of the grid publishes, each as a whole, and reads until they are there.
__device__ __forceinline__ void publish(u32* at, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void publish(u64* at, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
__device__ __forceinline__ u64 poll(const u64* at) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ Vec poll_vec(const u32* at) {
  Vec v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
// The same between the GPUs of two ranks: two words next to each other, each of which is there as a whole.
__device__ __forceinline__ void publish_to_peer(u64* at, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(at), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void publish_to_peer(u64* at, u64 a) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(a) : "memory");
}
__device__ __forceinline__ void poll_peer(const u64* at, u64& a, u64& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
}
__device__ __forceinline__ u64 poll_peer(const u64* at) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
// Four words of four bytes, each of which is there as a whole.
__device__ __forceinline__ void publish_to_peer(u32* at, Vec v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ Vec poll_peer(const u32* at) {
  Vec v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void wait_a_little() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

// c[16x8] += a[16x16] b[16x8], bfloat16 in, fp32 out.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four warps together: d[64 x COLUMNS] += a[64 x 16] b[COLUMNS x 16]^T, bfloat16 in shared memory, fp32
// out. Rows are 128 bytes apart, eight of them 1,024, swizzled by 128 bytes. A thread has rows g and
// g + 8 of its warp's 16, of each eight columns 2t and 2t + 1: d[4j] and d[4j + 1], of row g + 8 d[4j + 2]
// and d[4j + 3].
__device__ __forceinline__ unsigned long long descriptor(u32 at) {
  return (at >> 4 & 0x3fffull) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define REGISTERS_4 "%0,%1,%2,%3"
#define REGISTERS_8 REGISTERS_4 ",%4,%5,%6,%7"
#define REGISTERS_16 REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_24 REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REGISTERS_32 REGISTERS_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define SUMS_8 \
  SUMS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define SUMS_16 \
  SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define SUMS_24 \
  SUMS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define SUMS_32 \
  SUMS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#if MULTICAST || QUERY_TILES
#define REGISTERS_40 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS_48 REGISTERS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_56 REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGISTERS_64 REGISTERS_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_72 REGISTERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define REGISTERS_80 REGISTERS_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_88 REGISTERS_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define REGISTERS_96 REGISTERS_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_104 REGISTERS_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define REGISTERS_112 REGISTERS_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_120 REGISTERS_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define REGISTERS_128 REGISTERS_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_40 \
  SUMS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define SUMS_48 \
  SUMS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
  "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define SUMS_56 \
  SUMS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
  "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define SUMS_64 \
  SUMS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define SUMS_72 \
  SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), \
  "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define SUMS_80 \
  SUMS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
  "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define SUMS_88 \
  SUMS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
  "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define SUMS_96 \
  SUMS_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), \
  "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define SUMS_104 \
  SUMS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), \
  "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define SUMS_112 \
  SUMS_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), \
  "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define SUMS_120 \
  SUMS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), \
  "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define SUMS_128 \
  SUMS_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
  "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#endif
#define WGMMA(COLUMNS, REGISTERS, A, B, SUMS)                                  \
  asm volatile(                                                               \
      "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                          \
      "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 "        \
      "{" REGISTERS "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}"                \
      : SUMS                                                                  \
      : "l"(a), "l"(b)                                                        \
      : "memory")
template <int COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[COLUMNS / 2], u32 a_at, u32 b_at) {
  const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
  if constexpr (COLUMNS == 8) {
    WGMMA(8, REGISTERS_4, 4, 5, SUMS_4);
  } else if constexpr (COLUMNS == 16) {
    WGMMA(16, REGISTERS_8, 8, 9, SUMS_8);
  } else if constexpr (COLUMNS == 32) {
    WGMMA(32, REGISTERS_16, 16, 17, SUMS_16);
  } else if constexpr (COLUMNS == 48) {
    WGMMA(48, REGISTERS_24, 24, 25, SUMS_24);
#if MULTICAST
  } else if constexpr (COLUMNS == 80) {
    WGMMA(80, REGISTERS_40, 40, 41, SUMS_40);
  } else if constexpr (COLUMNS == 96) {
    WGMMA(96, REGISTERS_48, 48, 49, SUMS_48);
  } else if constexpr (COLUMNS == 112) {
    WGMMA(112, REGISTERS_56, 56, 57, SUMS_56);
  } else if constexpr (COLUMNS == 128) {
    WGMMA(128, REGISTERS_64, 64, 65, SUMS_64);
  } else if constexpr (COLUMNS == 144) {
    WGMMA(144, REGISTERS_72, 72, 73, SUMS_72);
  } else if constexpr (COLUMNS == 160) {
    WGMMA(160, REGISTERS_80, 80, 81, SUMS_80);
  } else if constexpr (COLUMNS == 176) {
    WGMMA(176, REGISTERS_88, 88, 89, SUMS_88);
  } else if constexpr (COLUMNS == 192) {
    WGMMA(192, REGISTERS_96, 96, 97, SUMS_96);
  } else if constexpr (COLUMNS == 208) {
    WGMMA(208, REGISTERS_104, 104, 105, SUMS_104);
  } else if constexpr (COLUMNS == 224) {
    WGMMA(224, REGISTERS_112, 112, 113, SUMS_112);
  } else if constexpr (COLUMNS == 240) {
    WGMMA(240, REGISTERS_120, 120, 121, SUMS_120);
  } else if constexpr (COLUMNS == 256) {
    WGMMA(256, REGISTERS_128, 128, 129, SUMS_128);
#endif
  } else {
    static_assert(COLUMNS == 64, "columns");
    WGMMA(64, REGISTERS_32, 32, 33, SUMS_32);
  }
}
#define WGMMA_OF_REGISTERS(COLUMNS, REGISTERS, A0, A1, A2, A3, B, SUMS)            \
  asm volatile(                                                                  \
      "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 "           \
      "{" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B            \
      ", add, 1, 1, 0;\n}"                                                       \
      : SUMS                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
      : "memory")
// `a` is the warp's 16 rows of 16 columns, as the operand of mma has them. It must be kept until the
// product has been awaited.
template <int COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[COLUMNS / 2], u32 (&a)[4], u32 b_at) {
  const unsigned long long b = descriptor(b_at);
  if constexpr (COLUMNS == 8) {
    WGMMA_OF_REGISTERS(8, REGISTERS_4, 4, 5, 6, 7, 8, SUMS_4);
  } else if constexpr (COLUMNS == 16) {
    WGMMA_OF_REGISTERS(16, REGISTERS_8, 8, 9, 10, 11, 12, SUMS_8);
  } else if constexpr (COLUMNS == 32) {
    WGMMA_OF_REGISTERS(32, REGISTERS_16, 16, 17, 18, 19, 20, SUMS_16);
  } else if constexpr (COLUMNS == 48) {
    WGMMA_OF_REGISTERS(48, REGISTERS_24, 24, 25, 26, 27, 28, SUMS_24);
  } else {
    static_assert(COLUMNS == 64, "columns");
    WGMMA_OF_REGISTERS(64, REGISTERS_32, 32, 33, 34, 35, 36, SUMS_32);
  }
}
#if X8
#define WGMMA_E4M3(COLUMNS, REGISTERS, A, B, ADDS, SUMS)                       \
  asm volatile(                                                               \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADDS ", 0;\n"                 \
      "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 "        \
      "{" REGISTERS "}, %" #A ", %" #B ", add, 1, 1;\n}"                      \
      : SUMS                                                                  \
      : "l"(a), "l"(b), "r"((u32)adds)                                        \
      : "memory")
// Four warps together: d[64 x COLUMNS] += a[64 x 32] b[COLUMNS x 32]^T, or without `adds` = that; e4m3 in
// shared memory, fp32 out. Rows and registers are as above: 32 columns are as many bytes as 16 of bfloat16.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[COLUMNS / 2], u32 a_at, u32 b_at, bool adds) {
  const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
  if constexpr (COLUMNS == 8) {
    WGMMA_E4M3(8, REGISTERS_4, 4, 5, 6, SUMS_4);
  } else if constexpr (COLUMNS == 16) {
    WGMMA_E4M3(16, REGISTERS_8, 8, 9, 10, SUMS_8);
  } else if constexpr (COLUMNS == 32) {
    WGMMA_E4M3(32, REGISTERS_16, 16, 17, 18, SUMS_16);
  } else if constexpr (COLUMNS == 48) {
    WGMMA_E4M3(48, REGISTERS_24, 24, 25, 26, SUMS_24);
  } else {
    static_assert(COLUMNS == 64, "columns");
    WGMMA_E4M3(64, REGISTERS_32, 32, 33, 34, SUMS_32);
  }
}
#endif
#if QUERY_TILES
#if HALF
#define OPERANDS "f16.f16"
#else
#define OPERANDS "bf16.bf16"
#endif
#define WGMMA_OR_SET(COLUMNS, REGISTERS, A, B, ADDS, SUMS)                     \
  asm volatile(                                                               \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADDS ", 0;\n"                 \
      "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." OPERANDS " "        \
      "{" REGISTERS "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}"                \
      : SUMS                                                                  \
      : "l"(a), "l"(b), "r"((u32)adds)                                        \
      : "memory")
// Four warps together, as above; without `adds` d becomes the product. Operands are bfloat16, or float16 with
// HALF.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_or_set(float (&d)[COLUMNS / 2], u32 a_at, u32 b_at, bool adds) {
  const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
  if constexpr (COLUMNS == 64) {
    WGMMA_OR_SET(64, REGISTERS_32, 32, 33, 34, SUMS_32);
  } else {
    static_assert(COLUMNS == 128, "columns");
    WGMMA_OR_SET(128, REGISTERS_64, 64, 65, 66, SUMS_64);
  }
}
#define WGMMA_OF_COLUMNS(COLUMNS, REGISTERS, A0, A1, A2, A3, B, SUMS)             \
  asm volatile(                                                                  \
      "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." OPERANDS " "           \
      "{" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B            \
      ", add, 1, 1, 1;\n}"                                                       \
      : SUMS                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
      : "memory")
// d[64 x COLUMNS] += a[64 x 16] b[16 x COLUMNS]: `a` in registers, b in shared memory as TMA brings it, 64
// columns of a row next to each other, and `apart` bytes behind them the next 64 of all rows.
template <int COLUMNS>
__device__ __forceinline__ void wgmma_of_columns(float (&d)[COLUMNS / 2], u32 (&a)[4], u32 b_at, u32 apart) {
  const unsigned long long b =
      (b_at >> 4 & 0x3fffull) | (unsigned long long)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
  if constexpr (COLUMNS == 64) {
    WGMMA_OF_COLUMNS(64, REGISTERS_32, 32, 33, 34, 35, 36, SUMS_32);
  } else if constexpr (COLUMNS == 128) {
    WGMMA_OF_COLUMNS(128, REGISTERS_64, 64, 65, 66, 67, 68, SUMS_64);
  } else if constexpr (COLUMNS == 192) {
    WGMMA_OF_COLUMNS(192, REGISTERS_96, 96, 97, 98, 99, 100, SUMS_96);
  } else {
    static_assert(COLUMNS == 256, "columns");
    WGMMA_OF_COLUMNS(256, REGISTERS_128, 128, 129, 130, 131, 132, SUMS_128);
  }
}
// So many threads, whole warps, have arrived at barrier `which`, 1 to 15, of the block: some wait, others go on.
__device__ __forceinline__ void sync_named(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int which, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
// What this thread has written to shared memory is there for wgmma, and for TMA, of whoever is told so.
__device__ __forceinline__ void publish_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A warpgroup gives registers of its threads to another one.
template <int LEFT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
}
template <int WANTED>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WANTED));
}
#endif
__device__ __forceinline__ void keep(u32 (&a)[4]) {
  asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all groups but the last `PENDING`; `d` are sums of one that has ended.
template <int COLUMNS, int PENDING = 0>
__device__ __forceinline__ void await_wgmma(float (&d)[COLUMNS / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// A cluster's blocks wait for each other: all threads have arrived. Between the two a block may do what
// needs no peer.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void await_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of `at`, in this block's shared memory, in that of block `rank` of the cluster.
__device__ __forceinline__ u32 peer_address(u32 at, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
  return r;
}
// Sends into a peer's shared memory, and reports the bytes to a barrier there. Who awaits them
// sees them.
__device__ __forceinline__ void send(u32 at, float4 v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
          "r"(at),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send(u32 at, float2 v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(at),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void await_sent(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// Adds one. What this block wrote before its last barrier is there for whoever adds later, and what
// those wrote who added earlier is there for this block after its next barrier.
__device__ __forceinline__ u32 add_one_in_order(u32* at) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

// Adds one, in no order with anything else: a number that nobody else gets.
__device__ __forceinline__ u32 add_one(u32* at) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

// The same number, of a counter below 2^31, which nobody waits for before it is used: an addition in a
// branch would become one for the whole warp, whose result is handed round at once.
__device__ __forceinline__ u32 take_number(u32* at) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(at)
               : "memory");
  return before;
}

// Four matrices of 8x8 bfloat16; lane 8i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// Of a matrix of 8x8 bfloat16, of whose row g a lane has elements 2t and 2t + 1: those of column g.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
