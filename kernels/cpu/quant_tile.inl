// Register tiles of linear layers whose weights are small integers: exact int32 sums over a group
// of k, scaled and added up group by group in ascending order for every (row, output) by itself, so
// that a tile's shape never changes a result.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// k of each output in a line.
template <bool kInt4>
inline constexpr int kQuantStep = kInt4 ? 8 : 4;
// Steps of a whole group: QuantGroup() / kQuantStep.
template <bool kInt4>
inline constexpr int kGroupSteps = kInt4 ? 4 : 16;

template <int M, int P>
inline void AddQuads(const QuadLine (&line)[P], const int8_t* const (&x)[M], int64_t at,
                     IntVec (&sum)[M][P]) {
  for (int m = 0; m < M; ++m) {
    const QuadInput input = BroadcastQuad(x[m] + at);
    for (int p = 0; p < P; ++p) sum[m][p] = DotQuads(sum[m][p], line[p], input);
  }
}

// One step; `at` is its first k.
template <bool kInt4, int M, int P>
inline void AddStep(const char* w, const int8_t* const (&x)[M], int64_t at, IntVec (&sum)[M][P]) {
  QuadLine line[P];
  for (int p = 0; p < P; ++p) {
    Prefetch<M>(w + p * 64);
    line[p] = LoadQuads(w + p * 64);
    if (kInt4) line[p] = LowNibbles(line[p]);
  }
  AddQuads(line, x, at, sum);
  if constexpr (kInt4) {
    for (int p = 0; p < P; ++p) line[p] = HighNibbles(LoadQuads(w + p * 64));
    AddQuads(line, x, at + 4, sum);
  }
}

// Panels [first, first + P) of the block.
template <bool kInt4, int M, int P>
void TileQuant(const QuantTileArgs& a, int first) {
  const int8_t* x[M];
  const float* scale_of[M];
  const int32_t* correction_of[M];
  for (int m = 0; m < M; ++m) {
    x[m] = a.x[m];
    scale_of[m] = a.scales[m];
    correction_of[m] = a.corrections[m];
  }
  const int64_t stride = int64_t{a.panels} * 64;  // from one step's lines to the next's
  const int64_t total = (a.k + kQuantStep<kInt4> - 1) / kQuantStep<kInt4>;
  const char* w = a.weights;
  Vec acc[M][P];
  ClearTile(acc);
  int64_t group = 0;
  for (int64_t step = 0; step < total; step += kGroupSteps<kInt4>, ++group) {
    IntVec sum[M][P];
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sum[m][p] = BroadcastInt(correction_of[m][group]);
    }
    const char* line = w + first * 64;
    int64_t at = step * kQuantStep<kInt4>;
    int64_t steps = kGroupSteps<kInt4>;
    if (total - step >= kGroupSteps<kInt4>) {
      for (int s = 0; s < kGroupSteps<kInt4>; ++s, line += stride, at += kQuantStep<kInt4>) {
        AddStep<kInt4>(line, x, at, sum);
      }
    } else {
      steps = total - step;
      for (int64_t s = 0; s < steps; ++s, line += stride, at += kQuantStep<kInt4>) {
        AddStep<kInt4>(line, x, at, sum);
      }
    }
    const char* scales = w + steps * stride + first * 32;
    for (int p = 0; p < P; ++p) {
      const Vec scale = LoadF16(scales + p * 32);
      for (int m = 0; m < M; ++m) {
        acc[m][p] = Fma(ToFloat(sum[m][p]), Mul(scale, Broadcast(scale_of[m][group])), acc[m][p]);
      }
    }
    w += steps * stride + int64_t{a.panels} * 32;
  }
  StoreTile(acc, a.out + first * kPanel);
}

// Tiles of few rows are wide, so that one row streams whole blocks; those of many rows are narrow,
// so that sums and results fit the registers.
inline constexpr int kWideRows = kPanelTile == 1 ? 0 : 3;
inline constexpr int kNarrowPanels = kPanelTile == 1 ? 1 : 2;

template <bool kInt4, int M>
void QuantRows(const QuantTileArgs& a) {
  constexpr int kPanels = M <= kWideRows ? kPanelTile : kNarrowPanels;
  for (int first = 0; first < a.panels; first += kPanels) {
    const int panels = a.panels - first < kPanels ? a.panels - first : kPanels;
    if (panels == kPanels) {
      TileQuant<kInt4, M, kPanels>(a, first);
    } else if (panels == 1) {
      TileQuant<kInt4, M, 1>(a, first);
    } else if constexpr (kPanels > 2) {
      if (panels == 2) {
        TileQuant<kInt4, M, 2>(a, first);
      } else {
        TileQuant<kInt4, M, 3>(a, first);
      }
    }
  }
}

template <bool kInt4>
void QuantBlock(const QuantTileArgs& a) {
  switch (a.rows) {
    case 1:
      return QuantRows<kInt4, 1>(a);
    case 2:
      return QuantRows<kInt4, 2>(a);
    case 3:
      return QuantRows<kInt4, 3>(a);
    case 4:
      return QuantRows<kInt4, 4>(a);
    default:
      if constexpr (kRowTile >= 6) {
        if (a.rows == 5) {
          QuantRows<kInt4, 5>(a);
        } else {
          QuantRows<kInt4, 6>(a);
        }
      }
  }
}

void LinearQuantized(const QuantTileArgs& a) {
  if (a.int4) {
    QuantBlock<true>(a);
  } else {
    QuantBlock<false>(a);
  }
}

template <typename Load>
void QuantizeInput(const QuantizeRowArgs& a, const Load& load) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits after the point
  int64_t begin = 0;
  for (int64_t g = 0; begin < a.n; ++g, begin += a.group) {
    const int n = static_cast<int>(a.n - begin < a.group ? a.n - begin : a.group);
    float value[64];  // the longest group
    float largest = 0.0f;
    int not_finite = 0;
    for (int i = 0; i < n; ++i) value[i] = load(begin + i);
    for (int i = 0; i < n; ++i) {
      const float magnitude = __builtin_fabsf(value[i]);
      largest = magnitude > largest ? magnitude : largest;
      not_finite |= !(magnitude <= 3.40282347e38f);
    }
    // Below the smallest normal number the inverse would overflow.
    const float inverse = largest < 1e-35f ? 0.0f : 127.0f / largest;
    int sum = 0;
    for (int i = 0; i < n; ++i) {
      const float rounded = (not_finite ? 0.0f : value[i] * inverse) + kRound;
      const int q = static_cast<int>(BitsFromF32(rounded) - 0x4b400000u);
      a.values[begin + i] = static_cast<int8_t>(q);
      sum += q;
    }
    a.scales[g] = not_finite ? __builtin_nanf("") : largest * (1.0f / 127.0f);
    a.corrections[g] = -a.zero * sum;
  }
  for (int64_t i = a.n; i < a.padded; ++i) a.values[i] = 0;
}

void QuantizeInputRow(const QuantizeRowArgs& a) {
  if (a.bf16) {
    const Bf16* x = static_cast<const Bf16*>(a.x);
    QuantizeInput(a, [x](int64_t i) { return F32FromBf16(x[i]); });
  } else {
    const float* x = static_cast<const float*>(a.x);
    QuantizeInput(a, [x](int64_t i) { return x[i]; });
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
