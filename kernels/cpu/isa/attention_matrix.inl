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

inline constexpr int64_t kWeightRowBytes = int64_t{kAttentionLanes} * sizeof(float);

// Writes the pairs of dimensions of a page's keys to `steps` tiles of 16 lines.
inline void KeyTiles(const AttentionTileArgs& a, int block, int ahead, int steps, char* tiles) {
  const char* const key = a.keys + a.page_table[block] * a.key_page_bytes;
  const char* const next = Upcoming(a, a.keys, a.key_page_bytes, a.key_head_bytes, block, ahead);
  for (int d = 0; d < steps * kStepDims; d += 2, tiles += 64) {
    PairVec pairs = BroadcastInt(0);
    if (d + 2 <= a.head_dim) {
      __builtin_prefetch(next + d * 32, 0, 3);
      pairs = LoadLinePairs(key + d * 32);
    } else if (d < a.head_dim) {
      pairs = LoadLastLine(key + d * 32);
    }
    StoreQuads(tiles, pairs);
  }
}

// Computes the scores of all rows at the positions of P consecutive pages. `queries` are in
// the layout of PackRowsArgs.
template <int kRowTiles, int P>
void MatrixScores(TileRegisters& tiles, const AttentionTileArgs& a, const char* queries, int block,
                  float* scores) {
  const int steps = (a.head_dim + kStepDims - 1) / kStepDims;
  const int in_block = block % (kAttentionBlock / 16);
  char* const keys = a.operands->memory + int64_t{in_block} * steps * kTileBytes;
  for (int p = 0; p < P; ++p) {
    const uint32_t bit = 1u << (in_block + p);
    if ((a.operands->keys_ready & bit) != 0) continue;
    KeyTiles(a, block + p, P, steps, keys + p * steps * kTileBytes);
    a.operands->keys_ready |= bit;
  }
  ForSums<kRowTiles, P>([&](auto tile, int, int) { tiles.Clear<decltype(tile)::value>(); });
  for (int s = 0; s < steps; ++s) {
    AddMatrixStep<false, kRowTiles, P>(tiles, queries + s * kTileBytes, 64, steps * kTileBytes,
                                       keys + s * kTileBytes, steps * kTileBytes, 64);
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

// Writes the values at positions [step, step + 32) that are in [begin, end), and zeros at the
// others, to a tile of pairs of positions for each 16 columns. Returns whether all are finite.
inline bool ValueTiles(const AttentionTileArgs& a, int step, int begin, int end, char* tiles) {
  const int64_t row_bytes = static_cast<int64_t>(a.padded_dim) * 2;
  bool finite = true;
  for (int i = 0; i < kStepPositions; i += 2, tiles += 64) {
    const int position = step + i;
    const bool even = position >= begin && position < end;
    const bool odd = position + 1 >= begin && position + 1 < end;
    if (!even && !odd) {
      for (int c = 0; c < a.padded_dim / 16; ++c) {
        StoreQuads(tiles + c * kTileBytes, BroadcastInt(0));
      }
      continue;
    }
    const int block = position / 16;
    const int64_t offset = (position - block * 16) * row_bytes;
    const char* const value = ValuesOf(a, block) + offset;
    const char* const next =
        a.latent_values != nullptr
            ? value
            : Upcoming(a, a.values, a.value_page_bytes, a.value_head_bytes, block, 2) + offset;
    const auto copy = [&](int column, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      PairVec pairs[kVectors];
      __builtin_prefetch(next + column * 2, 0, 3);
      __builtin_prefetch(next + row_bytes + column * 2, 0, 3);
      const char* const at = value + column * 2;
      LoadRowPairs<kVectors>(at, at + row_bytes, even, odd, pairs);
      for (int v = 0; v < kVectors; ++v) {
        finite = finite && !HasNonFinite(pairs[v]);
        StoreQuads(tiles + (column / 16 + v) * kTileBytes, pairs[v]);
      }
    };
    int column = 0;
    for (; column + 32 <= a.padded_dim; column += 32) copy(column, Index<2>());
    if (column < a.padded_dim) copy(column, Index<1>());
  }
  return finite;
}

// Makes the values of all positions that the rows see ready. Returns false if the rows must be
// computed one by one.
inline bool PrepareValues(const AttentionTileArgs& a, const SeenPositions& seen, int first,
                          char* values) {
  bool finite = true;
  for (int step = first; step < seen.end; step += kStepPositions) {
    const int begin = step > seen.begin ? step : seen.begin;
    const int end = step + kStepPositions < seen.end ? step + kStepPositions : seen.end;
    const uint32_t bit = 1u << step % kAttentionBlock / kStepPositions;
    const bool all_see = begin >= seen.common_begin && end <= seen.common_end;
    // Others may see more or less of a part of the positions.
    const bool whole = end - begin == kStepPositions;
    if (whole && all_see && (a.operands->values_ready & bit) != 0) continue;
    const int64_t at = int64_t{step % kAttentionBlock} * a.padded_dim * 2;
    const bool are_finite = ValueTiles(a, step, begin, end, values + at);
    if (!all_see) finite = finite && are_finite;
    a.operands->values_ready =
        whole ? a.operands->values_ready | bit : a.operands->values_ready & ~bit;
  }
  return finite;
}

// Computes the weighted values of columns [column, column + 16 P) of all rows. `values` and
// `weights` are those of the first of `steps` steps.
template <int kRowTiles, int P>
void MatrixSums(TileRegisters& tiles, const AttentionTileArgs& a, const char* weights,
                const char* values, int steps, int column) {
  ForSums<kRowTiles, P>([&](auto tile, int, int) { tiles.Clear<decltype(tile)::value>(); });
  values += column / 16 * kTileBytes;
  for (int s = 0; s < steps; ++s, weights += 64) {
    AddMatrixStep<false, kRowTiles, P>(tiles, weights, kWeightRowBytes,
                                       kTileLines * kWeightRowBytes, values, kTileBytes, 64);
    values += a.padded_dim / 16 * kTileBytes;
  }
  ForSums<kRowTiles, P>([&](auto tile, int row_tile, int panel) {
    float* const at = a.sums + row_tile * kTileLines * a.padded_dim + column + panel * 16;
    tiles.Store<decltype(tile)::value>(at, int64_t{a.padded_dim} * 4);
  });
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
    AddBiases(a.bias[row], a.bias_distances, a.position[row], begin, end, lanes + begin - first);
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
  const int key_steps = (a.head_dim + kStepDims - 1) / kStepDims;
  constexpr int64_t kBlocksOfKeys = kAttentionBlock / 16;
  char* const operands = a.operands->memory + kBlocksOfKeys * key_steps * kTileBytes;
  if (!PrepareValues(a, seen, first, operands)) return false;
  const char* const values = operands + int64_t{first - block_begin} * a.padded_dim * 2;
  const char* const weights = reinterpret_cast<const char*>(scores);
  const int steps = (last - first) / kStepPositions;
  int column = 0;
  for (; column + kBlocks * 16 <= a.padded_dim; column += kBlocks * 16) {
    MatrixSums<kRowTiles, kBlocks>(tiles, a, weights, values, steps, column);
  }
  for (; column < a.padded_dim; column += 16) {
    MatrixSums<kRowTiles, 1>(tiles, a, weights, values, steps, column);
  }
  PositiveZeros(a);
  return true;
}

void MatrixAttention(const AttentionTileArgs& a) {
  if (a.rows <= kTileLines ? MatrixAttentionOf<1>(a) : MatrixAttentionOf<2>(a)) return;
  for (int r = 0; r < a.rows; ++r) VectorAttention(RowsOfTile(a, r, 1));
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
