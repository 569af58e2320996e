// The epilogue of a product: bias, activation, gating, rounding.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// Returns e^x within 3 ulp for x in [-87, 88]. Beyond these bounds it returns the value at the
// bound, which changes an activation by less than 1e-36; for NaN it returns NaN. It needs half the
// operations of ContractExp().
inline Vec ActivationExp(Vec x) {
  const Vec round = Broadcast(0x1.8p+23f);  // adding and then subtracting it rounds to the nearest
                                            // integer
  x = Min(Broadcast(88.0f), Max(Broadcast(-87.0f), x));
  const Vec shifted = Fma(x, Broadcast(0x1.715476p+0f), round);
  const Vec n = Sub(round, shifted);  // the negative of the rounded exponent
  Vec r = Fma(n, Broadcast(0x1.62e400p-1f), x);
  r = Fma(n, Broadcast(0x1.7f7d1cp-20f), r);
  Vec p = Broadcast(0x1.6c16c2p-10f);  // 1/6!
  p = Fma(p, r, Broadcast(0x1.111112p-7f));
  p = Fma(p, r, Broadcast(0x1.555556p-5f));
  p = Fma(p, r, Broadcast(0x1.555556p-3f));
  p = Fma(p, r, Broadcast(0.5f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  // The lowest mantissa bits of `shifted` are the integer exponent.
  return AddExponent(p, shifted);
}

inline Vec TimesSigmoid(Vec x, Vec minus_u) {
  return Div(x, Add(Broadcast(1.0f), ActivationExp(minus_u)));
}

// Returns x * Phi(x). The error function is computed by Abramowitz and Stegun 7.1.26 (error within
// 1.5e-7).
inline Vec Gelu(Vec x) {
  const Vec one = Broadcast(1.0f);
  const Vec z = Mul(Abs(x), Broadcast(0.7071067811865476f));
  const Vec t = Div(one, Fma(z, Broadcast(0.3275911f), one));
  Vec p = Broadcast(1.061405429f);
  p = Fma(p, t, Broadcast(-1.453152027f));
  p = Fma(p, t, Broadcast(1.421413741f));
  p = Fma(p, t, Broadcast(-0.284496736f));
  p = Fma(p, t, Broadcast(0.254829592f));
  const Vec square = Mul(Mul(z, z), Broadcast(-1.0f));
  const Vec tail = Mul(Mul(Mul(p, t), Broadcast(0.5f)), ActivationExp(square));  // Phi(-|x|)
  return Sub(Max(Zero(), x), Mul(Abs(x), tail));
}

inline Vec GeluTanh(Vec x) {
  const Vec cubic = Fma(Mul(x, x), Broadcast(0.044715f), Broadcast(1.0f));
  return TimesSigmoid(x, Mul(Mul(x, cubic), Broadcast(-2.0f * 0.7978845608028654f)));
}

// Returns tanh(x): a polynomial for small |x|, whose error is relative to x, and 1 - 2 / (1 +
// e^2x).
inline Vec Tanh(Vec x) {
  constexpr float kSmall = 0.625f;
  const Vec square = Mul(x, x);
  Vec p = Broadcast(-5.70498872745e-3f);
  p = Fma(p, square, Broadcast(2.06390887954e-2f));
  p = Fma(p, square, Broadcast(-5.37397155531e-2f));
  p = Fma(p, square, Broadcast(1.33314422036e-1f));
  p = Fma(p, square, Broadcast(-3.33332819422e-1f));
  const Vec near = Fma(Mul(p, square), x, x);
  const Vec power = ActivationExp(Add(x, x));
  const Vec far = Sub(Broadcast(1.0f), Div(Broadcast(2.0f), Add(Broadcast(1.0f), power)));
  const Vec size = Abs(x);
  // One of the two is 0, except for NaN.
  return Add(ZeroWhereLess(near, Broadcast(kSmall), size),
             ZeroWhereLess(far, size, Broadcast(kSmall * (1.0f + 0x1p-23f))));
}

// A NaN input yields NaN, so that a numeric error is detected in the request that caused it.
template <ActivationKind kActivation>
inline Vec Activated(Vec v) {
  switch (kActivation) {
    case ActivationKind::kNone:
      return v;
    case ActivationKind::kSilu:
      return TimesSigmoid(v, Mul(v, Broadcast(-1.0f)));
    case ActivationKind::kGelu:
      return Gelu(v);
    case ActivationKind::kGeluTanh:
      return GeluTanh(v);
    case ActivationKind::kRelu:
      return Max(Zero(), v);
    case ActivationKind::kTanh:
      return Tanh(v);
    case ActivationKind::kRelu2: {
      const Vec positive = Max(Zero(), v);
      return Mul(positive, positive);
    }
  }
}

inline void StoreResults(Vec value, bool bf16, char* out) {
  if (bf16) {
    StoreBf16(reinterpret_cast<Bf16*>(out), value);
  } else {
    Store(reinterpret_cast<float*>(out), value);
  }
}

// Multiplies x by the activation of z.
template <GateActivation kActivation>
inline Vec TimesGate(Vec x, Vec z) {
  switch (kActivation) {
    case GateActivation::kNone:
      return Mul(x, z);
    case GateActivation::kSigmoid:
      return TimesSigmoid(x, Mul(z, Broadcast(-1.0f)));
    case GateActivation::kSilu:
      return TimesSigmoid(Mul(x, z), Mul(z, Broadcast(-1.0f)));
    case GateActivation::kSoftplus2: {
      constexpr float kLn2 = 0x1.62e430p-1f, kLog2E = 0x1.715476p+0f;
      alignas(64) float lanes[kPanel];
      Store(lanes, Mul(z, Broadcast(kLn2)));
      for (float& lane : lanes) lane = ContractSoftplus(lane) * kLog2E;
      return Mul(x, Load(lanes));
    }
  }
}

template <GateActivation kActivation>
void MultiplyByGateOf(void* x, bool bf16, const float* gate, int64_t n) {
  const int64_t size = bf16 ? 2 : 4;
  char* const values = static_cast<char*>(x);
  const auto product = [bf16](const char* from, const float* g) {
    const Vec value = bf16 ? LoadBf16(from) : Load(reinterpret_cast<const float*>(from));
    return TimesGate<kActivation>(value, Load(g));
  };
  int64_t i = 0;
  for (; i + kPanel <= n; i += kPanel) {
    StoreResults(product(values + i * size, gate + i), bf16, values + i * size);
  }
  if (i == n) return;
  alignas(64) char some[64] = {};
  alignas(64) float gates[kPanel] = {};
  __builtin_memcpy(some, values + i * size, static_cast<size_t>((n - i) * size));
  __builtin_memcpy(gates, gate + i, static_cast<size_t>(n - i) * sizeof(float));
  StoreResults(product(some, gates), bf16, some);
  __builtin_memcpy(values + i * size, some, static_cast<size_t>((n - i) * size));
}

void MultiplyByGate(void* x, bool bf16, const float* gate, int64_t n, GateActivation activation) {
  switch (activation) {
    case GateActivation::kNone:
      return MultiplyByGateOf<GateActivation::kNone>(x, bf16, gate, n);
    case GateActivation::kSigmoid:
      return MultiplyByGateOf<GateActivation::kSigmoid>(x, bf16, gate, n);
    case GateActivation::kSilu:
      return MultiplyByGateOf<GateActivation::kSilu>(x, bf16, gate, n);
    case GateActivation::kSoftplus2:
      return MultiplyByGateOf<GateActivation::kSoftplus2>(x, bf16, gate, n);
  }
}

// Stores result(row, column), 16 columns at a time, for all rows and columns of the output.
template <bool kBf16, typename Result>
inline __attribute__((always_inline)) void StoreRows(const EpilogueArgs& a, const Result& result) {
  constexpr int kSize = kBf16 ? 2 : 4;
  // From the first and the second panel of each pair to the next one.
  const int64_t steps[2] = {kBf16 ? 32 : a.line_stride, a.line_stride - (kBf16 ? 32 : 0)};
  for (int r = 0; r < a.rows; ++r) {
    char* out = a.out[r];
    int begin = 0;
    for (; begin + kPanel <= a.cols; begin += kPanel) {
      StoreResults(result(r, begin), kBf16, out);
      out += steps[begin / kPanel % 2];
    }
    if (begin < a.cols) {
      alignas(64) char some[64];
      StoreResults(result(r, begin), kBf16, some);
      __builtin_memcpy(out, some, static_cast<size_t>((a.cols - begin) * kSize));
    }
  }
}

// Returns 16 sums of a row plus their bias; `at` is their column in the tile.
inline Vec BiasedSums(const EpilogueArgs& a, int row, int at) {
  const Vec value = Load(a.tile + row * kBlock + at);
  return a.bias == nullptr ? value : Add(value, Load(a.bias + at));
}

template <ActivationKind kActivation, bool kGated, bool kBf16>
void EpilogueRows(const EpilogueArgs& a) {
  constexpr int kFrom = kGated ? 2 : 1;  // columns of the tile per output column
  StoreRows<kBf16>(
      a, [&](int row, int begin) __attribute__((always_inline)) {
        const int at = begin * kFrom;
        const Vec value = Activated<kActivation>(BiasedSums(a, row, at));
        return kGated ? Mul(value, BiasedSums(a, row, at + kPanel)) : value;
      });
}

inline Vec ActivatedBy(const Activation& activation, Vec v) {
  switch (activation.kind) {
    case ActivationKind::kNone:
      return v;
    case ActivationKind::kSilu:
      return TimesSigmoid(v, Mul(v, Broadcast(-activation.slope)));
    case ActivationKind::kGelu:
      return Gelu(v);
    case ActivationKind::kGeluTanh:
      return GeluTanh(v);
    case ActivationKind::kRelu:
      return Max(Zero(), v);
    case ActivationKind::kTanh:
      return Tanh(v);
    case ActivationKind::kRelu2: {
      const Vec positive = Max(Zero(), v);
      return Mul(positive, positive);
    }
  }
  return v;
}

// Computes the gated activation with a limit, a slope or an offset. A NaN stays NaN.
template <bool kBf16>
void GeneralGatedRows(const EpilogueArgs& a) {
  const float limit = a.activation.limit > 0.0f ? a.activation.limit : __builtin_inff();
  StoreRows<kBf16>(
      a, [&](int row, int begin) __attribute__((always_inline)) {
        const Vec high = Broadcast(limit), low = Broadcast(-limit);
        const bool after = a.activation.limit_after;
        const Vec sums = BiasedSums(a, row, begin * 2);
        const Vec up = Max(low, Min(high, BiasedSums(a, row, begin * 2 + kPanel)));
        const Vec active = ActivatedBy(a.activation, after ? sums : Min(high, sums));
        return Mul(after ? Min(high, active) : active, Add(up, Broadcast(a.activation.up_offset)));
      });
}

template <ActivationKind kActivation>
void EpilogueOf(const EpilogueArgs& a) {
  if (a.out_bf16) {
    a.gated ? EpilogueRows<kActivation, true, true>(a) : EpilogueRows<kActivation, false, true>(a);
  } else {
    a.gated ? EpilogueRows<kActivation, true, false>(a)
            : EpilogueRows<kActivation, false, false>(a);
  }
}

void Epilogue(const EpilogueArgs& a) {
  if (a.gated && !IsPlain(a.activation)) {
    return a.out_bf16 ? GeneralGatedRows<true>(a) : GeneralGatedRows<false>(a);
  }
  switch (a.activation.kind) {
    case ActivationKind::kNone:
      return EpilogueOf<ActivationKind::kNone>(a);
    case ActivationKind::kSilu:
      return EpilogueOf<ActivationKind::kSilu>(a);
    case ActivationKind::kGelu:
      return EpilogueOf<ActivationKind::kGelu>(a);
    case ActivationKind::kGeluTanh:
      return EpilogueOf<ActivationKind::kGeluTanh>(a);
    case ActivationKind::kRelu:
      return EpilogueOf<ActivationKind::kRelu>(a);
    case ActivationKind::kTanh:
      return EpilogueOf<ActivationKind::kTanh>(a);
    case ActivationKind::kRelu2:
      return EpilogueOf<ActivationKind::kRelu2>(a);
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
