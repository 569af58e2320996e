// Attention of a tile of query rows to one block of positions: rows of one kv head share every load
// of keys and values.
//
// A row's sums are its own: scores run over the head's dimensions in ascending order, value sums
// over the row's visible positions in ascending order, so neither the other rows of a tile nor its
// shape change a bit.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kAttentionLanes = kAttentionBlock;  // weights of a row within a block

template <KvCacheType kType>
inline Vec LoadCached(const char* p) {
  if constexpr (kType == KvCacheType::kF32) {
    return Load(reinterpret_cast<const float*>(p));
  } else if constexpr (kType == KvCacheType::kBF16) {
    return LoadBf16(p);
  } else {
    return LoadInt8(p);
  }
}

template <KvCacheType kType>
inline constexpr int kLineBytes = 16 * (kType == KvCacheType::kF32    ? 4
                                        : kType == KvCacheType::kBF16 ? 2
                                                                      : 1);

// Elements follow the scales of the block's 16 positions.
template <KvCacheType kType>
inline constexpr int kScaleBytes = kType == KvCacheType::kInt8 ? 64 : 0;

inline Vec Multiply(Vec a, Vec b) { return Fma(a, b, Zero()); }

// Scores of R rows at the 16 positions of each of B adjacent cache blocks; `queries` is
// [head_dim][kMaxAttentionRows].
template <KvCacheType kType, int R, int B>
void ScoreTile(const AttentionTileArgs& a, const float* queries, int block, float* scores) {
  const char* key[B];
  Vec acc[R][B];
  for (int b = 0; b < B; ++b) {
    key[b] = a.keys + a.block_table[block + b] * a.key_block_bytes + kScaleBytes<kType>;
    for (int r = 0; r < R; ++r) acc[r][b] = Zero();
  }
  for (int d = 0; d < a.head_dim; ++d, queries += kMaxAttentionRows) {
    Vec line[B];
    for (int b = 0; b < B; ++b) line[b] = LoadCached<kType>(key[b] + d * kLineBytes<kType>);
    for (int r = 0; r < R; ++r) {
      const Vec q = Broadcast(queries[r]);
      for (int b = 0; b < B; ++b) acc[r][b] = Fma(q, line[b], acc[r][b]);
    }
  }
  for (int b = 0; b < B; ++b) {
    if constexpr (kType == KvCacheType::kInt8) {
      const Vec scale = Load(reinterpret_cast<const float*>(key[b] - kScaleBytes<kType>));
      for (int r = 0; r < R; ++r) acc[r][b] = Multiply(acc[r][b], scale);
    }
    for (int r = 0; r < R; ++r) Store(scores + r * kAttentionLanes + b * 16, acc[r][b]);
  }
}

