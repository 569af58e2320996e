// One row of a recurrence (RecurrenceArgs).

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// The partial sums of a sum over the rows of a state. Their number depends on the instruction set
// alone, so a column has the same bits whatever columns are computed with it.
inline constexpr int kRecurrentSums = kAttentionAccumulators >= 16 ? 4 : 2;

// Divides a vector by its length, and multiplies it by `factor`.
inline void MakeUnit(float* x, int64_t n, float factor) {
  const float square = LaneSum(n, [=](int64_t i) { return x[i] * x[i]; });
  const float inverse = factor / __builtin_sqrtf(square + kUnitEps);
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

void RecurrentInputs(const RecurrentInputsArgs& a) {
  const RecurrentShape& shape = a.shape;
  const RecurrenceSettings& settings = a.settings;
  if (settings.delta) {
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.key_dim));
    for (int h = 0; h < shape.key_heads; ++h) {
      MakeUnit(a.query + h * shape.key_dim, shape.key_dim, scale);
      MakeUnit(a.key + h * shape.key_dim, shape.key_dim, 1.0f);
    }
    for (int h = 0; h < shape.heads; ++h) a.strength[h] = ContractSigmoid(a.strength[h]);
  } else {
    for (int h = 0; h < shape.heads; ++h) {
      a.strength[h] = StepSize(settings, a.decay[h] + a.bias[h]);
    }
  }
  const int per_head = shape.decays_keys ? shape.key_dim : 1;
  for (int h = 0; h < shape.heads; ++h) {
    float* const decay = a.decay + h * per_head;
    const float* const bias = a.bias + h * per_head;
    const float rate = a.rate[h];
    for (int i = 0; i < per_head; ++i) decay[i] = DecayFactor(settings, decay[i] + bias[i], rate);
  }
}

// The sums over the rows of a state of some panels of columns.
template <int kPanels>
struct RecurrentSums {
  Vec sums[kRecurrentSums][kPanels];

  RecurrentSums() {
    for (auto& chain : sums) {
      for (Vec& sum : chain) sum = Zero();
    }
  }
  Vec Total(int panel) const {
    Vec total = Add(sums[0][panel], sums[1][panel]);
    if constexpr (kRecurrentSums == 4) {
      total = Add(total, Add(sums[2][panel], sums[3][panel]));
    }
    return total;
  }
};

// Calls body(i, chain) for i in [0, n); chain is i modulo kRecurrentSums.
template <typename Body>
inline __attribute__((always_inline)) void ForStateRows(int n, const Body& body) {
  int i = 0;
  for (; i + kRecurrentSums <= n; i += kRecurrentSums) {
    Unrolled<kRecurrentSums>([&](auto chain) __attribute__((always_inline)) {
      body(i + decltype(chain)::value, chain);
    });
  }
  Unrolled<kRecurrentSums>([&](auto chain) __attribute__((always_inline)) {
    if (i + decltype(chain)::value < n) body(i + decltype(chain)::value, chain);
  });
}

// Multiplies the state by the decays, adds key * added, and sums what the query reads.
template <int kPanels, bool kPerKey, bool kResult>
inline __attribute__((always_inline)) void AdvanceRecurrence(const RecurrentRowArgs& a,
                                                             const Vec (&added)[kPanels],
                                                             RecurrentSums<kPanels>& result) {
  // Copies, because the compiler cannot know that the state is not part of `a`.
  const float *const decays = a.decay, *const keys = a.key, *const query = a.query;
  float* const state_begin = a.state;
  const Vec one_decay = Broadcast(decays[0]);
  ForStateRows(a.key_dim, [=, &added, &result](int i, auto chain) __attribute__((always_inline)) {
    const Vec decay = kPerKey ? Broadcast(decays[i]) : one_decay;
    const Vec key = Broadcast(keys[i]);
    float* const row = state_begin + i * (kPanels * kPanel);
    for (int p = 0; p < kPanels; ++p) {
      const Vec state = Fma(key, added[p], Mul(decay, Load(row + p * kPanel)));
      Store(row + p * kPanel, state);
      if constexpr (kResult) {
        Vec& sum = result.sums[chain][p];
        sum = Fma(Broadcast(query[i]), state, sum);
      }
    }
  });
}

// Returns what the decayed state returns for the key.
template <int kPanels, bool kPerKey>
inline __attribute__((always_inline)) void KnownValue(const RecurrentRowArgs& a,
                                                      Vec (&known)[kPanels]) {
  RecurrentSums<kPanels> sums;
  const float *const decays = a.decay, *const keys = a.key, *const state_begin = a.state;
  ForStateRows(a.key_dim, [=, &sums](int i, auto chain) __attribute__((always_inline)) {
    const Vec key = Broadcast(kPerKey ? keys[i] * decays[i] : keys[i]);
    const float* const row = state_begin + i * (kPanels * kPanel);
    for (int p = 0; p < kPanels; ++p) {
      Vec& sum = sums.sums[chain][p];
      sum = Fma(key, Load(row + p * kPanel), sum);
    }
  });
  for (int p = 0; p < kPanels; ++p) {
    known[p] = kPerKey ? sums.Total(p) : Mul(Broadcast(a.decay[0]), sums.Total(p));
  }
}

template <int kPanels, bool kPerKey>
void RecurrentPanels(const RecurrentRowArgs& a, const float* values, float* out) {
  Vec value[kPanels], added[kPanels];
  for (int p = 0; p < kPanels; ++p) value[p] = added[p] = Load(values + p * kPanel);
  if (a.delta) {
    Vec known[kPanels];
    KnownValue<kPanels, kPerKey>(a, known);
    for (int p = 0; p < kPanels; ++p) added[p] = Sub(value[p], known[p]);
  }
  for (int p = 0; p < kPanels; ++p) added[p] = Mul(Broadcast(a.strength), added[p]);
  RecurrentSums<kPanels> result;
  if (a.query == nullptr) return AdvanceRecurrence<kPanels, kPerKey, false>(a, added, result);
  AdvanceRecurrence<kPanels, kPerKey, true>(a, added, result);
  for (int p = 0; p < kPanels; ++p) {
    Store(out + p * kPanel, Fma(Broadcast(a.skip), value[p], result.Total(p)));
  }
}

template <int kPanels>
void RecurrentBlock(const RecurrentRowArgs& a, const float* values, float* out) {
  a.decays_keys ? RecurrentPanels<kPanels, true>(a, values, out)
                : RecurrentPanels<kPanels, false>(a, values, out);
}

void RecurrentRow(const RecurrentRowArgs& a) {
  static_assert(kRecurrentColumns == 2 * kPanel);
  if (a.columns == kRecurrentColumns) return RecurrentBlock<2>(a, a.value, a.out);
  alignas(64) float some[kRecurrentColumns] = {};
  __builtin_memcpy(some, a.value, static_cast<size_t>(a.columns) * sizeof(float));
  a.columns > kPanel ? RecurrentBlock<2>(a, some, some) : RecurrentBlock<1>(a, some, some);
  if (a.query != nullptr) {
    __builtin_memcpy(a.out, some, static_cast<size_t>(a.columns) * sizeof(float));
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
