// The integer sums of a tile of rows and panels, and the addition of products to them. With
// products of matrices, a tile of more than one row keeps its sums in another order.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// The integer sums of a tile: `TileSums<M, P>` is the type of an array of them.
template <int M, int P>
struct TileSumsOf {
  using Type = IntVec[M][P];
};
#if defined(MOESERVE_NEON_DOT) && MOESERVE_NEON_DOT == 2
inline constexpr bool kMatrixProducts = true;
template <int M>
  requires(M > 1)
struct TileSumsOf<M, 1> {
  using Type = IntMatrix[(M + 1) / 2][1];  // the last row of an odd number is its own partner
};
#else
inline constexpr bool kMatrixProducts = false;
#endif
template <int M, int P>
using TileSums = typename TileSumsOf<M, P>::Type;

// Sets the sums of each row to the int32 at `at` in its records.
template <int M, int P>
inline void StartSums(const char* const (&x)[M], int64_t at, IntVec (&sum)[M][P]) {
  for (int m = 0; m < M; ++m) {
    int32_t value;
    __builtin_memcpy(&value, x[m] + at, 4);
    for (int p = 0; p < P; ++p) sum[m][p] = BroadcastInt(value);
  }
}

template <int M, int P>
inline IntVec SumOf(const IntVec (&sum)[M][P], int m, int p) {
  return sum[m][p];
}

template <int M, int P>
inline void AddQuads(const QuadLine (&line)[P], const char* const (&x)[M], int64_t at,
                     IntVec (&sum)[M][P]) {
  for (int m = 0; m < M; ++m) {
    const QuadInput input = BroadcastQuad(x[m] + at);
    for (int p = 0; p < P; ++p) sum[m][p] = DotQuads(sum[m][p], line[p], input);
  }
}

// Adds the products of eight values of k. low(p) and high(p) return a panel's lines of the first
// and of the last four.
template <int M, int P, typename Low, typename High>
inline void AddEight(const Low& low, const High& high, const char* const (&x)[M], int64_t at,
                     IntVec (&sum)[M][P]) {
  QuadLine line[P];
  for (int p = 0; p < P; ++p) line[p] = low(p);
  AddQuads(line, x, at, sum);
  for (int p = 0; p < P; ++p) line[p] = high(p);
  AddQuads(line, x, at + 4, sum);
}

// Adds the products of a panel's pairs with the pairs of 16-bit integers at `at`.
template <int M, int P>
inline void AddPairProducts(const QuadLine& pairs, int p, const char* const (&x)[M], int64_t at,
                            IntVec (&sum)[M][P]) {
  for (int m = 0; m < M; ++m) sum[m][p] = DotPairs(sum[m][p], pairs, x[m] + at);
}

#if defined(MOESERVE_NEON_DOT) && MOESERVE_NEON_DOT == 2
// The same for sums of pairs of rows.
template <int M>
constexpr int PartnerOf(int pair) {
  return 2 * pair + 1 < M ? 2 * pair + 1 : M - 1;
}

template <int M, int N>
inline void StartSums(const char* const (&x)[M], int64_t at, IntMatrix (&sum)[N][1]) {
  for (int i = 0; i < N; ++i) {
    int32_t first, second;
    __builtin_memcpy(&first, x[2 * i] + at, 4);
    __builtin_memcpy(&second, x[PartnerOf<M>(i)] + at, 4);
    sum[i][0] = BroadcastMatrix(first, second);
  }
}

template <int N>
inline IntVec SumOf(const IntMatrix (&sum)[N][1], int m, int /*panel*/) {
  return SumsOfRow(sum[m / 2][0], m % 2);
}

template <int M, int N, typename Low, typename High>
inline void AddEight(const Low& low, const High& high, const char* const (&x)[M], int64_t at,
                     IntMatrix (&sum)[N][1]) {
  const QuadLine first = low(0), second = high(0);
  for (int i = 0; i < N; ++i) {
    AddMatrix(sum[i][0], first, second, x[2 * i] + at, x[PartnerOf<M>(i)] + at);
  }
}

// The four bytes after those at `at` belong to the same record.
template <int M, int N>
inline void AddQuads(const QuadLine (&line)[1], const char* const (&x)[M], int64_t at,
                     IntMatrix (&sum)[N][1]) {
  AddEight([&](int) { return line[0]; }, [](int) { return QuadLine{}; }, x, at, sum);
}

template <int M, int N>
inline void AddPairProducts(const QuadLine& pairs, int /*panel*/, const char* const (&x)[M],
                            int64_t at, IntMatrix (&sum)[N][1]) {
  for (int i = 0; i < N; ++i) {
    AddRows(sum[i][0], DotPairs(BroadcastInt(0), pairs, x[2 * i] + at),
            DotPairs(BroadcastInt(0), pairs, x[PartnerOf<M>(i)] + at));
  }
}
#endif

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