// Adds positions [begin, end) to V vectors of the sums of R rows.
template <KvCacheType kType, int R, int V>
void SumTile(const AttentionTileArgs& a, const float* weights, int first_position, int begin,
             int end, int column, float* sums) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = Load(sums + r * a.padded_dim + column + v * 16);
  }
  const int64_t row_bytes = static_cast<int64_t>(a.padded_dim) * (kLineBytes<kType> / 16);
  weights += begin - first_position;
  for (int position = begin; position < end;) {
    const int block = position / 16;
    const int stop = (block + 1) * 16 < end ? (block + 1) * 16 : end;
    const char* value = a.values + a.block_table[block] * a.value_block_bytes + kScaleBytes<kType> +
                        (position - block * 16) * row_bytes + column * (kLineBytes<kType> / 16);
    for (; position < stop; ++position, ++weights, value += row_bytes) {
      Vec line[V];
      for (int v = 0; v < V; ++v) line[v] = LoadCached<kType>(value + v * kLineBytes<kType>);
      for (int r = 0; r < R; ++r) {
        const Vec weight = Broadcast(weights[r * kAttentionLanes]);
        for (int v = 0; v < V; ++v) acc[r][v] = Fma(weight, line[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) Store(sums + r * a.padded_dim + column + v * 16, acc[r][v]);
  }
}

template <KvCacheType kType, int R>
void ScoreRows(const AttentionTileArgs& a, const float* queries, int begin, int end,
               float* scores) {
  constexpr int kBlocks = kAttentionAccumulators / R < 4 ? kAttentionAccumulators / R : 4;
  int block = begin;
  for (; block + kBlocks <= end; block += kBlocks) {
    ScoreTile<kType, R, kBlocks>(a, queries, block, scores + (block - begin) * 16);
  }
  for (; block < end; ++block) {
    ScoreTile<kType, R, 1>(a, queries, block, scores + (block - begin) * 16);
  }
}

template <KvCacheType kType, int R>
void SumRows(const AttentionTileArgs& a, const float* weights, int first_position, int begin,
             int end, float* sums) {
  constexpr int kVecs = kAttentionAccumulators / R < 8 ? kAttentionAccumulators / R : 8;
  if (begin >= end) return;
  int column = 0;
  for (; column + kVecs * 16 <= a.padded_dim; column += kVecs * 16) {
    SumTile<kType, R, kVecs>(a, weights, first_position, begin, end, column, sums);
  }
  for (; column < a.padded_dim; column += 16) {
    SumTile<kType, R, 1>(a, weights, first_position, begin, end, column, sums);
  }
}

inline float LargestOf(const float* scores, int count) {
  float lane[16];
  for (int l = 0; l < 16; ++l) lane[l] = -__builtin_inff();
  int i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int l = 0; l < 16; ++l) lane[l] = scores[i + l] > lane[l] ? scores[i + l] : lane[l];
  }
  for (int l = 0; i + l < count; ++l) lane[l] = scores[i + l] > lane[l] ? scores[i + l] : lane[l];
  for (int width = 8; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] = lane[l + width] > lane[l] ? lane[l + width] : lane[l];
  }
  return lane[0];
}

