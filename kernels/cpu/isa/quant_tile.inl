// Register tiles of linear layers with integer weights. Products are summed exactly in int32 over a
// group of k; the sum is scaled and added in f32, groups in ascending order. Each (row, output) is
// computed separately from all others, so the shape of a tile never changes a result.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// What a tile prefetches.
enum class Fetch {
  kOwnBlockL1,  // its weights are in memory, and it prefetches them some steps ahead
  kOwnBlockL2,  // the same, but into the second-level cache, where PrefetchesToL2() is true
  kNextBlock,   // its weights are in the cache, and it prefetches the line at QuantTileArgs::ahead
};

// How far ahead a tile prefetches its own block. The distance is larger for int4, because int4
// needs more computation per byte.
template <Fetch kFetch, bool kInt4, int M>
inline constexpr int kQuantPrefetchBytes =
    kInt4 ? (M > 1 ? 2 * kPrefetchBytes : kPrefetchBytes)
          : (kFetch == Fetch::kOwnBlockL1 ? kPrefetchBytesL1 : kPrefetchBytes);

// Prefetches the line at `line` of a tile's own block.
template <Fetch kFetch, bool kInt4, int M>
inline void FetchOwn(const char* line) {
  if constexpr (kFetch == Fetch::kOwnBlockL1) {
    __builtin_prefetch(line, 0, 3);
  } else if constexpr (PrefetchesToL2(kInt4, M)) {
    __builtin_prefetch(line, 0, 2);
  }
}

// The prefetches for one line, of `line_bytes` bytes, of each of P panels, of which `line` is the
// first.
template <Fetch kFetch, bool kInt4, int M, int P>
inline void FetchLines(const char* line, int line_bytes, const char* ahead) {
  if constexpr (kFetch == Fetch::kNextBlock) {
    FetchAhead(ahead);
  } else {
    for (int p = 0; p < P; ++p) {
      FetchOwn<kFetch, kInt4, M>(line + p * line_bytes + kQuantPrefetchBytes<kFetch, kInt4, M>);
    }
  }
}

#ifdef MOESERVE_PAIR_SUMS
inline constexpr bool kPairSums = true;
#else
inline constexpr bool kPairSums = false;
#endif

inline constexpr int kResidentResults = kPanelTile == 1 ? 3 : 12;

// Adds the products of one step. `at` is the offset of the step's values in the records of the
// rows.
template <bool kInt4, Fetch kFetch, int P, int M, typename Sums>
inline void AddStep(const char* w, const char* const (&x)[M], int64_t at, const char* ahead,
                    Sums& sum) {
  FetchLines<kFetch, kInt4, M, P>(w, 64, ahead);
  if constexpr (kInt4) {
    AddEight([&](int p) { return LowNibbles(LoadQuads(w + p * 64)); },
             [&](int p) { return HighNibbles(LoadQuads(w + p * 64)); }, x, at, sum);
  } else {
    QuadLine line[P];
    for (int p = 0; p < P; ++p) line[p] = LoadQuads(w + p * 64);
#ifdef __AVX512VNNI__
    // With three rows, g++ 12 would load each line again for each row.
    if constexpr (M == 3 && P == 4) {
      for (int m = 0; m < M; ++m) DotFour(sum[m], line, x[m] + at);
      return;
    }
#endif
    AddQuads(line, x, at, sum);
  }
}

// Where tiles multiply matrices with eight values of k at once, adds the products of int8 weights
// two steps at a time. Returns how many of the steps it has added. `stride` is the distance in
// bytes from a line to the panel's next one.
template <Fetch kFetch, int M, typename Sums>
inline int64_t AddStepPairs(const char* w, int64_t stride, int64_t steps, const char* const (&x)[M],
                            int64_t at, const char* ahead, int64_t ahead_stride, Sums& sum) {
  int64_t s = 0;
  if constexpr (kMatrixProducts && M > 1) {
    for (; s + 2 <= steps; s += 2, w += 2 * stride, ahead += 2 * ahead_stride) {
      FetchLines<kFetch, false, M, 1>(w, 64, ahead);
      FetchLines<kFetch, false, M, 1>(w + stride, 64, ahead + ahead_stride);
      AddEight([&](int) { return LoadQuads(w); }, [&](int) { return LoadQuads(w + stride); }, x,
               at + s * 4, sum);
    }
  }
  return s;
}

