// Scores and sums of attention over a cache in bf16, with instructions for products of pairs. Scores
// are summed over pairs of dimensions in ascending order, and weighted values over pairs of
// positions (2 i, 2 i + 1). If a row sees only one position of a pair, the other one counts as a
// value 0.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

template <int R, int B>
void ScorePairs(const AttentionTileArgs& a, const Bf16* const* queries, int block, float* scores) {
  const char* key[B];
  const char* next[B];
  const Bf16* query[R];
  Vec acc[R][B];
  for (int r = 0; r < R; ++r) query[r] = queries[r];
  for (int b = 0; b < B; ++b) {
    key[b] = a.keys + a.page_table[block + b] * a.key_page_bytes;
    next[b] = Upcoming(a, a.keys, a.key_page_bytes, a.key_head_bytes, block + b, B);
    for (int r = 0; r < R; ++r) acc[r][b] = Zero();
  }
  int d = 0;
  for (; d + 2 <= a.head_dim; d += 2) {
    PairVec pairs[B];
    for (int b = 0; b < B; ++b) {
      __builtin_prefetch(next[b] + d * 32, 0, 3);
      pairs[b] = LoadLinePairs(key[b] + d * 32);
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) acc[r][b] = AddPairs(acc[r][b], pairs[b], LoadPair(query[r] + d));
    }
  }
  if (d < a.head_dim) {
    for (int b = 0; b < B; ++b) {
      const PairVec pairs = LoadLastLine(key[b] + d * 32);
      for (int r = 0; r < R; ++r) acc[r][b] = AddPairs(acc[r][b], pairs, LoadPair(query[r] + d));
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) {
      Store(scores + r * kAttentionLanes + b * 16, Multiply(acc[r][b], Broadcast(a.scale)));
    }
  }
}

template <int R, int V>
void SumPairs(const AttentionTileArgs& a, const Bf16* weights, int first_position, int begin,
              int end, int column, float* sums) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = Load(sums + r * a.padded_dim + column + v * 16);
  }
  const int64_t row_bytes = static_cast<int64_t>(a.padded_dim) * 2;
  for (int position = begin & ~1; position < end;) {
    const int block = position / 16;
    const int stop = (block + 1) * 16 < end ? (block + 1) * 16 : end;
    const char* const values = ValuesOf(a, block);
    const int64_t offset = (position - block * 16) * row_bytes + int64_t{column} * 2;
    const char* value = values + offset;
    const char* next = (a.latent_values != nullptr ? values
                                                   : Upcoming(a, a.values, a.value_page_bytes,
                                                              a.value_head_bytes, block, 1)) +
                       offset;
    for (; position < stop; position += 2, value += 2 * row_bytes, next += 2 * row_bytes) {
      for (int v = 0; v < V; v += 2) {
        __builtin_prefetch(next + v * 32, 0, 3);
        __builtin_prefetch(next + row_bytes + v * 32, 0, 3);
      }
      PairVec pairs[V];
      if (position >= begin && position + 2 <= end) {
        LoadRowPairs<V>(value, value + row_bytes, true, true, pairs);
      } else {
        LoadRowPairs<V>(value, value + row_bytes, position >= begin, position + 2 <= end, pairs);
      }
      for (int r = 0; r < R; ++r) {
        const Bf16* const weight = weights + r * kAttentionLanes * 2 + (position - first_position);
        for (int v = 0; v < V; ++v) acc[r][v] = AddPairs(acc[r][v], pairs[v], LoadPair(weight));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) Store(sums + r * a.padded_dim + column + v * 16, acc[r][v]);
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
