// Register tiles of linear layers with integer weights. Products are summed exactly in int32 over a
// group of k; the sum is scaled and added in f32, groups in ascending order. Each (row, output) is
// computed separately from all others, so the shape of a tile never changes a result.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

constexpr Quantization QuantTypeOf(bool int4) {
  return int4 ? Quantization::kInt4 : Quantization::kInt8;
}

// The prefetch distance of a tile that reads its weights from memory. It is larger for int4,
// because int4 needs more computation per byte.
template <bool kInt4, int M>
inline constexpr int kQuantPrefetchBytes = kInt4 && M > 1 ? 2 * kPrefetchBytes : kPrefetchBytes;

inline constexpr int kResidentResults = kPanelTile == 1 ? 3 : 12;

template <int M, int P>
inline void AddQuads(const QuadLine (&line)[P], const char* const (&x)[M], int64_t at,
                     IntVec (&sum)[M][P]) {
  for (int m = 0; m < M; ++m) {
    const QuadInput input = BroadcastQuad(x[m] + at);
    for (int p = 0; p < P; ++p) sum[m][p] = DotQuads(sum[m][p], line[p], input);
  }
}

// Adds the products of one step. `at` is the offset of the step's values in the records of the
// rows.
template <bool kInt4, bool kStream, int M, int P>
inline void AddStep(const char* w, const char* const (&x)[M], int64_t at, const char* ahead,
                    IntVec (&sum)[M][P]) {
  if constexpr (!kStream) {
    __builtin_prefetch(ahead, 0, 2);
  }
  QuadLine line[P];
  for (int p = 0; p < P; ++p) {
    if constexpr (kStream) __builtin_prefetch(w + p * 64 + kQuantPrefetchBytes<kInt4, M>, 0, 3);
    line[p] = LoadQuads(w + p * 64);
    if (kInt4) line[p] = LowNibbles(line[p]);
  }
  AddQuads(line, x, at, sum);
  if constexpr (kInt4) {
    for (int p = 0; p < P; ++p) line[p] = HighNibbles(LoadQuads(w + p * 64));
    AddQuads(line, x, at + 4, sum);
  }
}

// Computes panels [first, first + P) of the block.
template <bool kInt4, bool kStream, int M, int P>
void TileQuant(const QuantTileArgs& a, int first) {
  constexpr int kStep = QuantStep(QuantTypeOf(kInt4));
  constexpr int kGroup = QuantGroup(QuantTypeOf(kInt4));
  constexpr int kSteps = kGroup / kStep;
  const char* x[M];
  for (int m = 0; m < M; ++m) x[m] = a.x[m];
  const int panels = P == kPanelsPerBlock ? P : a.panels;
  const int64_t stride = int64_t{panels} * 64;  // bytes from a line of a panel to the panel's next
                                                // line
  const char* w = a.weights;
  const char* ahead = a.ahead;
  float* out = a.out + first * kPanel;
  // In large tiles the integer sums take all registers. The f32 results are then kept in memory
  // (the first-level cache).
  constexpr bool kResident = M * P <= kResidentResults;
  Vec acc[M][P];
  ClearTile(acc);
  if constexpr (!kResident) StoreTile(acc, out);
  // Each iteration reads one record per row: values, scale, correction.
  for (int64_t k = a.k, at = 0; k > 0; k -= kGroup, at += kGroup + 8) {
    IntVec sum[M][P];
    for (int m = 0; m < M; ++m) {
      int32_t correction;
      __builtin_memcpy(&correction, x[m] + at + kGroup + 4, 4);
      for (int p = 0; p < P; ++p) sum[m][p] = BroadcastInt(correction);
    }
    const char* line = w + first * 64;
    if (k >= kGroup) {
      for (int s = 0; s < kSteps; ++s) {
        AddStep<kInt4, kStream>(line + s * stride, x, at + s * kStep, ahead + s * a.ahead_stride,
                                sum);
      }
      w += kSteps * stride;
    } else {
      const int64_t steps = (k + kStep - 1) / kStep;
      for (int64_t s = 0; s < steps; ++s) {
        AddStep<kInt4, kStream>(line + s * stride, x, at + s * kStep, ahead, sum);
      }
      w += steps * stride;
    }
    ahead += kSteps * a.ahead_stride;
    if constexpr (kStream && kInt4) {  // prefetches the scales, a ninth of the bytes
      for (int p = 0; p < panels; p += 2) {
        __builtin_prefetch(w + p * 32 + kQuantPrefetchBytes<kInt4, M>, 0, 3);
      }
    }
    for (int p = 0; p < P; ++p) {
      const Vec scale = LoadF16(w + (first + p) * 32);
      for (int m = 0; m < M; ++m) {
        float of_row;
        __builtin_memcpy(&of_row, x[m] + at + kGroup, 4);
        const Vec factor = Mul(scale, Broadcast(of_row));
        if constexpr (kResident) {
          acc[m][p] = Fma(ToFloat(sum[m][p]), factor, acc[m][p]);
        } else {
          float* result = out + m * kBlock + p * kPanel;
          Store(result, Fma(ToFloat(sum[m][p]), factor, Load(result)));
        }
      }
    }
    w += panels * 32;
    // Without this barrier the compiler would keep a second copy of the results on the stack.
    if constexpr (!kResident) asm volatile("" ::: "memory");
  }
  if constexpr (kResident) StoreTile(acc, out);
}