#ifdef MOESERVE_PAIR_SUMS
// Sums the products of at most 32 values of k with 4-bit weights. `stride` is the distance in bytes
// from a line to the panel's next one.
template <Fetch kFetch, int M, int P>
inline void SumNibbles(const char* w, int64_t stride, int64_t lines, const char* const (&x)[M],
                       int64_t at, const char* ahead, int64_t ahead_stride,
                       PairSums (&pairs)[M][P]) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) pairs[m][p] = ZeroPairSums();
  }
  for (int64_t i = 0; i < lines; ++i, w += stride, at += 8, ahead += ahead_stride) {
    FetchLines<kFetch, true, M, P>(w, 64, ahead);
    for (int p = 0; p < P; ++p) {
      const QuadLine line = LoadQuads(w + p * 64);
      const QuadLine low = LowNibbles(line);
      for (int m = 0; m < M; ++m) pairs[m][p] = DotNibbles(pairs[m][p], low, x[m] + at);
      const QuadLine high = HighNibbles(line);
      for (int m = 0; m < M; ++m) pairs[m][p] = DotNibbles(pairs[m][p], high, x[m] + at + 4);
    }
  }
}
#endif

// Computes panels [first, first + P) of the block.
template <Quantization kType, Fetch kFetch, int M, int P>
void TileQuant(const QuantTileArgs& a, int first) {
  constexpr bool kInt4 = kType == Quantization::kInt4;
  constexpr int kStep = QuantStep(kType);
  constexpr int kGroup = QuantGroup(kType);
  constexpr int kSteps = kGroup / kStep;
  const char* x[M];
  LoadPointers(a.x, x);
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
    TileSums<M, P> sum;
    StartSums(x, at + kGroup + 4, sum);
    const char* line = w + first * 64;
    if constexpr (kPairSums && kInt4) {
#ifdef MOESERVE_PAIR_SUMS
      static_assert(kGroup <= 32);
      const int64_t lines = k >= kGroup ? kSteps : (k + kStep - 1) / kStep;
      PairSums pairs[M][P];
      SumNibbles<kFetch>(line, stride, lines, x, at, ahead, a.ahead_stride, pairs);
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sum[m][p] = AddPairSums(sum[m][p], pairs[m][p], UnitFactors());
      }
      w += lines * stride;
#endif
    } else if (k >= kGroup) {
      int64_t s = 0;
      if constexpr (!kInt4) {
        s = AddStepPairs<kFetch>(line, stride, kSteps, x, at, ahead, a.ahead_stride, sum);
      }
      for (; s < kSteps; ++s) {
        AddStep<kInt4, kFetch, P>(line + s * stride, x, at + s * kStep, ahead + s * a.ahead_stride,
                                  sum);
      }
      w += kSteps * stride;
    } else {
      const int64_t steps = (k + kStep - 1) / kStep;
      int64_t s = 0;
      if constexpr (!kInt4) {
        s = AddStepPairs<kFetch>(line, stride, steps, x, at, ahead, a.ahead_stride, sum);
      }
      for (; s < steps; ++s) {
        AddStep<kInt4, kFetch, P>(line + s * stride, x, at + s * kStep, ahead, sum);
      }
      w += steps * stride;
    }
    ahead += kSteps * a.ahead_stride;
    if constexpr (kFetch != Fetch::kNextBlock && kInt4) {  // the scales, a ninth of the bytes
      for (int p = 0; p < panels; p += 2) {
        FetchOwn<kFetch, kInt4, M>(w + p * 32 + kQuantPrefetchBytes<kFetch, kInt4, M>);
      }
    }
    for (int p = 0; p < P; ++p) {
      const Vec scale = LoadF16(w + (first + p) * 32);
      for (int m = 0; m < M; ++m) {
        float of_row;
        __builtin_memcpy(&of_row, x[m] + at + kGroup, 4);
        const Vec factor = Mul(scale, Broadcast(of_row));
        if constexpr (kResident) {
          acc[m][p] = Fma(ToFloat(SumOf(sum, m, p)), factor, acc[m][p]);
        } else {
          float* result = out + m * kBlock + p * kPanel;
          Store(result, Fma(ToFloat(SumOf(sum, m, p)), factor, Load(result)));
        }
      }
    }
    w += panels * 32;
    // Without this barrier the compiler would keep a second copy of the results on the stack.
    if constexpr (!kResident) asm volatile("" ::: "memory");
  }
  if constexpr (kResident) StoreTile(acc, out);
}

