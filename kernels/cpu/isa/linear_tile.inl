// Register tiles of the linear kernels: some rows times some panels. Each (row, output) is summed
// over k in ascending order, separately from all others, so the shape of a tile never changes a
// result.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// Returns how many panels of a block a tile covers at once. The panels of a block are interleaved,
// so a tile of one row, which is limited by memory, reads all of them in the order of memory.
constexpr int PanelsOfTile(int rows) { return rows == 1 ? kPanelsPerBlock : kPanelTile; }

// How many adjacent lines of the next block a tile prefetches in each step. Two tiles over all
// panels of a block have half as many steps as the next block has lines.
inline constexpr int kLinesAhead = kPanelTile == kPanelsPerBlock ? 2 : 1;

inline void FetchAhead(const char* ahead) {
  for (int i = 0; i < kLinesAhead; ++i) __builtin_prefetch(ahead + i * 64, 0, 2);
}

// Returns whether tiles with `rows` rows prefetch weights that they read from memory into the
// second-level cache if they do not prefetch them into the first-level cache. A Zen 4 processor
// reads faster with these prefetches or with none, depending on the type and the rows.
constexpr bool PrefetchesToL2(bool int4, int rows) { return int4 ? rows >= 3 : rows == 1; }

// The prefetches of one tile. If `next` is null, the tile reads its weights from memory and
// prefetches them some steps ahead, into the first-level cache if `fetch_l1` is true, else into the
// second-level cache where PrefetchesToL2() is true. Otherwise its weights are in the cache, and it
// prefetches the next block.
struct Ahead {
  const char* next;
  int64_t stride;
  bool fetch_l1;

  template <int M, int P>
  void Fetch(const char* own, int line_bytes) {
    if (next == nullptr) {
      own += fetch_l1 ? kPrefetchBytesL1 : kPrefetchBytes;
      if (fetch_l1) {
        for (int p = 0; p < P; ++p) __builtin_prefetch(own + p * line_bytes, 0, 3);
      } else if constexpr (PrefetchesToL2(false, M)) {
        for (int p = 0; p < P; ++p) __builtin_prefetch(own + p * line_bytes, 0, 2);
      }
      return;
    }
    FetchAhead(next);
    next += stride;
  }
};

// Copies the pointers to M rows. The caller has stored them just before, one by one. A vector load
// of several of them would wait until all earlier stores are in the cache, among them the results
// of the tile before; the assembly keeps the compiler from using one.
template <typename T, typename Pointer, int M>
inline void LoadPointers(const Pointer* rows, const T* (&x)[M]) {
  for (int m = 0; m < M; ++m) {
    x[m] = static_cast<const T*>(rows[m]);
    asm volatile("" : "+r"(x[m]));
  }
}

template <int kValue>
struct Index {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }
};
// Calls f(Index<0>()), ..., f(Index<N - 1>()). The compiler keeps an array in registers for sure
// only if every index is a constant from the start; with loops, it stored the sums of AVX2's large
// tiles in every step.
template <int N, typename F>
[[gnu::always_inline]] inline void Unrolled(const F& f) {
  if constexpr (N > 0) {
    Unrolled<N - 1>(f);
    f(Index<N - 1>());
  }
}

template <int M, int P>
inline void StoreTile(Vec (&acc)[M][P], float* out) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) Store(out + m * kBlock + p * kPanel, acc[m][p]);
  }
}

template <int M, int P>
inline void ClearTile(Vec (&acc)[M][P]) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) acc[m][p] = Zero();
  }
}

template <int M, int P>
inline void StoreUnrolled(Vec (&acc)[M][P], float* out) {
  Unrolled<M>([&](auto m) {
    Unrolled<P>([&](auto p) { Store(out + m * kBlock + p * kPanel, acc[m][p]); });
  });
}

template <int M, int P>
inline void ClearUnrolled(Vec (&acc)[M][P]) {
  Unrolled<M>([&](auto m) { Unrolled<P>([&](auto p) { acc[m][p] = Zero(); }); });
}

// Computes a tile with f32 weights. `step` is the distance in bytes from a line of a panel to the
// panel's next line.
template <int M, int P>
void TileF32(const char* w, int64_t step, int64_t k, const void* const* rows, Ahead ahead,
             float* out) {
  const float* x[M];
  LoadPointers(rows, x);
  Vec acc[M][P];
  ClearUnrolled(acc);
  for (int64_t i = 0; i < k; ++i, w += step) {
    ahead.Fetch<M, P>(w, 64);
    Unrolled<P>([&](auto p) {
      const Vec weight = Load(reinterpret_cast<const float*>(w + p * 64));
      Unrolled<M>([&](auto m) { acc[m][p] = Fma(Broadcast(x[m][i]), weight, acc[m][p]); });
    });
  }
  StoreUnrolled(acc, out);
}

