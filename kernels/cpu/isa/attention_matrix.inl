// Attention on a matrix unit (simd/amx.h), over a cache in bf16: queries and weights are rounded to
// bf16. A score is summed over steps of 32 dimensions, and weighted values over steps of 32
// positions that begin at multiples of 32. A position of a step that a row does not see counts with
// weight 0.
//
// A row's result does not depend on other rows, although they share steps: adding 0 changes at most
// the sign of a zero, and zeros are made positive at the end. Positions that no row sees are not
// read. If a position that only some rows see has values that are not finite, whose products with 0
// would be NaN, the rows are computed one by one.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kStepPositions = 32;
inline constexpr int kStepDims = 32;
inline constexpr int64_t kWeightRowBytes = int64_t{kAttentionLanes} * sizeof(float);

// Writes the pairs of dimensions [d, d + kStepDims) of a block's keys to a tile of 16 lines.
inline void KeyTile(const AttentionTileArgs& a, const char* key, const char* next, int d,
                    char* tile) {
  for (int i = 0; i < kStepDims; i += 2, tile += 64) {
    const int at = d + i;
    PairVec pairs = BroadcastInt(0);
    if (at + 2 <= a.head_dim) {
      __builtin_prefetch(next + at * 32, 0, 3);
      pairs = LoadLinePairs(key + at * 32);
    } else if (at < a.head_dim) {
      pairs = LoadLastLine(key + at * 32);
    }
    StoreQuads(tile, pairs);
  }
}

// Computes the scores of all rows at the positions of P consecutive cache blocks. `queries` are in
// the layout of PackRowsArgs.
template <int kRowTiles, int P>
void MatrixScores(TileRegisters& tiles, const AttentionTileArgs& a, const char* queries, int block,
                  float* scores) {
  alignas(64) char keys[2][P * kTileBytes];
  const char* key[P];
  const char* next[P];
  for (int p = 0; p < P; ++p) {
    key[p] = a.keys + a.block_table[block + p] * a.key_block_bytes;
    next[p] = Upcoming(a, a.keys, a.key_block_bytes, a.key_head_bytes, block + p, P);
  }
  const int steps = (a.head_dim + kStepDims - 1) / kStepDims;
  ForSums<kRowTiles, P>([&](auto tile, int, int) { tiles.Clear<decltype(tile)::value>(); });
  for (int s = 0; s < steps; ++s) {
    char* const lines = keys[s % 2];
    for (int p = 0; p < P; ++p) {
      KeyTile(a, key[p], next[p], s * kStepDims, lines + p * kTileBytes);
    }
    AddMatrixStep<false, kRowTiles, P>(tiles, queries + s * kTileBytes, 64, steps * kTileBytes,
                                       lines, kTileBytes, 64);
  }
  ForSums<kRowTiles, P>([&](auto tile, int row_tile, int panel) {
    float* const at = scores + row_tile * kTileLines * kAttentionLanes + panel * 16;
    tiles.Store<decltype(tile)::value>(at, kWeightRowBytes);
  });
}

// Returns whether a pair has a NaN or an infinity.
inline bool HasNonFinite(PairVec pairs) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent) != 0;
}

// The positions that rows of a tile see.
struct SeenPositions {
  int begin, end;                // by any row
  int common_begin, common_end;  // by all rows; there may be none
};

// Adds the weighted values of columns [column, column + 16 P) to the sums of all rows; the first
// weights are those of position `first`. Returns false if the rows must be computed one by one.
template <int kRowTiles, int P>
bool MatrixSums(TileRegisters& tiles, const AttentionTileArgs& a, const char* weights, int first,
                const SeenPositions& seen, int column) {
  alignas(64) char values[2][P * kTileBytes];
  const int64_t row_bytes = static_cast<int64_t>(a.padded_dim) * 2;
  bool finite = true;
  ForSums<kRowTiles, P>([&](auto tile, int, int) { tiles.Clear<decltype(tile)::value>(); });
  for (int step = first; step < seen.end; step += kStepPositions, weights += 64) {
    char* const lines = values[step / kStepPositions % 2];
    const int step_begin = step > seen.begin ? step : seen.begin;
    const int step_end = step + kStepPositions < seen.end ? step + kStepPositions : seen.end;
    const bool all_see = step_begin >= seen.common_begin && step_end <= seen.common_end;
    for (int i = 0; i < kStepPositions; i += 2) {
      const int position = step + i;
      PairVec pairs[P];
      for (PairVec& p : pairs) p = BroadcastInt(0);
      const bool even = position >= step_begin && position < step_end;
      const bool odd = position + 1 >= step_begin && position + 1 < step_end;
      if (even || odd) {
        const int block = position / 16;
        const int64_t offset = (position - block * 16) * row_bytes + int64_t{column} * 2;
        const char* const value = ValuesOf(a, block) + offset;
        if (a.latent_values == nullptr) {
          const char* const next =
              Upcoming(a, a.values, a.value_block_bytes, a.value_head_bytes, block, 2) + offset;
          for (int p = 0; p < P; p += 2) {
            __builtin_prefetch(next + p * 32, 0, 3);
            __builtin_prefetch(next + row_bytes + p * 32, 0, 3);
          }
        }
        LoadRowPairs<P>(value, value + row_bytes, even, odd, pairs);
      }
      for (int p = 0; p < P; ++p) {
        if (!all_see) finite = finite && !HasNonFinite(pairs[p]);
        StoreQuads(lines + p * kTileBytes + i / 2 * 64, pairs[p]);
      }
    }
    AddMatrixStep<false, kRowTiles, P>(tiles, weights, kWeightRowBytes,
                                       kTileLines * kWeightRowBytes, lines, kTileBytes, 64);
  }
  ForSums<kRowTiles, P>([&](auto tile, int row_tile, int panel) {
    float* const at = a.sums + row_tile * kTileLines * a.padded_dim + column + panel * 16;
    tiles.Store<decltype(tile)::value>(at, int64_t{a.padded_dim} * 4);
  });
  return finite;
}