// Adds the products of kFactorColumns columns, or of the last `columns` of a row, with int4-k
// weights w * s - m: the weights times their factors s fit in 8 bits, and the subtracted parts are
// products of m with the sums of the inputs. `sums` is the offset of the sums in the records.
template <Fetch kFetch, int M, int P>
inline void AddScaledSteps(const char* w, int panels, int first, const QuadLine (&unit)[P],
                           const char* const (&x)[M], int64_t at, int64_t sums, int64_t columns,
                           const char* ahead, int64_t ahead_stride, TileSums<M, P>& sum) {
  const char* const factors = w + first * kFactorBytes;
  if constexpr (kFetch != Fetch::kNextBlock) {
    FetchLines<kFetch, true, M, P>(factors, kFactorBytes, nullptr);
  }
  for (int p = 0; p < P; ++p) {
    const QuadLine minimum = TimesPairs(MinimumPairs(factors + p * kFactorBytes), unit[p]);
    AddPairProducts(minimum, p, x, sums, sum);
  }
  w += panels * kFactorBytes + first * 64;
  const int64_t stride = int64_t{panels} * 64;
  for (int group = 0; group < kFactorColumns / kSubGroup && columns > 0; ++group) {
#ifdef __AVX512VNNI__
    // With few rows it takes fewer instructions to multiply their sums than the weights.
    if constexpr (M <= (kFetch == Fetch::kNextBlock ? 2 : 3)) {
      IntVec part[M][P];
      for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) part[m][p] = BroadcastInt(0);
      }
      for (int i = 0; i < kSubGroup && columns > 0;
           i += 8, at += 8, w += stride, columns -= 8, ahead += ahead_stride) {
        AddStep<true, kFetch, P>(w, x, at, ahead, part);
      }
      for (int p = 0; p < P; ++p) {
        const IntVec factor = FactorInts(factors + p * kFactorBytes, group);
        for (int m = 0; m < M; ++m) sum[m][p] = AddScaledInt(sum[m][p], part[m][p], factor);
      }
      continue;
    }
#endif
    QuadLine factor[P];
    for (int p = 0; p < P; ++p) factor[p] = FactorPairs(factors + p * kFactorBytes, group);
#ifdef MOESERVE_PAIR_SUMS
    static_assert(kSubGroup <= 32);
    const int64_t lines = ((columns < kSubGroup ? columns : kSubGroup) + 7) / 8;
    PairSums pairs[M][P];
    SumNibbles<kFetch>(w, stride, lines, x, at, ahead, ahead_stride, pairs);
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sum[m][p] = AddPairSums(sum[m][p], pairs[m][p], factor[p]);
    }
    at += lines * 8;
    w += lines * stride;
    columns -= lines * 8;
    ahead += lines * ahead_stride;
#else
    for (int i = 0; i < kSubGroup && columns > 0;
         i += 8, at += 8, w += stride, columns -= 8, ahead += ahead_stride) {
      FetchLines<kFetch, true, M, P>(w, 64, ahead);
      const auto low = [&](int p) {
        return TimesPairs(LowNibbles(LoadQuads(w + p * 64)), factor[p]);
      };
      const auto high = [&](int p) {
        return TimesPairs(HighNibbles(LoadQuads(w + p * 64)), factor[p]);
      };
      AddEight(low, high, x, at, sum);
    }
