// Attention of a tile of query rows over one block of positions. The rows of a tile read the same
// kv head and share every load of keys and values.
//
// A row's result does not depend on other rows: a score is summed over the head's dimensions in
// ascending order, and the weighted values are summed over the row's visible positions in ascending
// order. So neither the other rows of a tile nor its shape change a bit of the result.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kAttentionLanes = kAttentionBlock;  // number of weights stored per row

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

// Returns the values of a page.
inline const char* ValuesOf(const AttentionTileArgs& a, int block) {
  return a.latent_values != nullptr
             ? a.latent_values + block % (kAttentionBlock / 16) * a.value_page_bytes
             : a.values + a.page_table[block] * a.value_page_bytes;
}

template <KvCacheType kType>
inline constexpr int kLineBytes = 16 * (kType == KvCacheType::kF32    ? 4
                                        : kType == KvCacheType::kBF16 ? 2
                                                                      : 1);

// In an int8 cache, the elements of a (block, kv_head) follow the scales of the block's 16
// positions.
template <KvCacheType kType>
inline constexpr int kScaleBytes = kType == KvCacheType::kInt8 ? 64 : 0;

inline Vec Multiply(Vec a, Vec b) { return Fma(a, b, Zero()); }

// Returns the address of the page `ahead` blocks after `block` in the sequence or, after the
// sequence's last block, of the next kv head's first blocks. The caller prefetches that block while
// it reads `block`: the pages of a sequence are scattered in memory, so the hardware
// prefetcher cannot predict their addresses.
inline const char* Upcoming(const AttentionTileArgs& a, const char* base, int64_t block_bytes,
                            int64_t head_bytes, int block, int ahead) {
  const int last = (a.end[a.rows - 1] - 1) / 16;
  const int next = block + ahead;
  if (next <= last) return base + a.page_table[next] * block_bytes;
  const int after = a.begin[0] / 16 + next - last - 1;
  return base + head_bytes + a.page_table[after < last ? after : last] * block_bytes;
}

// Computes the scores of R rows at the 16 positions of each of B consecutive pages.
template <KvCacheType kType, int R, int B>
void ScoreTile(const AttentionTileArgs& a, const float* const* queries, int block, float* scores) {
  const char* key[B];
  const char* next[B];
  const float* query[R];
  Vec acc[R][B];
  for (int r = 0; r < R; ++r) query[r] = queries[r];
  for (int b = 0; b < B; ++b) {
    key[b] = a.keys + a.page_table[block + b] * a.key_page_bytes + kScaleBytes<kType>;
    next[b] =
        Upcoming(a, a.keys, a.key_page_bytes, a.key_head_bytes, block + b, B) + kScaleBytes<kType>;
    for (int r = 0; r < R; ++r) acc[r][b] = Zero();
  }
  for (int d = 0; d < a.head_dim; ++d) {
    Vec line[B];
    for (int b = 0; b < B; ++b) {
      __builtin_prefetch(next[b] + d * kLineBytes<kType>, 0, 3);
      line[b] = LoadCached<kType>(key[b] + d * kLineBytes<kType>);
    }
    for (int r = 0; r < R; ++r) {
      const Vec q = Broadcast(query[r][d]);
      for (int b = 0; b < B; ++b) acc[r][b] = Fma(q, line[b], acc[r][b]);
    }
  }
  for (int b = 0; b < B; ++b) {
    if constexpr (kType == KvCacheType::kInt8) {
      const Vec scale = Load(reinterpret_cast<const float*>(key[b] - kScaleBytes<kType>));
      for (int r = 0; r < R; ++r) acc[r][b] = Multiply(acc[r][b], scale);
    }
    for (int r = 0; r < R; ++r) acc[r][b] = Multiply(acc[r][b], Broadcast(a.scale));
    for (int r = 0; r < R; ++r) Store(scores + r * kAttentionLanes + b * 16, acc[r][b]);
  }
}