template <bool kInt4, bool kStream, int M>
void QuantRows(const QuantTileArgs& a) {
  if constexpr (kPanelTile == 1) {
    for (int p = 0; p < a.panels; ++p) TileQuant<kInt4, kStream, M, 1>(a, p);
  } else {
    switch (a.panels) {
      case 1:
        return TileQuant<kInt4, kStream, M, 1>(a, 0);
      case 2:
        return TileQuant<kInt4, kStream, M, 2>(a, 0);
      case 3:
        return TileQuant<kInt4, kStream, M, 3>(a, 0);
      default:
        // Computing half of the block at a time keeps the results in registers. This is not done
        // for a block read from memory, which is read fastest as a whole, nor for tiles with few
        // rows, where too few independent sums would remain to hide the latency of a product.
        if constexpr (!kStream && (kInt4 ? M > 3 : M > 5)) {
          TileQuant<kInt4, kStream, M, 2>(a, 0);
          return TileQuant<kInt4, kStream, M, 2>(a, 2);
        }
        return TileQuant<kInt4, kStream, M, 4>(a, 0);
    }
  }
}

template <bool kInt4, bool kStream>
void QuantBlock(const QuantTileArgs& a) {
  switch (a.rows) {
    case 1:
      return QuantRows<kInt4, kStream, 1>(a);
    case 2:
      return QuantRows<kInt4, kStream, 2>(a);
    case 3:
      return QuantRows<kInt4, kStream, 3>(a);
    case 4:
      return QuantRows<kInt4, kStream, 4>(a);
    default:
      if constexpr (kRowTile >= 6) {
        if (a.rows == 5) {
          QuantRows<kInt4, kStream, 5>(a);
        } else {
          QuantRows<kInt4, kStream, 6>(a);
        }
      }
  }
}

void LinearQuantized(const QuantTileArgs& a) {
  const bool stream = a.ahead == nullptr;
  switch (a.quantization) {
    case Quantization::kNone:
      return;
    case Quantization::kInt8:
      return stream ? QuantBlock<false, true>(a) : QuantBlock<false, false>(a);
    case Quantization::kInt4:
      return stream ? QuantBlock<true, true>(a) : QuantBlock<true, false>(a);
  }
}

// Rounds one group of 16 * kVecs values to int8 and writes its record.
template <int kVecs>
inline void QuantizeGroup(const Vec (&value)[kVecs], int zero, char* record) {
  Vec largest = Zero();
  Vec check = Zero();  // sum of 0 * value: NaN if a value is not finite
  for (int v = 0; v < kVecs; ++v) {
    largest = Max(Abs(value[v]), largest);
    check = Fma(value[v], Zero(), check);
  }
  const float most = MaxOfLanes(largest);
  const bool finite = SumOfLanes(check) == 0.0f;
  // If all values are tiny, 127 / most could overflow; all integers are then 0.
  const float inverse = !finite || most < 1e-35f ? 0.0f : 127.0f / most;
  IntVec sum = BroadcastInt(0);
  for (int v = 0; v < kVecs; ++v) {
    const IntVec q = finite ? ToInt(Mul(value[v], Broadcast(inverse))) : BroadcastInt(0);
    StoreBytes(reinterpret_cast<int8_t*>(record) + v * 16, q);
    sum = AddInt(sum, q);
  }
  const float scale = finite ? most * (1.0f / 127.0f) : __builtin_nanf("");
  const int32_t correction = -zero * SumInt(sum);
  __builtin_memcpy(record + kVecs * 16, &scale, 4);
  __builtin_memcpy(record + kVecs * 16 + 4, &correction, 4);
}

template <int kVecs, typename LoadVec>
void QuantizeInput(const QuantizeRowArgs& a, const LoadVec& load) {
  constexpr int kGroup = kVecs * 16;
  char* record = a.records;
  int64_t begin = 0;
  for (; begin + kGroup <= a.n; begin += kGroup, record += kGroup + 8) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = load(begin + v * 16);
    QuantizeGroup(value, a.zero, record);
  }
  if (begin == a.n) return;
  float rest[kGroup] = {};
  for (int64_t i = begin; i < a.n; ++i) {
    rest[i - begin] =
        a.bf16 ? F32FromBf16(static_cast<const Bf16*>(a.x)[i]) : static_cast<const float*>(a.x)[i];
  }
  Vec value[kVecs];
  for (int v = 0; v < kVecs; ++v) value[v] = Load(rest + v * 16);
  QuantizeGroup(value, a.zero, record);
}

template <int kVecs>
void QuantizeInputOf(const QuantizeRowArgs& a) {
  if (a.bf16) {
    const Bf16* x = static_cast<const Bf16*>(a.x);
    QuantizeInput<kVecs>(a, [x](int64_t i) { return LoadBf16(x + i); });
  } else {
    const float* x = static_cast<const float*>(a.x);
    QuantizeInput<kVecs>(a, [x](int64_t i) { return Load(x + i); });
  }
}

void QuantizeInputRow(const QuantizeRowArgs& a) {
  if (a.group == 64) {
    QuantizeInputOf<4>(a);
  } else {
    QuantizeInputOf<2>(a);
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