template <int M, int P>
void TileF16(const char* w, int64_t step, int64_t k, const void* const* rows, Ahead ahead,
             float* out) {
  const float* x[M];
  LoadPointers(rows, x);
  Vec acc[M][P];
  ClearUnrolled(acc);
  for (int64_t i = 0; i < k; ++i, w += step) {
    ahead.Fetch<M, P>(w, 32);
    Unrolled<P>([&](auto p) {
      const Vec weight = LoadF16(w + p * 32);
      Unrolled<M>([&](auto m) { acc[m][p] = Fma(Broadcast(x[m][i]), weight, acc[m][p]); });
    });
  }
  StoreUnrolled(acc, out);
}

template <int M, int P>
void TileBf16(const char* w, int64_t step, int64_t k, const void* const* rows, Ahead ahead,
              float* out) {
  const float* x[M];
  LoadPointers(rows, x);
  Vec acc[M][P];
  ClearUnrolled(acc);
  int64_t i = 0;
  for (; i + 2 <= k; i += 2, w += step) {
    ahead.Fetch<M, P>(w, 64);
    Unrolled<P>([&](auto p) {
      const PairLine line = LoadPairs(w + p * 64);
      const Vec even = line.Even();
      Unrolled<M>([&](auto m) { acc[m][p] = Fma(Broadcast(x[m][i]), even, acc[m][p]); });
      const Vec odd = line.Odd();
      Unrolled<M>([&](auto m) { acc[m][p] = Fma(Broadcast(x[m][i + 1]), odd, acc[m][p]); });
    });
  }
  if (i < k) {
    Unrolled<P>([&](auto p) {
      const Vec even = LoadPairs(w + p * 64).Even();
      Unrolled<M>([&](auto m) { acc[m][p] = Fma(Broadcast(x[m][i]), even, acc[m][p]); });
    });
  }
  StoreUnrolled(acc, out);
}

#if MOESERVE_BF16_DOT && !defined(MOESERVE_AMX)
#ifdef MOESERVE_NEON_DOT
// Computes a tile of two rows or more with products of matrices: four values of k of two rows and
// 16 outputs at once. Rounds as TileBf16Dot does with one row.
template <int M>
void TileBf16Matrix(const char* w, int64_t step, int64_t k, const void* const* rows, Ahead ahead,
                    float* out) {
  constexpr int kPairs = (M + 1) / 2;
  const uint16_t* x[M];
  LoadPointers(rows, x);
  MatrixSums sum[kPairs];
  for (MatrixSums& s : sum) {
    for (float32x4_t& q : s.q) q = vdupq_n_f32(0.0f);
  }
  // The last row of an odd number is its own partner.
  const auto partner = [](int pair) { return 2 * pair + 1 < M ? 2 * pair + 1 : M - 1; };
  int64_t i = 0;
  for (; i + 4 <= k; i += 4, w += 2 * step) {
    ahead.Fetch<M, 1>(w, 64);
    ahead.Fetch<M, 1>(w + step, 64);
    const PairVec first = LoadPairVec(w), second = LoadPairVec(w + step);
    for (int p = 0; p < kPairs; ++p) {
      AddMatrix(sum[p], first, second,
                JoinRows(vld1_u16(x[2 * p] + i), vld1_u16(x[partner(p)] + i)));
    }
  }
  if (i < k) {
    // Only the last elements are loaded, because those after them may belong to another row.
    const auto load = [&](int row) {
      uint16_t last[4] = {};
      __builtin_memcpy(last, x[row] + i, static_cast<size_t>(k - i) * 2);
      return vld1_u16(last);
    };
    const PairVec first = LoadPairVec(w);
    const PairVec second = k - i > 2 ? LoadPairVec(w + step) : PairVec{};
    for (int p = 0; p < kPairs; ++p) {
      AddMatrix(sum[p], first, second, JoinRows(load(2 * p), load(partner(p))));
    }
  }
  for (int m = 0; m < M; ++m) Store(out + m * kBlock, SumsOfRow(sum[m / 2], m % 2));
}
#endif

