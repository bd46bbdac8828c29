// Element types: how each is accumulated, and registers full of them.
//
// Combining follows ccl/internal/reduce: integers wrap; floats round to nearest
// even; max and min prefer a number over NaN and order -0 below +0; 16- and
// 8-bit floats are combined in float32 and rounded once. 8-bit floats saturate,
// as the conversions of the hardware do. Only a NaN's bits differ from the
// CPU's: they are the GPU's own.
#pragma once
#include "device.h"

struct float16 { u16 bits; };
struct bfloat16 { u16 bits; };
struct float8e4m3 { u8 bits; };
struct float8e5m2 { u8 bits; };

// record.RedOp. Avg is Sum, scaled once at the end by scale.
enum { LS_SUM, LS_PROD, LS_MAX, LS_MIN, LS_AVG };

FI float asFloat(u32 bits) { return __builtin_bit_cast(float, bits); }
FI u32 asBits(float f) { return __builtin_bit_cast(u32, f); }

// Software conversions, for GPUs before sm_90 and for tests on the host.

// widenSmall makes a float32 of a small float with M bits of mantissa and the
// given exponent bias, whose bits are in place below the sign.
template <int M, int BIAS> FI float widenSmall(u32 sign, u32 magnitude) {
  // Multiplying makes denormals right: the shifted bits are read as a float32
  // whose exponent is too small by the difference of the biases.
  float f = asFloat(magnitude << (23 - M)) * asFloat(u32(127 + 127 - BIAS) << 23);
  return asFloat(asBits(f) | sign << 31);
}

// narrowSmall rounds to nearest even and saturates at most, the bits of the
// largest finite magnitude. A NaN becomes nan.
template <int M, int BIAS> FI u32 narrowSmall(float x, u32 most, u32 nan, u32 signBit) {
  u32 bits = asBits(x), sign = bits >> 31 << signBit, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return nan;
  u32 out;
  if (magnitude < u32(127 - BIAS + 1) << 23) {
    // Denormal: the last bit of this constant weighs as much as a denormal's.
    const u32 unit = u32(127 - BIAS + 1 - M + 23) << 23;
    out = asBits(asFloat(magnitude) + asFloat(unit)) - unit;
  } else if (magnitude >= 0x7f800000) {
    out = most;
  } else {
    out = (magnitude + ((1u << (22 - M)) - 1) + (magnitude >> (23 - M) & 1) - (u32(127 - BIAS) << 23)) >> (23 - M);
  }
  return (out > most ? most : out) | sign;
}

// Elem<T> says how T is accumulated. up and down convert all the elements of a
// 32-bit word, which is what registers hold and the hardware converts.
template <class T> struct Elem {
  using Acc = T;
  static constexpr int PER_WORD = 4 / sizeof(T);
  FI static T up(T x) { return x; }
  FI static T down(T x) { return x; }
  FI static void upWord(u32 w, T *out) {
    if constexpr (sizeof(T) == 4) {
      out[0] = __builtin_bit_cast(T, w);
    } else {
#pragma unroll
      for (int i = 0; i < PER_WORD; i++) out[i] = T(w >> (8 * sizeof(T) * i));
    }
  }
  FI static u32 downWord(const T *in) {
    if constexpr (sizeof(T) == 4) {
      return __builtin_bit_cast(u32, in[0]);
    } else {
      u32 w = 0;
#pragma unroll
      for (int i = 0; i < PER_WORD; i++) w |= (u32(in[i]) & ((1u << 8 * sizeof(T)) - 1)) << (8 * sizeof(T) * i);
      return w;
    }
  }
};

template <> struct Elem<float16> {
  using Acc = float;
  static constexpr int PER_WORD = 2;
  FI static float up(float16 x) {
#ifdef LS_HOST
    if ((x.bits & 0x7c00) == 0x7c00) return asFloat(u32(x.bits & 0x8000) << 16 | 0x7f800000 | u32(x.bits & 0x3ff) << 13);
    return widenSmall<10, 15>(x.bits >> 15, x.bits & 0x7fff);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
    return f;
#endif
  }
  FI static float16 down(float x) {
#ifdef LS_HOST
    u32 magnitude = asBits(x) & 0x7fffffff;
    if (magnitude >= 0x477ff000 && magnitude <= 0x7f800000) return {u16(asBits(x) >> 16 & 0x8000 | 0x7c00)};
    return {u16(narrowSmall<10, 15>(x, 0x7bff, 0x7fff, 15))};
#else
    float16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
#endif
  }
  FI static void upWord(u32 w, float *out) { out[0] = up({u16(w)}), out[1] = up({u16(w >> 16)}); }
  FI static u32 downWord(const float *in) { return down(in[0]).bits | u32(down(in[1]).bits) << 16; }
};