// Rounds the queries to bf16, in the layout of PackRowsArgs.
inline void PackQueries(const AttentionTileArgs& a, Bf16* out) {
  const int steps = (a.head_dim + kStepDims - 1) / kStepDims;
  for (int r = 0; r < a.rows; ++r) {
    const float* const query = a.queries[r];
    Bf16* const row = out + (r / kTileLines * steps * kTileLines + r % kTileLines) * kStepDims;
    for (int d = 0; d < steps * kStepDims; d += 16) {
      Bf16* const to = row + d / kStepDims * kTileLines * kStepDims + d % kStepDims;
      if (d + 16 <= a.head_dim) {
        StoreBf16(to, Load(query + d));
        continue;
      }
      for (int i = 0; i < 16; ++i) {
        to[i] = d + i < a.head_dim ? Bf16FromF32(query[d + i]) : Bf16{0};
      }
    }
  }
}

// Turns the scores of a row into weights in bf16, which are 0 at positions of [first, last) that
// the row does not see.
inline void MatrixWeights(const AttentionTileArgs& a, int row, int begin, int end, int first,
                          int last, float* lanes) {
  const int from = begin / 16 * 16, to = (end + 15) / 16 * 16;
  for (int p = from; p < to; p += 16) {
    float* const at = lanes + (p - first);
    Store(at, Multiply(Load(at), Broadcast(a.scale)));
  }
  if (a.soft_cap > 0.0f) SoftCapValues(a.soft_cap, lanes + (from - first), to - from);
  if (a.bias != nullptr) {
    AddBiases(a.bias[row], a.bias_distances, a.end[row] - 1, begin, end, lanes + begin - first);
  }
  Exponentials(begin, end, first, lanes, &a.largest[row], &a.total[row]);
  for (int p = first; p < from; p += 16) Store(lanes + (p - first), Zero());
  for (int p = to; p < last; p += 16) Store(lanes + (p - first), Zero());
  RoundWeights(lanes, last - first);
}

template <int kRowTiles>
bool MatrixAttentionOf(const AttentionTileArgs& a) {
  const int block_begin = a.block * kAttentionBlock;
  const int block_end = block_begin + kAttentionBlock;
  int begin[kMaxAttentionRows], end[kMaxAttentionRows];
  for (int r = 0; r < a.rows; ++r) {
    begin[r] = a.begin[r] > block_begin ? a.begin[r] : block_begin;
    end[r] = a.end[r] < block_end ? a.end[r] : block_end;
  }
  // Neither begin nor end decreases from row to row.
  const SeenPositions seen{begin[0], end[a.rows - 1], begin[a.rows - 1], end[0]};
  const int first = seen.begin / kStepPositions * kStepPositions;
  const int last = (seen.end + kStepPositions - 1) / kStepPositions * kStepPositions;
  if (a.latent_values != nullptr) {
    CopyLatentValues<KvCacheType::kBF16>(a, seen.begin / 16, (seen.end + 15) / 16);
  }
  PackQueries(a, a.rounded_queries);
  const char* const queries = reinterpret_cast<const char*>(a.rounded_queries);
  TileRegisters tiles = TilesFor(a.rows);
  constexpr int kBlocks = kRowTiles == 1 ? 4 : 2;
  int block = seen.begin / 16;
  const int blocks_end = (seen.end + 15) / 16;
  float* const scores = a.scratch;
  for (; block + kBlocks <= blocks_end; block += kBlocks) {
    MatrixScores<kRowTiles, kBlocks>(tiles, a, queries, block, scores + (block * 16 - first));
  }
  for (; block < blocks_end; ++block) {
    MatrixScores<kRowTiles, 1>(tiles, a, queries, block, scores + (block * 16 - first));
  }
  for (int r = 0; r < a.rows; ++r) {
    MatrixWeights(a, r, begin[r], end[r], first, last, scores + r * kAttentionLanes);
  }
  const char* const weights = reinterpret_cast<const char*>(scores);
  int column = 0;
  for (; column + kBlocks * 16 <= a.padded_dim; column += kBlocks * 16) {
    if (!MatrixSums<kRowTiles, kBlocks>(tiles, a, weights, first, seen, column)) return false;
  }
  for (; column < a.padded_dim; column += 16) {
    if (!MatrixSums<kRowTiles, 1>(tiles, a, weights, first, seen, column)) return false;
  }
  for (int64_t i = 0; i < int64_t{a.rows} * a.padded_dim; i += 16) {
    Store(a.sums + i, Add(Load(a.sums + i), Zero()));
  }
  return true;
}

void MatrixAttention(const AttentionTileArgs& a) {
  if (a.rows <= kTileLines ? MatrixAttentionOf<1>(a) : MatrixAttentionOf<2>(a)) return;
  for (int r = 0; r < a.rows; ++r) MatrixAttentionOf<1>(RowsOfTile(a, r, 1));
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