// Turns the scores of positions [begin, end), which stand at [begin - first_position, ..), into
// weights e^(score - largest). Lanes up to whole vectors become 0; tells the largest and the sum.
inline void Exponentials(const AttentionTileArgs& a, int begin, int end, int first_position,
                         float* lanes, float* largest, float* sum) {
  const int skip = begin - first_position;
  const int visible = end - first_position;
  const int from = skip / 16 * 16;
  const int to = (visible + 15) / 16 * 16;
  for (int i = skip; i < visible; ++i) lanes[i] *= a.scale;
  const float maximum = LargestOf(lanes + skip, visible - skip);
  // What other positions' lanes hold is arbitrary: they may never have been written.
  for (int i = from; i < skip; ++i) lanes[i] = 0.0f;
  for (int i = skip; i < visible; ++i) lanes[i] = ContractExp(lanes[i] - maximum);
  for (int i = visible; i < to; ++i) lanes[i] = 0.0f;
  float lane[16] = {};
  for (int i = from; i < to; i += 16) {
    for (int l = 0; l < 16; ++l) lane[l] += lanes[i + l];
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  *largest = maximum;
  *sum = lane[0];
}

// `R` is the number of rows rounded up to a power of two; the rows that fill it up are zeros.
template <KvCacheType kType, int R>
void AttentionTileOf(const AttentionTileArgs& a) {
  const int block_begin = a.block * kAttentionBlock;
  const int block_end = block_begin + kAttentionBlock;
  int begin[R], end[R];
  for (int r = 0; r < a.rows; ++r) {
    begin[r] = a.begin[r] > block_begin ? a.begin[r] : block_begin;
    end[r] = a.end[r] < block_end ? a.end[r] : block_end;
  }
  const int first = begin[0] / 16;
  const int last = (end[a.rows - 1] + 15) / 16;

  float* queries = a.scratch;
  float* weights = queries + static_cast<int64_t>(a.head_dim) * kMaxAttentionRows;
  for (int r = 0; r < R; ++r) {
    for (int d = 0; d < a.head_dim; ++d) {
      queries[d * kMaxAttentionRows + r] = r < a.rows ? a.queries[r][d] : 0.0f;
    }
  }
  ScoreRows<kType, R>(a, queries, first, last, weights);
  for (int r = 0; r < a.rows; ++r) {
    float* lanes = weights + r * kAttentionLanes;
    Exponentials(a, begin[r], end[r], first * 16, lanes, &a.largest[r], &a.total[r]);
    if constexpr (kType == KvCacheType::kInt8) {
      // After the sum: the total is of the weights alone.
      for (int block = begin[r] / 16; block < (end[r] + 15) / 16; ++block) {
        const float* scale =
            reinterpret_cast<const float*>(a.values + a.block_table[block] * a.value_block_bytes);
        float* lane = lanes + (block - first) * 16;
        Store(lane, Multiply(Load(lane), Load(scale)));
      }
    }
  }
  for (int r = a.rows; r < R; ++r) {
    for (int i = 0; i < (last - first) * 16; ++i) weights[r * kAttentionLanes + i] = 0.0f;
  }

  for (int64_t i = 0; i < static_cast<int64_t>(R) * a.padded_dim; ++i) a.sums[i] = 0.0f;
  // Positions that all rows see are summed together. The others must not touch the rows that do not
  // see them, even with weight 0: a value may be NaN, and -0 + 0 is another zero.
  const int common_begin = begin[a.rows - 1];
  const int common_end = end[0] > common_begin ? end[0] : common_begin;
  for (int r = 0; R > 1 && r < a.rows; ++r) {
    const int stop = end[r] < common_begin ? end[r] : common_begin;
    SumRows<kType, 1>(a, weights + r * kAttentionLanes, first * 16, begin[r], stop,
                      a.sums + static_cast<int64_t>(r) * a.padded_dim);
  }
  SumRows<kType, R>(a, weights, first * 16, common_begin, end[0], a.sums);
  for (int r = 0; R > 1 && r < a.rows; ++r) {
    SumRows<kType, 1>(a, weights + r * kAttentionLanes, first * 16, common_end, end[r],
                      a.sums + static_cast<int64_t>(r) * a.padded_dim);
  }
}

template <KvCacheType kType>
void AttentionTileOfType(const AttentionTileArgs& a) {
  if (a.rows == 1) return AttentionTileOf<kType, 1>(a);
  if (a.rows == 2) return AttentionTileOf<kType, 2>(a);
  if constexpr (kAttentionRows == 8) {
    if (a.rows > 4) return AttentionTileOf<kType, 8>(a);
  }
  return AttentionTileOf<kType, 4>(a);
}

void AttentionTile(const AttentionTileArgs& a) {
  switch (a.type) {
    case KvCacheType::kF32:
      return AttentionTileOfType<KvCacheType::kF32>(a);
    case KvCacheType::kBF16:
      return AttentionTileOfType<KvCacheType::kBF16>(a);
    case KvCacheType::kInt8:
      return AttentionTileOfType<KvCacheType::kInt8>(a);
  }
}

// state = state * e^(M - max(M, m)) + partial * e^(m - max(M, m)).
void MergeAttention(const AttentionMergeArgs& a) {
  const float highest = *a.largest > a.partial_largest ? *a.largest : a.partial_largest;
  const float keep = ContractExp(*a.largest - highest);
  const float add = ContractExp(a.partial_largest - highest);
  *a.largest = highest;
  *a.total = *a.total * keep + a.partial_total * add;
  const Vec kept = Broadcast(keep), added = Broadcast(add);
  for (int i = 0; i < a.padded_dim; i += 16) {
    Store(a.sums + i, Fma(Load(a.partial_sums + i), added, Multiply(Load(a.sums + i), kept)));
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