template <> struct Elem<bfloat16> {
  using Acc = float;
  static constexpr int PER_WORD = 2;
  FI static float up(bfloat16 x) { return asFloat(u32(x.bits) << 16); }
  FI static bfloat16 down(float x) {
#ifdef LS_HOST
    u32 b = asBits(x);
    if ((b & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {u16((b + 0x7fff + (b >> 16 & 1)) >> 16)};
#else
    bfloat16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
#endif
  }
  FI static void upWord(u32 w, float *out) { out[0] = asFloat(w << 16), out[1] = asFloat(w & 0xffff0000); }
  FI static u32 downWord(const float *in) {
#ifdef LS_HOST
    return down(in[0]).bits | u32(down(in[1]).bits) << 16;
#else
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(in[1]), "f"(in[0]));
    return w;
#endif
  }
};

#if defined(LS_HOST) || __CUDA_ARCH__ < 900
// In software a call: a copy for each use would make modules many times as large.
#define LS_FLOAT8 __device__ static __attribute__((noinline, unused))
#else
#define LS_FLOAT8_HARDWARE 1
#define LS_FLOAT8 FI
FI void upHalves(u32 halves, float *out) { Elem<float16>::upWord(halves, out); }
#endif

LS_FLOAT8 float widenE4m3(u32 bits) {
  if ((bits & 0x7f) == 0x7f) return asFloat(0x7fffffff);
  return widenSmall<3, 7>(bits >> 7, bits & 0x7f);
}
LS_FLOAT8 u32 narrowE4m3(float x) { return narrowSmall<3, 7>(x, 0x7e, 0x7f, 7); }
LS_FLOAT8 u32 narrowE5m2(float x) { return narrowSmall<2, 15>(x, 0x7b, 0x7f, 7); }

template <> struct Elem<float8e4m3> {
  using Acc = float;
  static constexpr int PER_WORD = 4;
  FI static float up(float8e4m3 x) { return widenE4m3(x.bits); }
  FI static float8e4m3 down(float x) { return {u8(narrowE4m3(x))}; }
  FI static void upWord(u32 w, float *out) {
#ifdef LS_FLOAT8_HARDWARE
    u32 lo, hi;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(lo) : "h"(u16(w)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(hi) : "h"(u16(w >> 16)));
    upHalves(lo, out), upHalves(hi, out + 2);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = up({u8(w >> 8 * i)});
#endif
  }
  FI static u32 downWord(const float *in) {
#ifdef LS_FLOAT8_HARDWARE
    u16 lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(in[1]), "f"(in[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(in[3]), "f"(in[2]));
    return lo | u32(hi) << 16;
#else
    return down(in[0]).bits | u32(down(in[1]).bits) << 8 | u32(down(in[2]).bits) << 16 | u32(down(in[3]).bits) << 24;
#endif
  }
};

template <> struct Elem<float8e5m2> {
  using Acc = float;
  static constexpr int PER_WORD = 4;
  FI static float up(float8e5m2 x) { return Elem<float16>::up({u16(x.bits << 8)}); } // the upper half of a float16
  FI static float8e5m2 down(float x) { return {u8(narrowE5m2(x))}; }
  FI static void upWord(u32 w, float *out) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = up({u8(w >> 8 * i)});
  }
  FI static u32 downWord(const float *in) {
#ifdef LS_FLOAT8_HARDWARE
    u16 lo, hi;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(in[1]), "f"(in[0]));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(in[3]), "f"(in[2]));
    return lo | u32(hi) << 16;
#else
    return down(in[0]).bits | u32(down(in[1]).bits) << 8 | u32(down(in[2]).bits) << 16 | u32(down(in[3]).bits) << 24;
#endif
  }
};

// unsignedOf<A> is what integers are added and multiplied in, so that they wrap.
template <class A> struct unsignedOf { using type = A; };
template <> struct unsignedOf<signed char> { using type = u32; };
template <> struct unsignedOf<u8> { using type = u32; };
template <> struct unsignedOf<int> { using type = u32; };
template <> struct unsignedOf<long long> { using type = u64; };

template <class A> constexpr bool isFloat = false;
template <> inline constexpr bool isFloat<float> = true;
template <> inline constexpr bool isFloat<double> = true;