template <int M, int P>
void TileBf16Dot(const char* w, int64_t step, int64_t k, const void* const* rows, Ahead ahead,
                 float* out) {
#ifdef MOESERVE_NEON_DOT
  if constexpr (M > 1) return TileBf16Matrix<M>(w, step, k, rows, ahead, out);
#endif
  const char* x[M];
  LoadPointers(rows, x);
  Vec acc[M][P];
  ClearTile(acc);
  const int64_t pairs = k / 2;
  for (int64_t i = 0; i < pairs; ++i, w += step) {
    ahead.Fetch<M, P>(w, 64);
    for (int p = 0; p < P; ++p) {
      const PairVec weight = LoadPairVec(w + p * 64);
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        __builtin_memcpy(&pair, x[m] + i * 4, 4);
        acc[m][p] = AddPairs(acc[m][p], weight, pair);
      }
    }
  }
  if (k % 2 != 0) {
    // Only the last element is loaded, because the element after it may belong to another row.
    for (int p = 0; p < P; ++p) {
      const PairVec weight = LoadPairVec(w + p * 64);
      for (int m = 0; m < M; ++m) {
        uint16_t last;
        __builtin_memcpy(&last, x[m] + pairs * 4, 2);
        acc[m][p] = AddPairs(acc[m][p], weight, last);
      }
    }
  }
  StoreTile(acc, out);
}
#endif

using TileFunction = void (*)(const char*, int64_t, int64_t, const void* const*, Ahead, float*);

// The functions for each number of rows and panels of a tile.
using TileGrid = TileFunction[kMaxRowTile][kPanelsPerBlock];

// Covers the panels of a block with tiles of PanelsOfTile() panels. `lines` is the number of lines
// that a tile reads of each of its panels.
inline void RunBlock(const TileGrid& grid, int line_bytes, int64_t lines, const LinearTileArgs& a) {
  const int64_t step = static_cast<int64_t>(a.panels) * line_bytes;
  const int most = PanelsOfTile(a.rows);
  Ahead ahead{a.ahead, a.ahead_stride, a.fetch_l1};
  for (int p = 0; p < a.panels; p += most) {
    const int panels = a.panels - p < most ? a.panels - p : most;
    grid[a.rows - 1][panels - 1](a.weights + p * line_bytes, step, a.k, a.x, ahead,
                                 a.out + p * kPanel);
    if (ahead.next != nullptr) ahead.next += lines * ahead.stride;
  }
}

// Rows beyond kRowTile repeat the last function, so that no others are compiled. Only those numbers
// of panels are compiled that PanelsOfTile() allows.
#define MOESERVE_TILE_FOUR(fn, m) \
  { &fn<m, 1>, &fn<m, 2>, &fn<m, 3>, &fn<m, 4> }
#ifdef __AVX512F__
#define MOESERVE_TILE_ROW(fn, m) MOESERVE_TILE_FOUR(fn, (m < kRowTile ? m : kRowTile))
#else
#define MOESERVE_TILE_ROW(fn, m) \
  { &fn<(m < kRowTile ? m : kRowTile), 1> }
#endif
#define MOESERVE_TILE_GRID(fn)                                                       \
  {                                                                                  \
    MOESERVE_TILE_FOUR(fn, 1), MOESERVE_TILE_ROW(fn, 2), MOESERVE_TILE_ROW(fn, 3),   \
        MOESERVE_TILE_ROW(fn, 4), MOESERVE_TILE_ROW(fn, 5), MOESERVE_TILE_ROW(fn, 6) \
  }

#ifdef MOESERVE_F32_TABLE
void LinearF32(const LinearTileArgs& a) { MOESERVE_F32_TABLE.linear_f32(a); }
#else
constexpr TileGrid kGridF32 = MOESERVE_TILE_GRID(TileF32);
constexpr TileGrid kGridF16 = MOESERVE_TILE_GRID(TileF16);
constexpr TileGrid kGridBf16 = MOESERVE_TILE_GRID(TileBf16);

void LinearF32(const LinearTileArgs& a) {
  switch (a.weight_dtype) {
    case DType::kF32:
      return RunBlock(kGridF32, 64, a.k, a);
    case DType::kF16:
      return RunBlock(kGridF16, 32, a.k, a);
    case DType::kBF16:
      return RunBlock(kGridBf16, 64, (a.k + 1) / 2, a);
  }
}
#endif

#if MOESERVE_BF16_DOT && !defined(MOESERVE_AMX)
constexpr TileGrid kGridBf16Dot = MOESERVE_TILE_GRID(TileBf16Dot);

void LinearBf16(const LinearTileArgs& a) { RunBlock(kGridBf16Dot, 64, (a.k + 1) / 2, a); }
#endif

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