#endif
  }
}

// Computes panels [first, first + P) of the block, for types with one group per row. Only the
// integer sums need registers until the end of the row.
template <Quantization kType, Fetch kFetch, int M, int P>
void TileWholeRow(const QuantTileArgs& a, int first) {
  constexpr int kStep = QuantStep(kType);
  const char* x[M];
  LoadPointers(a.x, x);
  const int panels = P == kPanelsPerBlock ? P : a.panels;
  const int64_t stride = int64_t{panels} * 64;
  const char* w = a.weights;
  const char* ahead = a.ahead;
  float* out = a.out + first * kPanel;
  // Rows have more than one record and group only beyond kWholeRow columns.
  for (int64_t done = 0; done < a.k; done += kWholeRow) {
    const int64_t left = a.k - done;
    const int64_t columns = left < kWholeRow ? left : kWholeRow;
    const int64_t padded = QuantRecordColumns(kType, columns);
    const int64_t record = QuantRecordValues(kType, padded);
    TileSums<M, P> sum;
    StartSums(x, record + 4, sum);
    if constexpr (kType == Quantization::kInt4K) {
      const int64_t steps = (columns + kStep - 1) / kStep;
      const char* const scales =
          w + steps * stride +
          (columns + kFactorColumns - 1) / kFactorColumns * panels * kFactorBytes;
      QuadLine unit[P];
      for (int p = 0; p < P; ++p) unit[p] = UnitPairs(scales + (first + p) * 64 + 32);
      constexpr int kLines = kFactorColumns / kStep;
      for (int64_t at = 0; at < columns; at += kFactorColumns) {
        AddScaledSteps<kFetch, M, P>(w, panels, first, unit, x, at, padded + at / kSubGroup * 2,
                                     columns - at, ahead, a.ahead_stride, sum);
        w += panels * kFactorBytes + kLines * stride;
        ahead += kLines * a.ahead_stride;
      }
      w = scales;
    } else {
      const int64_t pairs = AddStepPairs<kFetch>(
          w + first * 64, stride, (columns + kStep - 1) / kStep, x, 0, ahead, a.ahead_stride, sum);
      w += pairs * stride;
      ahead += pairs * a.ahead_stride;
      for (int64_t at = pairs * kStep; at < columns;
           at += kStep, w += stride, ahead += a.ahead_stride) {
        AddStep<false, kFetch, P>(w + first * 64, x, at, ahead, sum);
      }
    }
    constexpr int kScaleBytes = kType == Quantization::kInt4K ? 64 : 32;
    for (int p = 0; p < P; ++p) {
      const Vec scale = LoadF16(w + (first + p) * kScaleBytes);
      for (int m = 0; m < M; ++m) {
        float of_row;
        __builtin_memcpy(&of_row, x[m] + record, 4);
        float* result = out + m * kBlock + p * kPanel;
        const Vec before = done == 0 ? Zero() : Load(result);
        Store(result, Fma(ToFloat(SumOf(sum, m, p)), Mul(scale, Broadcast(of_row)), before));
      }
    }
    w += panels * kScaleBytes;
    for (int m = 0; m < M; ++m) x[m] += record + 8;
  }
}

