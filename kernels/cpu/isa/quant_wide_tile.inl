// Register tiles of linear layers with integer weights for AVX2, for two rows and more. They hold
// the sums of one panel and up to six rows in registers, and all else in memory (the first-level
// cache). The integers, and so the results, are those of quant_tile.inl.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// Writes the int8 values of all records of a row of k columns one after the other, widened to 16
// bits in the order of StoreWideQuads().
inline void WidenRecords(Quantization type, const char* record, int64_t k, char* out) {
  const int64_t group = QuantGroup(type);
  for (; k > 0; k -= group, record += group + 8) {
    const int64_t columns = QuantRecordColumns(type, k < group ? k : group);
    for (int64_t i = 0; i < columns; i += 16, out += 32) StoreWideQuads(record + i, out);
  }
}

// All functions that take sums are inlined, so that the sums stay in registers.

// Returns the sums. The assembly keeps the compiler from adding the products of two steps to each
// other first: it would then have to store the sums, because the registers do not suffice.
template <typename Sums>
[[gnu::always_inline]] inline Sums Fixed(const Sums& sums) {
  __m256i lo = sums.lo, hi = sums.hi;
  asm("" : "+x"(lo), "+x"(hi));
  return {lo, hi};
}
// Add the products of one step.
[[gnu::always_inline]] inline void AddPairs(IntVec& sum, const QuadLine& pairs, const char* x) {
  sum = Fixed(DotPairs(sum, pairs, x));
}
[[gnu::always_inline]] inline void AddNibbles(PairSums& sum, const QuadLine& nibbles,
                                              const char* x) {
  sum = Fixed(DotNibbles(sum, nibbles, x));
}

// Prefetches for one line at `line`.
template <bool kStream>
[[gnu::always_inline]] inline void FetchLine(const char* line, const char*& ahead,
                                             int64_t ahead_stride) {
  if constexpr (kStream) {
    __builtin_prefetch(line + kPrefetchBytesL1, 0, 3);
  } else {
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_stride;
  }
}

// Sets the sums of each row to the int32 at `at` in its record.
template <int M>
[[gnu::always_inline]] inline void StartRows(const char* const (&x)[M], int64_t at,
                                             IntVec (&sum)[M]) {
  Unrolled<M>([&](auto m) {
    int32_t value;
    __builtin_memcpy(&value, x[m] + at, 4);
    sum[m] = BroadcastInt(value);
  });
}

// Adds the sums, times the scales of the panel and of the rows, to the results, which are 0 if this
// is the first group. `at` is the offset of the scales in the records.
template <int M>
[[gnu::always_inline]] inline void AddScaled(const char* scales, const char* const (&x)[M],
                                             int64_t at, bool first, const IntVec (&sum)[M],
                                             float* out) {
  const Vec scale = LoadF16(scales);
  Unrolled<M>([&](auto m) {
    float of_row;
    __builtin_memcpy(&of_row, x[m] + at, 4);
    const Vec before = first ? Zero() : Load(out + m * kBlock);
    Store(out + m * kBlock, Fma(ToFloat(sum[m]), Mul(scale, Broadcast(of_row)), before));
  });
}

// int8 and int8-channel. `wide` are the results of WidenRecords() for the rows, `wide_bytes` apart.
template <Quantization kType, bool kStream, int M>
void TileWide(const QuantTileArgs& a, int panel, const char* wide, int64_t wide_bytes) {
  const char* x[M];
  const char* values[M];
  LoadPointers(a.x, x);
  for (int m = 0; m < M; ++m) values[m] = wide + m * wide_bytes;
  const int64_t stride = int64_t{a.panels} * 64;  // bytes from a line of a panel to its next line
  const char* w = a.weights;
  const char* ahead = a.ahead;
  const int64_t ahead_stride = a.ahead_stride;
  for (int64_t done = 0; done < a.k; done += QuantGroup(kType)) {
    const int64_t left = a.k - done;
    const int64_t columns = left < QuantGroup(kType) ? left : QuantGroup(kType);
    const int64_t record = QuantRecordColumns(kType, columns);
    const int64_t steps = (columns + 3) / 4;
    IntVec sum[M];
    StartRows(x, record + 4, sum);
    const char* line = w + panel * 64;
    for (int64_t s = 0; s < steps; ++s, line += stride) {
      FetchLine<kStream>(line, ahead, ahead_stride);
      const QuadLine even = EvenBytes(line);
      Unrolled<M>([&](auto m) { AddPairs(sum[m], even, values[m] + s * 8); });
      const QuadLine odd = OddBytes(line);
      Unrolled<M>([&](auto m) { AddPairs(sum[m], odd, values[m] + s * 8 + 4); });
    }
    w += steps * stride;
    AddScaled(w + panel * 32, x, record, done == 0, sum, a.out + panel * kPanel);
    w += a.panels * 32;
    for (int m = 0; m < M; ++m) {
      values[m] += record * 2;
      x[m] += record + 8;
    }
  }
}

