// Tiles of linear layers on a matrix unit (simd/amx.h): up to kMatrixRows rows times a block.
//
// A line of packed weights holds the values of 64 bytes / 16 outputs, so 16 lines of a panel are a
// tile of weights as the unit expects it. Each (row, output) is summed over k in ascending order,
// separately from all others, so the number of rows never changes a result. Sums of integers are
// exact, and so have the same bits as those of the other tiles.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kTileLines = 16;
inline constexpr int kTileBytes = kTileLines * 64;

void PackRows(const PackRowsArgs& a) {
  const int64_t steps = (a.bytes + 63) / 64;
  for (int r = 0; r < a.rows; ++r) {
    const char* x = a.x[r];
    char* out = a.out + r / kTileLines * steps * kTileBytes + r % kTileLines * 64;
    for (int64_t at = 0; at < a.bytes; x += a.group_stride) {
      const int64_t end = at + a.group_bytes < a.bytes ? at + a.group_bytes : a.bytes;
      const char* from = x;
      for (; at + 64 <= end; at += 64, from += 64, out += kTileBytes) {
        StoreQuads(out, LoadQuads(from));
      }
      if (at == end) continue;
      StoreQuads(out, BroadcastInt(0));
      __builtin_memcpy(out, from, static_cast<size_t>(end - at));
      at = end;
    }
  }
}

// The products of some rows with one block.
struct MatrixBlock {
  const char* packed;  // PackRowsArgs::out, at the first row and line
  int64_t row_tile_bytes;  // from one tile of rows to the next
  int rows;
  const char* weights;  // the first line
  int panels;
  int64_t lines;       // of each panel
  int64_t step_bytes;  // from kTileLines lines of the block to the next ones
  const char* ahead;   // as LinearTileArgs states
  int64_t ahead_stride;
  void* sums;  // [rows][kBlock] float or int32
  bool add;    // whether `sums` has the first summands
};

// Prefetches weights during a step of kTileLines lines. `lines` is how many of these lines the
// current pass over some of the panels prefetches for; the other passes prefetch for the rest.
inline void FetchForStep(const MatrixBlock& b, const char* step, int lines, const char** ahead) {
  if (b.ahead == nullptr) {
    const char* const own = step + kPrefetchBytesL1;
    for (int i = 0; i < lines * b.panels; ++i) __builtin_prefetch(own + i * 64, 0, 3);
    return;
  }
  const char* const end = *ahead + lines * b.ahead_stride;
  for (const char* line = *ahead; line < end; line += 64) __builtin_prefetch(line, 0, 2);
  *ahead = end;
}

template <bool kInt8, int kSums, int kInputs, int kWeights>
inline void AddTile(TileRegisters& tiles) {
  if constexpr (kInt8) {
    tiles.AddInt8<kSums, kInputs, kWeights>();
  } else {
    tiles.AddBf16<kSums, kInputs, kWeights>();
  }
}

// Adds the products of one step: kRowTiles tiles of rows at `x`, which are `row_bytes` apart, by P
// panels at `w`, whose lines are `stride` bytes apart.
template <bool kInt8, int kRowTiles, int P>
inline void AddMatrixStep(TileRegisters& tiles, const char* x, int64_t row_bytes,
                          int64_t row_tile_bytes, const char* w, int64_t panel_bytes,
                          int64_t stride) {
  tiles.Load<4>(x, row_bytes);
  if constexpr (kRowTiles == 1) {
    Unrolled<P>([&](auto panel) {
      constexpr int kSums = decltype(panel)::value;
      constexpr int kWeights = 5 + kSums % 3;
      tiles.Load<kWeights>(w + kSums * panel_bytes, stride);
      AddTile<kInt8, kSums, 4, kWeights>(tiles);
    });
  } else {
    tiles.Load<6>(w, stride);
    AddTile<kInt8, 0, 4, 6>(tiles);
    tiles.Load<5>(x + row_tile_bytes, row_bytes);
    AddTile<kInt8, 2, 5, 6>(tiles);
    if constexpr (P == 2) {
      tiles.Load<7>(w + panel_bytes, stride);
      AddTile<kInt8, 1, 4, 7>(tiles);
      AddTile<kInt8, 3, 5, 7>(tiles);
    }
  }
}

// Calls f(register, tile of rows, panel) for the sums of each tile of rows and panel.
template <int kRowTiles, int P, typename F>
inline void ForSums(const F& f) {
  Unrolled<kRowTiles>([&](auto row_tile) {
    Unrolled<P>([&](auto panel) {
      constexpr int kRow = decltype(row_tile)::value, kColumn = decltype(panel)::value;
      f(Index<kRow * 2 + kColumn>(), kRow, kColumn);
    });
  });
}