#ifndef MOESERVE_PAIR_SUMS
// Writes a block of int4-k in the layout of WidenArgs.
void WidenBlock(const WidenArgs& a) {
  const int panels = a.panels;
  const int64_t stride = int64_t{panels} * 64;
  const int64_t steps = (a.k + 7) / 8;
  const int64_t chunks = (a.k + kFactorColumns - 1) / kFactorColumns;
  const char* w = a.weights;
  const char* const scales = w + steps * stride + chunks * panels * kFactorBytes;
  char* out = a.out;
  for (int64_t k = a.k; k > 0; k -= kFactorColumns, out += kWideLines * stride) {
    const char* const lines = w + panels * kFactorBytes;
    const int64_t left = (k + 7) / 8;
    const int used = static_cast<int>(left < 8 ? left : 8);
    for (int p = 0; p < panels; ++p) {
      const char* const factors = w + p * kFactorBytes;
      char* to = out + p * 64;
      StoreQuads(to, TimesPairs(MinimumPairs(factors), UnitPairs(scales + p * 64 + 32)));
      const QuadLine factor[2] = {FactorPairs(factors, 0), FactorPairs(factors, 1)};
      for (int i = 0; i < used; ++i) {
        const char* const line = lines + i * stride + p * 64;
        if (a.fetch_l1) FetchLines<Fetch::kOwnBlockL1, true, 2, 1>(line, 64, nullptr);
        const QuadLine pairs = LoadQuads(line);
        to += stride;
        StoreQuads(to, TimesPairs(LowNibbles(pairs), factor[i / 4]));
        to += stride;
        StoreQuads(to, TimesPairs(HighNibbles(pairs), factor[i / 4]));
      }
      for (int i = 2 * used; i < kWideLines - 1; ++i) {
        to += stride;
        __builtin_memset(to, 0, 64);
      }
    }
    w = lines + used * stride;
  }
  for (int p = 0; p < panels; ++p) __builtin_memcpy(out + p * 32, scales + p * 64, 32);
}

// Computes panels [first, first + P) of a block that WidenBlock() has written.
template <int M, int P>
void TileWidened(const QuantTileArgs& a, int first) {
  const char* x[M];
  LoadPointers(a.x, x);
  const int panels = P == kPanelsPerBlock ? P : a.panels;
  const int64_t stride = int64_t{panels} * 64;
  const char* w = a.weights + first * 64;
  const char* ahead = a.ahead;
  const int64_t padded = QuantRecordColumns(Quantization::kInt4K, a.k);
  const int64_t record = QuantRecordValues(Quantization::kInt4K, padded);
  TileSums<M, P> sum;
  StartSums(x, record + 4, sum);  // the correction, which is 0
  for (int64_t at = 0; at < padded; at += kFactorColumns) {
    for (int p = 0; p < P; ++p) {
      AddPairProducts(LoadQuads(w + p * 64), p, x, padded + at / kSubGroup * 2, sum);
    }
    w += stride;
    for (int i = 0; i < kFactorColumns; i += 8, w += 2 * stride, ahead += a.ahead_stride) {
      FetchAhead(ahead);
      AddEight([&](int p) { return LoadQuads(w + p * 64); },
               [&](int p) { return LoadQuads(w + stride + p * 64); }, x, at + i, sum);
    }
  }
  w += first * 32 - first * 64;
  for (int p = 0; p < P; ++p) {
    const Vec scale = LoadF16(w + p * 32);
    for (int m = 0; m < M; ++m) {
      float of_row;
      __builtin_memcpy(&of_row, x[m] + record, 4);
      Store(a.out + (first + p) * kPanel + m * kBlock,
            Fma(ToFloat(SumOf(sum, m, p)), Mul(scale, Broadcast(of_row)), Zero()));
    }
  }
}

#endif

template <Quantization kType, Fetch kFetch, bool kWidened, int M, int P>
void QuantTile(const QuantTileArgs& a, int first) {
  if constexpr (kWidened) {
#ifndef MOESERVE_PAIR_SUMS
    TileWidened<M, P>(a, first);
#endif
  } else if constexpr (QuantGroup(kType) == kWholeRow) {
    TileWholeRow<kType, kFetch, M, P>(a, first);
  } else {
    TileQuant<kType, kFetch, M, P>(a, first);
  }
}