// Adds the weighted values of positions [begin, end) to V vectors (from `column` on) of the sums of
// R rows.
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
    const char* const values = ValuesOf(a, block);
    const int64_t offset = kScaleBytes<kType> + (position - block * 16) * row_bytes +
                           column * (kLineBytes<kType> / 16);
    const char* value = values + offset;
    const char* next = (a.latent_values != nullptr ? values
                                                   : Upcoming(a, a.values, a.value_page_bytes,
                                                              a.value_head_bytes, block, 1)) +
                       offset;
    for (; position < stop; ++position, ++weights, value += row_bytes, next += row_bytes) {
      Vec line[V];
      for (int v = 0; v < V; ++v) {
        __builtin_prefetch(next + v * kLineBytes<kType>, 0, 3);
        line[v] = LoadCached<kType>(value + v * kLineBytes<kType>);
      }
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

#if MOESERVE_BF16_DOT
// With instructions for products of bf16 pairs, a bf16 cache is multiplied by queries and weights
// that are rounded to bf16. The next two functions are in attention_pairs.inl or, with a matrix
// unit, in attention_steps.inl.

// Like ScoreTile, for queries [R] of head_dim elements and, if head_dim is odd, a zero.
template <int R, int B>
void ScorePairs(const AttentionTileArgs& a, const Bf16* const* queries, int block, float* scores);

// Like SumTile, for weights [R][kAttentionLanes * 2] of which the first half of each row is used.
template <int R, int V>
void SumPairs(const AttentionTileArgs& a, const Bf16* weights, int first_position, int begin,
              int end, int column, float* sums);

inline int32_t LoadPair(const Bf16* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, 4);
  return pair;
}
#endif

// Whether queries and weights are rounded to bf16 and multiplied in pairs.
template <KvCacheType kType>
inline constexpr bool kInPairs =
#if MOESERVE_BF16_DOT
    kType == KvCacheType::kBF16;
#else
    false;
#endif

#ifdef MOESERVE_AMX
inline constexpr bool kHasMatrixUnit = true;
#else
inline constexpr bool kHasMatrixUnit = false;
#endif

// Rounds the queries [R] to `rounded`, which has an even number of elements for each, and sets
// `queries` to them.
template <int R>
void RoundQueries(const AttentionTileArgs& a, Bf16* rounded, const Bf16* (&queries)[R]) {
  const int stride = (a.head_dim + 1) / 2 * 2;
  for (int r = 0; r < R; ++r) {
    Bf16* const to = rounded + (r < a.rows ? r : 0) * stride;
    queries[r] = to;
    if (r >= a.rows) continue;
    int d = 0;
    for (; d + 16 <= a.head_dim; d += 16) StoreBf16(to + d, Load(a.queries[r] + d));
    for (; d < a.head_dim; ++d) to[d] = Bf16FromF32(a.queries[r][d]);
    if (stride > a.head_dim) to[a.head_dim] = 0;
  }
}

// Rounds the first n weights of a row in place.
inline void RoundWeights(float* lanes, int n) {
  Bf16* const to = reinterpret_cast<Bf16*>(lanes);
  for (int i = 0; i < n; i += 16) StoreBf16(to + i, Load(lanes + i));
}

template <KvCacheType kType, int R, int B, typename Query>
inline void ScoreBlocks(const AttentionTileArgs& a, const Query* queries, int block,
                        float* scores) {
#if MOESERVE_BF16_DOT
  if constexpr (kInPairs<kType>) {
    ScorePairs<R, B>(a, queries, block, scores);
  } else
#endif
  {
    ScoreTile<kType, R, B>(a, queries, block, scores);
  }
}

// Returns how many vectors of sums each of `rows` rows has in a tile.
template <KvCacheType kType>
constexpr int SumsPerRow(int rows, int most) {
  // The sums of even and of odd elements are apart in attention_steps.inl.
  constexpr bool kApart = kHasMatrixUnit && kInPairs<kType>;
  const int fit = kAttentionAccumulators / (kApart ? 2 : 1) / rows;
  return fit < 1 ? 1 : fit < most ? fit : most;
}

template <KvCacheType kType, int R, typename Query>
void ScoreRows(const AttentionTileArgs& a, const Query* queries, int begin, int end,
               float* scores) {
  constexpr int kBlocks = SumsPerRow<kType>(R, 4);
  int block = begin;
  for (; block + kBlocks <= end; block += kBlocks) {
    ScoreBlocks<kType, R, kBlocks>(a, queries, block, scores + (block - begin) * 16);
  }
  // Several blocks at once, because the sums of one alone wait for each other.
  if constexpr (kBlocks > 2) {
    for (; block + 2 <= end; block += 2) {
      ScoreBlocks<kType, R, 2>(a, queries, block, scores + (block - begin) * 16);
    }
  }
  for (; block < end; ++block) {
    ScoreBlocks<kType, R, 1>(a, queries, block, scores + (block - begin) * 16);
  }
}