// Sums the products of at most 32 values of k with 4-bit weights. `at` is the offset of the values
// in the records.
template <bool kStream, int M>
[[gnu::always_inline]] inline void SumNibblesOf(const char* line, int64_t stride, int64_t lines,
                                                const char* const (&x)[M], int64_t at,
                                                const char*& ahead, int64_t ahead_stride,
                                                PairSums (&pairs)[M]) {
  Unrolled<M>([&](auto m) { pairs[m] = ZeroPairSums(); });
  for (int64_t i = 0; i < lines; ++i, line += stride, at += 8) {
    FetchLine<kStream>(line, ahead, ahead_stride);
    const QuadLine low = LowNibblesAt(line);
    Unrolled<M>([&](auto m) { AddNibbles(pairs[m], low, x[m] + at); });
    const QuadLine high = HighNibblesAt(line);
    Unrolled<M>([&](auto m) { AddNibbles(pairs[m], high, x[m] + at + 4); });
  }
}

template <bool kStream, int M>
void TileInt4(const QuantTileArgs& a, int panel) {
  constexpr int kGroup = QuantGroup(Quantization::kInt4);
  static_assert(kGroup <= 32);
  const char* x[M];
  LoadPointers(a.x, x);
  const int64_t stride = int64_t{a.panels} * 64;
  const char* w = a.weights;
  const char* ahead = a.ahead;
  for (int64_t k = a.k, at = 0; k > 0; k -= kGroup, at += kGroup + 8) {
    const int64_t lines = ((k < kGroup ? k : kGroup) + 7) / 8;
    PairSums pairs[M];
    SumNibblesOf<kStream>(w + panel * 64, stride, lines, x, at, ahead, a.ahead_stride, pairs);
    w += lines * stride;
    IntVec sum[M];
    StartRows(x, at + kGroup + 4, sum);
    Unrolled<M>([&](auto m) { sum[m] = AddPairSums(sum[m], pairs[m], UnitFactors()); });
    AddScaled(w + panel * 32, x, at + kGroup, at == 0, sum, a.out + panel * kPanel);
    w += a.panels * 32;
  }
}

// The integer sums are in memory while the products of a subgroup are summed.
template <bool kStream, int M>
void TileInt4K(const QuantTileArgs& a, int panel) {
  constexpr Quantization kType = Quantization::kInt4K;
  static_assert(kSubGroup <= 32);
  const char* x[M];
  LoadPointers(a.x, x);
  const int64_t stride = int64_t{a.panels} * 64;
  const char* w = a.weights;
  const char* ahead = a.ahead;
  for (int64_t done = 0; done < a.k; done += kWholeRow) {
    const int64_t left = a.k - done;
    const int64_t columns = left < kWholeRow ? left : kWholeRow;
    const int64_t padded = QuantRecordColumns(kType, columns);
    const int64_t record = QuantRecordValues(kType, padded);
    const int64_t chunks = (columns + kFactorColumns - 1) / kFactorColumns;
    const char* const scales = w + (columns + 7) / 8 * stride + chunks * a.panels * kFactorBytes;
    const QuadLine unit = UnitPairs(scales + panel * 64 + 32);
    IntVec sum[M];
    StartRows(x, record + 4, sum);
    for (int64_t at = 0; at < columns;) {
      const char* const factors = w + panel * kFactorBytes;
      const QuadLine minimum = TimesPairs(MinimumPairs(factors), unit);
      const int64_t sums = padded + at / kSubGroup * 2;
      Unrolled<M>([&](auto m) { sum[m] = DotPairs(sum[m], minimum, x[m] + sums); });
      w += a.panels * kFactorBytes;
      for (int group = 0; group < kFactorColumns / kSubGroup && at < columns; ++group) {
        const int64_t rest = columns - at;
        const int64_t lines = ((rest < kSubGroup ? rest : kSubGroup) + 7) / 8;
        PairSums pairs[M];
        SumNibblesOf<kStream>(w + panel * 64, stride, lines, x, at, ahead, a.ahead_stride, pairs);
        const QuadLine factor = FactorPairs(factors, group);
        Unrolled<M>([&](auto m) { sum[m] = AddPairSums(sum[m], pairs[m], factor); });
        w += lines * stride;
        at += lines * 8;
      }
    }
    w = scales;
    AddScaled(w + panel * 64, x, record, done == 0, sum, a.out + panel * kPanel);
    w += a.panels * 64;
    for (int m = 0; m < M; ++m) x[m] += record + 8;
  }
}

// Computes all panels of a block.
template <Quantization kType, bool kStream, int M>
void WideQuantRows(const QuantTileArgs& a) {
  constexpr bool kBytes = kType == Quantization::kInt8 || kType == Quantization::kInt8Channel;
  const int64_t wide_bytes = WideRecordBytes(a.k);
  if constexpr (kBytes) {
    for (int m = 0; m < M; ++m) WidenRecords(kType, a.x[m], a.k, a.wide + m * wide_bytes);
  }
  QuantTileArgs pass = a;
  for (int p = 0; p < a.panels; ++p) {
    if constexpr (kBytes) {
      TileWide<kType, kStream, M>(pass, p, a.wide, wide_bytes);
    } else if constexpr (kType == Quantization::kInt4) {
      TileInt4<kStream, M>(pass, p);
    } else {
      TileInt4K<kStream, M>(pass, p);
    }
    if constexpr (!kStream) {
      pass.ahead += (a.k + QuantStep(kType) - 1) / QuantStep(kType) * a.ahead_stride;
    }
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