template <Quantization kType, Fetch kFetch, bool kWidened, int M>
void QuantRows(const QuantTileArgs& a) {
#ifdef MOESERVE_WIDE_INPUTS
  if constexpr (M > 1) {
    static_assert(PanelsOfTile(M) == 1);
    WideQuantRows<kType, kFetch != Fetch::kNextBlock, M>(a);
  } else
#endif
  if constexpr (PanelsOfTile(M) == 1) {
    QuantTileArgs pass = a;
    for (int p = 0; p < a.panels; ++p) {
      QuantTile<kType, kFetch, kWidened, M, 1>(pass, p);
      if constexpr (kFetch == Fetch::kNextBlock) {
        pass.ahead += (a.k + QuantStep(kType) - 1) / QuantStep(kType) * a.ahead_stride;
      }
    }
  } else {
    // Blocks of fewer panels are too rare to be compiled for each way to prefetch.
    constexpr Fetch kFetchSmall = kFetch == Fetch::kOwnBlockL2 ? Fetch::kOwnBlockL1 : kFetch;
    switch (a.panels) {
      case 1:
        return QuantTile<kType, kFetchSmall, kWidened, M, 1>(a, 0);
      case 2:
        return QuantTile<kType, kFetchSmall, kWidened, M, 2>(a, 0);
      case 3:
        return QuantTile<kType, kFetchSmall, kWidened, M, 3>(a, 0);
      default:
        // Computing half of the block at a time keeps the results in registers. This is not done
        // for a block read from memory, which is read fastest as a whole, nor for tiles with few
        // rows, where too few independent sums would remain to hide the latency of a product.
        if constexpr (kFetch == Fetch::kNextBlock && ((kType == Quantization::kInt4 && M > 3) ||
                                                      (kType == Quantization::kInt8 && M > 5))) {
          QuantTile<kType, kFetch, kWidened, M, 2>(a, 0);
          return QuantTile<kType, kFetch, kWidened, M, 2>(a, 2);
        }
        return QuantTile<kType, kFetch, kWidened, M, 4>(a, 0);
    }
  }
}

template <Quantization kType, Fetch kFetch, bool kWidened = false>
void QuantBlock(const QuantTileArgs& a) {
  switch (a.rows) {
    case 1:
      return QuantRows<kType, kFetch, kWidened, 1>(a);
    case 2:
      return QuantRows<kType, kFetch, kWidened, 2>(a);
    case 3:
      return QuantRows<kType, kFetch, kWidened, 3>(a);
    case 4:
      return QuantRows<kType, kFetch, kWidened, 4>(a);
    default:
      if constexpr (kQuantRowTile >= 6) {
        if (a.rows == 5) {
          QuantRows<kType, kFetch, kWidened, 5>(a);
        } else {
          QuantRows<kType, kFetch, kWidened, 6>(a);
        }
      }
  }
}

template <Quantization kType>
void QuantBlockOf(const QuantTileArgs& a) {
  if (a.ahead != nullptr) {
    QuantBlock<kType, Fetch::kNextBlock>(a);
  } else if (a.fetch_l1) {
    QuantBlock<kType, Fetch::kOwnBlockL1>(a);
  } else {
    QuantBlock<kType, Fetch::kOwnBlockL2>(a);
  }
}

#ifdef MOESERVE_AMX
void MatrixQuantized(const QuantTileArgs& a);  // matrix_tile.inl
#endif

void LinearQuantized(const QuantTileArgs& a) {
#ifdef MOESERVE_AMX
  if (a.packed != nullptr) return MatrixQuantized(a);
#endif
#ifdef MOESERVE_INTEGER_TABLE
  MOESERVE_INTEGER_TABLE.linear_quantized(a);
#else
  switch (a.quantization) {
    case Quantization::kNone:
      return;
    case Quantization::kInt8:
      return QuantBlockOf<Quantization::kInt8>(a);
    case Quantization::kInt8Channel:
      return QuantBlockOf<Quantization::kInt8Channel>(a);
    case Quantization::kInt4:
      return QuantBlockOf<Quantization::kInt4>(a);
    case Quantization::kInt4K:
      if (a.widened) return QuantBlock<Quantization::kInt4K, Fetch::kNextBlock, true>(a);
      return QuantBlockOf<Quantization::kInt4K>(a);
  }
#endif
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