template <KvCacheType kType, int R, int V>
inline void SumColumns(const AttentionTileArgs& a, const float* weights, int first_position,
                       int begin, int end, int column, float* sums) {
#if MOESERVE_BF16_DOT
  if constexpr (kInPairs<kType>) {
    const Bf16* const rounded = reinterpret_cast<const Bf16*>(weights);
    return SumPairs<R, V>(a, rounded, first_position, begin, end, column, sums);
  }
#endif
  SumTile<kType, R, V>(a, weights, first_position, begin, end, column, sums);
}

template <KvCacheType kType, int R>
void SumRows(const AttentionTileArgs& a, const float* weights, int first_position, int begin,
             int end, float* sums) {
  constexpr int kVecs = SumsPerRow<kType>(R, 8);
  if (begin >= end) return;
  int column = 0;
  for (; column + kVecs * 16 <= a.padded_dim; column += kVecs * 16) {
    SumColumns<kType, R, kVecs>(a, weights, first_position, begin, end, column, sums);
  }
  // Heads of 64 elements take half of the vectors of heads of 128.
  if constexpr (kVecs > 4) {
    for (; column + 64 <= a.padded_dim; column += 64) {
      SumColumns<kType, R, 4>(a, weights, first_position, begin, end, column, sums);
    }
  }
  for (; column < a.padded_dim; column += 16) {
    SumColumns<kType, R, 1>(a, weights, first_position, begin, end, column, sums);
  }
}

inline float Larger(float a, float b) { return a > b ? a : b; }