// Computes panels [first, first + P). `fetch_lines` is the number of lines of each step for which
// this pass prefetches.
template <bool kInt8, int kRowTiles, int P>
void MatrixPass(TileRegisters& tiles, const MatrixBlock& b, int first, int fetch_lines,
                const char** ahead) {
  const int64_t stride = int64_t{b.panels} * 64;
  const auto sums = [&](int row_tile, int panel) {
    const int at = row_tile * kTileLines * kBlock + (first + panel) * kPanel;
    return static_cast<char*>(b.sums) + at * 4;
  };
  ForSums<kRowTiles, P>([&](auto tile, int row_tile, int panel) {
    if (b.add) {
      tiles.Load<decltype(tile)::value>(sums(row_tile, panel), kBlock * 4);
    } else {
      tiles.Clear<decltype(tile)::value>();
    }
  });
  const char* x = b.packed;
  const char* step = b.weights;
  int64_t lines = b.lines;
  for (; lines >= kTileLines; lines -= kTileLines, x += kTileBytes, step += b.step_bytes) {
    FetchForStep(b, step, fetch_lines, ahead);
    AddMatrixStep<kInt8, kRowTiles, P>(tiles, x, 64, b.row_tile_bytes, step + first * 64, 64,
                                        stride);
  }
  if (lines > 0) {
    // The packed rows are filled up with zeros, and so are the weights.
    alignas(64) char rest[P * kTileBytes] = {};
    for (int p = 0; p < P; ++p) {
      for (int64_t i = 0; i < lines; ++i) {
        StoreQuads(rest + p * kTileBytes + i * 64, LoadQuads(step + i * stride + (first + p) * 64));
      }
    }
    AddMatrixStep<kInt8, kRowTiles, P>(tiles, x, 64, b.row_tile_bytes, rest, kTileBytes, 64);
  }
  ForSums<kRowTiles, P>([&](auto tile, int row_tile, int panel) {
    tiles.Store<decltype(tile)::value>(sums(row_tile, panel), kBlock * 4);
  });
}

template <bool kInt8>
void MultiplyBlock(TileRegisters& tiles, const MatrixBlock& b) {
  const char* ahead = b.ahead;
  if (b.rows <= kTileLines) {
    switch (b.panels) {
      case 1:
        return MatrixPass<kInt8, 1, 1>(tiles, b, 0, kTileLines, &ahead);
      case 2:
        return MatrixPass<kInt8, 1, 2>(tiles, b, 0, kTileLines, &ahead);
      case 3:
        return MatrixPass<kInt8, 1, 3>(tiles, b, 0, kTileLines, &ahead);
      default:
        return MatrixPass<kInt8, 1, 4>(tiles, b, 0, kTileLines, &ahead);
    }
  }
  // The second of two passes finds its own weights in the cache.
  const bool own = b.ahead == nullptr;
  const int first_lines = own || b.panels <= 2 ? kTileLines : kTileLines / 2;
  const int second_lines = own ? 0 : kTileLines / 2;
  if (b.panels == 1) return MatrixPass<kInt8, 2, 1>(tiles, b, 0, first_lines, &ahead);
  MatrixPass<kInt8, 2, 2>(tiles, b, 0, first_lines, &ahead);
  if (b.panels == 3) MatrixPass<kInt8, 2, 1>(tiles, b, 2, second_lines, &ahead);
  if (b.panels == 4) MatrixPass<kInt8, 2, 2>(tiles, b, 2, second_lines, &ahead);
}

inline TileRegisters TilesFor(int rows) {
  return TileRegisters(rows < kTileLines ? rows : kTileLines,
                       rows > kTileLines ? rows - kTileLines : 0);
}

void LinearBf16(const LinearTileArgs& a) {
  TileRegisters tiles = TilesFor(a.rows);
  const int64_t lines = (a.k + 1) / 2;
  MultiplyBlock<false>(tiles, {.packed = a.packed,
                               .row_tile_bytes = (lines + kTileLines - 1) / kTileLines * kTileBytes,
                               .rows = a.rows,
                               .weights = a.weights,
                               .panels = a.panels,
                               .lines = lines,
                               .step_bytes = int64_t{a.panels} * kTileBytes,
                               .ahead = a.ahead,
                               .ahead_stride = a.ahead_stride,
                               .sums = a.out,
                               .add = false});
}