#ifdef LS_HOST
template <class A> FI A maxOf(A a, A b) { return a != a ? b : b != b ? a : a == 0 && b == 0 ? (__builtin_signbit(double(a)) ? b : a) : a > b ? a : b; }
template <class A> FI A minOf(A a, A b) { return a != a ? b : b != b ? a : a == 0 && b == 0 ? (__builtin_signbit(double(a)) ? a : b) : a < b ? a : b; }
#else
template <class A> FI A maxOf(A a, A b) { return a > b ? a : b; }
template <class A> FI A minOf(A a, A b) { return a < b ? a : b; }
template <> FI float maxOf(float a, float b) { asm("max.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b)); return a; }
template <> FI float minOf(float a, float b) { asm("min.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b)); return a; }
template <> FI double maxOf(double a, double b) { asm("max.f64 %0, %1, %2;" : "=d"(a) : "d"(a), "d"(b)); return a; }
template <> FI double minOf(double a, double b) { asm("min.f64 %0, %1, %2;" : "=d"(a) : "d"(a), "d"(b)); return a; }
#endif

// combine is a OP b. Avg is combined as Sum.
template <int OP, class A> FI A combine(A a, A b) {
  using U = typename unsignedOf<A>::type;
  if constexpr (OP == LS_SUM) return A(U(a) + U(b));
  else if constexpr (OP == LS_PROD) return A(U(a) * U(b));
  else if constexpr (OP == LS_MAX) return maxOf(a, b);
  else return minOf(a, b);
}

// Scale ends an Avg: floats are divided and rounded, integers truncate toward
// zero. With op other than LS_AVG it changes nothing. It is made once a kernel.
template <class A> struct Scale {
  A divisor, inverse; // inverse is 0 when multiplying by it would not be exact
  FI Scale(u32 op, u32 ranks) : divisor(A(op == LS_AVG ? ranks : 1)), inverse(0) {
    if constexpr (isFloat<A>) {
      if ((ranks & (ranks - 1)) == 0) inverse = A(1) / divisor;
    }
  }
  FI A operator()(A x) const {
    if (divisor == A(1)) return x;
    if constexpr (isFloat<A>) return inverse != 0 ? x * inverse : x / divisor;
    else return A(x / divisor);
  }
};

// Pack is BYTES of elements, widened: Pack8 is the data of one Line, Pack16 one
// vector access.
template <class T, int BYTES> struct Pack {
  using Acc = typename Elem<T>::Acc;
  static constexpr int WORDS = BYTES / 4;
  static constexpr int N = BYTES / sizeof(T);
  Acc v[N];

  FI void setWords(const u32 *w) {
    if constexpr (sizeof(T) == 8) {
#pragma unroll
      for (int i = 0; i < N; i++) v[i] = __builtin_bit_cast(T, u64(w[2 * i]) | u64(w[2 * i + 1]) << 32);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i++) Elem<T>::upWord(w[i], v + i * Elem<T>::PER_WORD);
    }
  }
  FI void getWords(u32 *w) const {
    if constexpr (sizeof(T) == 8) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        u64 bits = __builtin_bit_cast(u64, v[i]);
        w[2 * i] = u32(bits), w[2 * i + 1] = u32(bits >> 32);
      }
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i++) w[i] = Elem<T>::downWord(v + i * Elem<T>::PER_WORD);
    }
  }

  FI Pack() {}
  FI explicit Pack(const u32 (&w)[WORDS]) { setWords(w); }
  FI explicit Pack(u64 x) {
    static_assert(BYTES == 8);
    u32 w[2] = {u32(x), u32(x >> 32)};
    setWords(w);
  }
  FI explicit Pack(u32x4 x) {
    static_assert(BYTES == 16);
    u32 w[4] = {x.x, x.y, x.z, x.w};
    setWords(w);
  }

  // reduce combines x into this, which comes first.
  template <int OP> FI void reduce(const Pack &x) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = combine<OP>(v[i], x.v[i]);
  }
  FI void finish(const Scale<Acc> &scale) {
    if (scale.divisor == Acc(1)) return; // one branch instead of one for each element
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = scale(v[i]);
  }

  FI u64 bits8() const {
    static_assert(BYTES == 8);
    u32 w[2];
    getWords(w);
    return u64(w[1]) << 32 | w[0];
  }
  FI u32x4 bits16() const {
    static_assert(BYTES == 16);
    u32 w[4];
    getWords(w);
    return u32x4{w[0], w[1], w[2], w[3]};
  }
};
template <class T> using Pack8 = Pack<T, 8>;
template <class T> using Pack16 = Pack<T, 16>;

// LS_DISPATCH_OP runs its last arguments once, with OP a constant; Avg runs as
// Sum.
#define LS_DISPATCH_OP(op, ...)                                          \
  switch (op) {                                                          \
  case LS_PROD: { constexpr int OP = LS_PROD; __VA_ARGS__; break; }      \
  case LS_MAX: { constexpr int OP = LS_MAX; __VA_ARGS__; break; }        \
  case LS_MIN: { constexpr int OP = LS_MIN; __VA_ARGS__; break; }        \
  default: { constexpr int OP = LS_SUM; __VA_ARGS__; break; }            \
  }