// LargestLane() and LaneTotal() return the largest and the sum of 16 lanes, computed as a tree.
// Separate arrays for the levels of the tree keep the values in registers.
inline float LargestLane(const float* lane) {
  float a[8], b[4];
  for (int l = 0; l < 8; ++l) a[l] = Larger(lane[l], lane[l + 8]);
  for (int l = 0; l < 4; ++l) b[l] = Larger(a[l], a[l + 4]);
  return Larger(Larger(b[0], b[2]), Larger(b[1], b[3]));
}
inline float LaneTotal(const float* lane) {
  float a[8], b[4];
  for (int l = 0; l < 8; ++l) a[l] = lane[l] + lane[l + 8];
  for (int l = 0; l < 4; ++l) b[l] = a[l] + a[l + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

void SoftCapValues(float cap, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = SoftCap(x[i], cap);
}

inline int Within(int v, int low, int high) { return v < low ? low : v > high ? high : v; }

// Adds the biases of the distances from `own`, the row's position, to the scores of positions
// [begin, end). `bias` and `distances` are those of AttentionTileArgs; the score of `begin` is at
// lanes[0].
inline void AddBiases(const float* bias, int distances, int own, int begin, int end, float* lanes) {
  // Distances from `distances` - 1 on have the same bias, before and after the row.
  const int near = Within(own - distances + 2, begin, end);
  const int near_end = Within(own + distances - 1, near, end);
  for (int p = begin; p < near; ++p) lanes[p - begin] += bias[distances - 1];
  for (int p = near; p < near_end; ++p) lanes[p - begin] += bias[own - p];
  for (int p = near_end; p < end; ++p) lanes[p - begin] += bias[1 - distances];
}

// Returns ContractExp(x) with the same bits, for x of at most 0, or NaN. There is no overflow, and
// 2^n is at least the smallest normal number, so this needs half of the operations.
inline Vec ExpOfNegative(Vec x) {
  const Vec round = Broadcast(0x1.8p+23f);
  const Vec shifted = ContractFma(x, Broadcast(0x1.715476p+0f), round);
  const Vec minus_n = Sub(round, shifted);
  Vec r = ContractFma(minus_n, Broadcast(0x1.62e400p-1f), x);
  r = ContractFma(minus_n, Broadcast(0x1.7f7d1cp-20f), r);
  Vec p = Broadcast(0x1.a01a02p-13f);
  p = ContractFma(p, r, Broadcast(0x1.6c16c2p-10f));
  p = ContractFma(p, r, Broadcast(0x1.111112p-7f));
  p = ContractFma(p, r, Broadcast(0x1.555556p-5f));
  p = ContractFma(p, r, Broadcast(0x1.555556p-3f));
  p = ContractFma(p, r, Broadcast(0.5f));
  p = ContractFma(p, r, Broadcast(1.0f));
  p = ContractFma(p, r, Broadcast(1.0f));
  const Vec y = Mul(p, AddExponent(Broadcast(1.0f), shifted));
  return ZeroWhereLess(y, x, Broadcast(-0x1.5d589ep+6f));  // ln 2^-126
}

// Replaces the scores of positions [begin, end) by weights e^(score - largest score), and returns
// the largest score and the sum of the weights. The score of position p is at lanes[p -
// first_position]. The function processes whole vectors; lanes of positions outside of [begin, end)
// may hold any value on entry.
inline void Exponentials(int begin, int end, int first_position, float* lanes, float* largest,
                         float* sum) {
  const int skip = begin - first_position;
  const int visible = end - first_position;
  const int from = skip / 16 * 16;
  const int to = (visible + 15) / 16 * 16;
  for (int i = from; i < skip; ++i) lanes[i] = -__builtin_inff();
  for (int i = visible; i < to; ++i) lanes[i] = -__builtin_inff();
  float lane[16];
  Vec most = Broadcast(-__builtin_inff());
  for (int i = from; i < to; i += 16) most = Max(Load(lanes + i), most);
  Store(lane, most);
  const float maximum = LargestLane(lane);
  Vec total = Zero();
  for (int i = from; i < to; i += 16) {
    const Vec weight = ExpOfNegative(Sub(Load(lanes + i), Broadcast(maximum)));
    Store(lanes + i, weight);
    total = Add(total, weight);
  }
  Store(lane, total);
  *largest = maximum;
  *sum = LaneTotal(lane);
}

// Copies the values of pages [first, last) from the keys, whose first elements they are, to
// the layout of cached values.
template <KvCacheType kType>
void CopyLatentValues(const AttentionTileArgs& a, int first, int last) {
  constexpr int kBytes = kLineBytes<kType> / 16;
  using Element =
      std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
  for (int block = first; block < last; ++block) {
    const char* from = a.keys + a.page_table[block] * a.key_page_bytes;
    char* to = a.latent_values + block % (kAttentionBlock / 16) * a.value_page_bytes;
    __builtin_memcpy(to, from, kScaleBytes<kType>);
    const Element* in = reinterpret_cast<const Element*>(from + kScaleBytes<kType>);
    Element* out = reinterpret_cast<Element*>(to + kScaleBytes<kType>);
    for (int d = 0; d < a.padded_dim; d += 16) {
      for (int p = 0; p < 16; ++p) {
        for (int i = 0; i < 16; ++i) {
          out[p * a.padded_dim + d + i] = d + i < a.value_dim ? in[(d + i) * 16 + p] : Element{0};
        }
      }
    }
  }
}

// Makes the zeros of the sums positive.
inline void PositiveZeros(const AttentionTileArgs& a) {
  for (int64_t i = 0; i < int64_t{a.rows} * a.padded_dim; i += 16) {
    Store(a.sums + i, Add(Load(a.sums + i), Zero()));
  }
}

// Computes one tile. `R` is a number of rows of at least a.rows; the padding rows repeat the first
// query and get weight 0.
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

  if (a.latent_values != nullptr) CopyLatentValues<kType>(a, first, last);

  float* weights = a.scratch;
  if constexpr (kInPairs<kType>) {
    const Bf16* queries[R];
    RoundQueries(a, a.rounded_queries, queries);
    ScoreRows<kType, R>(a, queries, first, last, weights);
  } else {
    const float* queries[R];
    for (int r = 0; r < R; ++r) queries[r] = a.queries[r < a.rows ? r : 0];
    ScoreRows<kType, R>(a, queries, first, last, weights);
  }
  for (int r = 0; r < a.rows; ++r) {
    float* lanes = weights + r * kAttentionLanes;
    if (a.soft_cap > 0.0f) SoftCapValues(a.soft_cap, lanes, (last - first) * 16);
    if (a.bias != nullptr) {
      AddBiases(a.bias[r], a.bias_distances, a.position[r], begin[r], end[r],
                lanes + begin[r] - first * 16);
    }
    Exponentials(begin[r], end[r], first * 16, lanes, &a.largest[r], &a.total[r]);
    if constexpr (kType == KvCacheType::kInt8) {
      // The scales of the values are multiplied in after `total` was summed, because `total` must
      // be the sum of the weights without scales.
      for (int block = begin[r] / 16; block < (end[r] + 15) / 16; ++block) {
        const float* scale = reinterpret_cast<const float*>(ValuesOf(a, block));
        float* lane = lanes + (block - first) * 16;
        Store(lane, Multiply(Load(lane), Load(scale)));
      }
    }
    if constexpr (kInPairs<kType>) RoundWeights(lanes, (last - first) * 16);
  }
  for (int r = a.rows; r < R; ++r) {
    for (int i = 0; i < (last - first) * 16; ++i) weights[r * kAttentionLanes + i] = 0.0f;
  }

  for (int64_t i = 0; i < static_cast<int64_t>(R) * a.padded_dim; ++i) a.sums[i] = 0.0f;
  // Positions that all rows see are added for all rows at once. Each other position is added only
  // for the rows that see it. Adding it with weight 0 to the remaining rows would change their
  // results: the value may be NaN, and -0 + 0 is +0.
  // Where the rows begin or end apart, the common positions are whole pairs or steps.
  constexpr int kUnit = !kInPairs<kType> ? 1 : kHasMatrixUnit ? 32 : 2;
  const int last_begin = begin[a.rows - 1], first_end = end[0];
  const int common_begin =
      begin[0] == last_begin ? last_begin : (last_begin + kUnit - 1) / kUnit * kUnit;
  const int least_end = end[a.rows - 1] == first_end ? first_end : first_end / kUnit * kUnit;
  const int common_end = least_end > common_begin ? least_end : common_begin;
  for (int r = 0; R > 1 && r < a.rows; ++r) {
    const int stop = end[r] < common_begin ? end[r] : common_begin;
    SumRows<kType, 1>(a, weights + r * kAttentionLanes, first * 16, begin[r], stop,
                      a.sums + static_cast<int64_t>(r) * a.padded_dim);
  }
  SumRows<kType, R>(a, weights, first * 16, common_begin, least_end, a.sums);
  for (int r = 0; R > 1 && r < a.rows; ++r) {
    SumRows<kType, 1>(a, weights + r * kAttentionLanes, first * 16, common_end, end[r],
                      a.sums + static_cast<int64_t>(r) * a.padded_dim);
  }
  if constexpr (kHasMatrixUnit && kInPairs<kType>) PositiveZeros(a);
}

template <KvCacheType kType>
void AttentionTileOfType(const AttentionTileArgs& a) {
  if (a.rows == 1) return AttentionTileOf<kType, 1>(a);
  if (a.rows == 2) return AttentionTileOf<kType, 2>(a);
  if constexpr (kAttentionRows > 4) {
    if (a.rows > 4) return AttentionTileOf<kType, kAttentionRows>(a);
  }
  return AttentionTileOf<kType, 4>(a);
}

void VectorAttention(const AttentionTileArgs& a) {
#ifdef MOESERVE_F32_TABLE
  if constexpr (kInPairs<KvCacheType::kBF16>) {
    if (a.type == KvCacheType::kBF16) return AttentionTileOfType<KvCacheType::kBF16>(a);
  }
  MOESERVE_F32_TABLE.attention_tile(a);
#else
  switch (a.type) {
    case KvCacheType::kF32:
      return AttentionTileOfType<KvCacheType::kF32>(a);
    case KvCacheType::kBF16:
      return AttentionTileOfType<KvCacheType::kBF16>(a);
    case KvCacheType::kInt8:
      return AttentionTileOfType<KvCacheType::kInt8>(a);
  }
#endif
}

#ifdef MOESERVE_AMX
// Up to this number of rows, vectors are faster than the matrix unit.
inline constexpr int kVectorRows = 4;

// Returns the arguments of rows [row, row + count) of a tile.
inline AttentionTileArgs RowsOfTile(const AttentionTileArgs& a, int row, int count) {
  AttentionTileArgs some = a;
  some.rows = count;
  some.queries += row;
  some.begin += row;
  some.end += row;
  if (some.bias != nullptr) {
    some.bias += row;
    some.position += row;
  }
  some.largest += row;
  some.total += row;
  some.sums += static_cast<int64_t>(row) * a.padded_dim;
  return some;
}

void MatrixAttention(const AttentionTileArgs& a);  // attention_matrix.inl

void AttentionTile(const AttentionTileArgs& a) {
  if (a.type == KvCacheType::kBF16 && a.rows > kVectorRows) return MatrixAttention(a);
  for (int r = 0; r < a.rows; r += kAttentionRows) {
    const int left = a.rows - r;
    const AttentionTileArgs some = RowsOfTile(a, r, left < kAttentionRows ? left : kAttentionRows);
    VectorAttention(some);
  }
}
#else
void AttentionTile(const AttentionTileArgs& a) { VectorAttention(a); }
#endif

// Computes state = state * e^(M - max(M, m)) + partial * e^(m - max(M, m)), where M and m are the
// largest scores of the state and of the partial result.
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

float InverseWithSink(float largest, float total, float sink) {
  const float highest = largest > sink ? largest : sink;
  const float keep = ContractExp(largest - highest);
  return keep / (total * keep + ContractExp(sink - highest));
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