// Turns the integer sums of a group into f32 and adds them to the results, unless they are the
// first. `record` is the offset of the scale in the records, `scales` the scales of the panels.
template <int P>
void ScaleSums(const QuantTileArgs& a, const int32_t* sums, int64_t record, const char* scales,
               bool first) {
  Vec scale[P];
  for (int p = 0; p < P; ++p) scale[p] = LoadF16(scales + p * 32);
  for (int m = 0; m < a.rows; ++m) {
    float of_row;
    int32_t correction;
    __builtin_memcpy(&of_row, a.x[m] + record, 4);
    __builtin_memcpy(&correction, a.x[m] + record + 4, 4);
    for (int p = 0; p < P; ++p) {
      const int at = m * kBlock + p * kPanel;
      const IntVec sum = AddInt(LoadQuads(sums + at), BroadcastInt(correction));
      const Vec before = first ? Zero() : Load(a.out + at);
      Store(a.out + at, Fma(ToFloat(sum), Mul(scale[p], Broadcast(of_row)), before));
    }
  }
}

// Sets the sums of M rows to the products of an int4-k block's minimums with the sums of inputs.
// The weights are WidenArgs::out, and `record` is the offset of the sums in the records.
template <int M>
inline void MinimumProducts(const QuantTileArgs& a, int row, int64_t record, int32_t* sums) {
  const int64_t stride = int64_t{a.panels} * 64;
  for (int first = 0; first < a.panels; first += 2) {
    // A block of an odd number of panels computes its last one twice.
    const int second = first + 1 < a.panels ? first + 1 : first;
    IntVec sum[M][2];
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = BroadcastInt(0);
    const char* w = a.weights;
    int64_t at = record;
    for (int64_t k = 0; k < a.k; k += kFactorColumns, w += kWideLines * stride, at += 4) {
      const QuadLine low = LoadQuads(w + first * 64), high = LoadQuads(w + second * 64);
      for (int m = 0; m < M; ++m) {
        sum[m][0] = DotPairs(sum[m][0], low, a.x[row + m] + at);
        sum[m][1] = DotPairs(sum[m][1], high, a.x[row + m] + at);
      }
    }
    for (int m = 0; m < M; ++m) {
      StoreQuads(sums + (row + m) * kBlock + first * kPanel, sum[m][0]);
      StoreQuads(sums + (row + m) * kBlock + second * kPanel, sum[m][1]);
    }
  }
}

// Computes a tile of packed rows with integer weights: int8, int8-channel, or int4-k that
// WidenBlock() has written.
void MatrixQuantized(const QuantTileArgs& a) {
  alignas(64) int32_t sums[kMatrixRows * kBlock];
  TileRegisters tiles = TilesFor(a.rows);
  const bool widened = a.quantization == Quantization::kInt4K;
  const int64_t group = QuantGroup(a.quantization) < a.k ? QuantGroup(a.quantization) : a.k;
  const int64_t steps = (a.k + 63) / 64;
  MatrixBlock block{.packed = a.packed,
                    .row_tile_bytes = steps * kTileBytes,
                    .rows = a.rows,
                    .weights = a.weights + (widened ? int64_t{a.panels} * 64 : 0),
                    .panels = a.panels,
                    .lines = 0,
                    .step_bytes = int64_t{a.panels} * (widened ? kWideLines * 64 : kTileBytes),
                    .ahead = a.ahead,
                    .ahead_stride = a.ahead_stride,
                    .sums = sums,
                    .add = widened};
  constexpr decltype(&ScaleSums<1>) kScaleSums[] = {&ScaleSums<1>, &ScaleSums<2>, &ScaleSums<3>,
                                                    &ScaleSums<4>};
  int64_t record = 0;
  for (int64_t k = 0; k < a.k; k += group) {
    const int64_t columns = a.k - k < group ? a.k - k : group;
    const int64_t padded = QuantRecordColumns(a.quantization, columns);
    block.lines = widened ? padded / 4 : (columns + 3) / 4;
    if (widened) {
      int row = 0;
      for (; row + 8 <= a.rows; row += 8) MinimumProducts<8>(a, row, padded, sums);
      for (; row < a.rows; ++row) MinimumProducts<1>(a, row, padded, sums);
    }
    MultiplyBlock<true>(tiles, block);
    const char* const scales =
        widened ? a.weights + steps * block.step_bytes
                : block.weights + block.lines * int64_t{a.panels} * 64;
    record += QuantRecordValues(a.quantization, padded);
    kScaleSums[a.panels - 1](a, sums, record, scales, k == 0);
    record += 8;
    block.packed += padded / 64 * kTileBytes;
    block.weights = scales + a.panels * 32;
    if (block.ahead != nullptr) block.ahead += block.lines * block.ahead_stride;
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
