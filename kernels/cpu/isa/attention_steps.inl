// Scores and sums of attention of few rows over a cache in bf16, for instruction sets with a matrix
// unit: vectors compute the bits of attention_matrix.inl. For few rows they are faster, because
// keys and values are multiplied as they are read, without a copy in the unit's layout.
//
// As in the unit, a sum over a step of 32 dimensions or positions adds the products of even and of
// odd elements separately and then both to the total, and subnormal numbers count as zero.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kStepPositions = 32;
inline constexpr int kStepDims = 32;

template <int R, int B>
void ScorePairs(const AttentionTileArgs& a, const Bf16* const* queries, int block, float* scores) {
  {
    const FlushSubnormals flush;
    const char* key[B];
    const char* next[B];
    const Bf16* query[R];
    Vec sum[R][B];
    for (int r = 0; r < R; ++r) query[r] = queries[r];
    for (int b = 0; b < B; ++b) {
      key[b] = a.keys + a.page_table[block + b] * a.key_page_bytes;
      next[b] = Upcoming(a, a.keys, a.key_page_bytes, a.key_head_bytes, block + b, B);
      for (int r = 0; r < R; ++r) sum[r][b] = Zero();
    }
    for (int first = 0; first < a.head_dim; first += kStepDims) {
      const int stop = first + kStepDims < a.head_dim ? first + kStepDims : a.head_dim;
      Vec even[R][B], odd[R][B];
      for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) even[r][b] = odd[r][b] = Zero();
      }
      for (int d = first; d < stop; d += 2) {
        PairLine line[B];
        for (int b = 0; b < B; ++b) {
          __builtin_prefetch(next[b] + d * 32, 0, 3);
          const char* const at = key[b] + d * 32;
          line[b] = {d + 2 <= a.head_dim ? LoadLinePairs(at) : LoadLastLine(at)};
        }
        for (int r = 0; r < R; ++r) {
          const PairLine pair = {BroadcastInt(LoadPair(query[r] + d))};
          for (int b = 0; b < B; ++b) {
            even[r][b] = Fma(pair.Even(), line[b].Even(), even[r][b]);
            odd[r][b] = Fma(pair.Odd(), line[b].Odd(), odd[r][b]);
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) sum[r][b] = Add(sum[r][b], Add(even[r][b], odd[r][b]));
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) Store(scores + r * kAttentionLanes + b * 16, sum[r][b]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) {
      float* const at = scores + r * kAttentionLanes + b * 16;
      Store(at, Multiply(Load(at), Broadcast(a.scale)));
    }
  }
}

// Columns of a row of values, and sums in the same order: the even ones of 32 columns before the
// odd ones, or 16 columns as they are.
template <int V>
struct ValueColumns {
  static_assert(V == 1 || V % 2 == 0);
  Vec v[V];

  static ValueColumns Of(const char* p) {
    ValueColumns out;
    if constexpr (V == 1) {
      out.v[0] = LoadBf16(p);
    } else {
      for (int i = 0; i < V; i += 2) {
        const PairLine line = LoadPairs(p + i * 32);
        out.v[i] = line.Even();
        out.v[i + 1] = line.Odd();
      }
    }
    return out;
  }
  // Adds the columns, in their usual order, to 16 V sums.
  void AddTo(float* sums) const {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    if constexpr (V == 1) {
      Store(sums, Add(Load(sums), v[0]));
    } else {
      for (int i = 0; i < V; i += 2) {
        float* const at = sums + i * 16;
        const Vec first = _mm512_permutex2var_ps(v[i], low, v[i + 1]);
        const Vec second = _mm512_permutex2var_ps(v[i], high, v[i + 1]);
        Store(at, Add(Load(at), first));
        Store(at + 16, Add(Load(at + 16), second));
      }
    }
  }
};

// Adds the weighted values of positions [begin, end), which are in one step, to the sums.
template <int R, int V>
inline void SumStep(const AttentionTileArgs& a, const Bf16* weights, int first_position, int begin,
                    int end, int column, float* sums) {
  const int64_t row_bytes = static_cast<int64_t>(a.padded_dim) * 2;
  ValueColumns<V> part[2][R];  // of even and of odd positions
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) part[0][r].v[v] = part[1][r].v[v] = Zero();
  }
  const auto add = [&](auto odd, const char* value, const char* next, const PairLine* pairs) {
    constexpr int kOdd = decltype(odd)::value;
    for (int v = 0; v < V; v += 2) __builtin_prefetch(next + v * 32, 0, 3);
    const ValueColumns<V> columns = ValueColumns<V>::Of(value);
    for (int r = 0; r < R; ++r) {
      const Vec weight = kOdd ? pairs[r].Odd() : pairs[r].Even();
      for (int v = 0; v < V; ++v) {
        part[kOdd][r].v[v] = Fma(weight, columns.v[v], part[kOdd][r].v[v]);
      }
    }
  };
  for (int position = begin & ~1; position < end;) {
    const int block = position / 16;
    const int stop = (block + 1) * 16 < end ? (block + 1) * 16 : end;
    const int64_t offset = (position - block * 16) * row_bytes + int64_t{column} * 2;
    const char* const values = ValuesOf(a, block);
    const char* value = values + offset;
    const char* next = (a.latent_values != nullptr ? values
                                                   : Upcoming(a, a.values, a.value_page_bytes,
                                                              a.value_head_bytes, block, 1)) +
                       offset;
    for (; position < stop; position += 2, value += 2 * row_bytes, next += 2 * row_bytes) {
      PairLine pairs[R];
      for (int r = 0; r < R; ++r) {
        const Bf16* const weight = weights + r * kAttentionLanes * 2 + (position - first_position);
        pairs[r] = {BroadcastInt(LoadPair(weight))};
      }
      if (position >= begin) add(Index<0>(), value, next, pairs);
      if (position + 1 < end) add(Index<1>(), value + row_bytes, next + row_bytes, pairs);
    }
  }
  for (int r = 0; r < R; ++r) {
    ValueColumns<V> both;
    for (int v = 0; v < V; ++v) both.v[v] = Add(part[0][r].v[v], part[1][r].v[v]);
    both.AddTo(sums + r * a.padded_dim + column);
  }
}

template <int R, int V>
void SumPairs(const AttentionTileArgs& a, const Bf16* weights, int first_position, int begin,
              int end, int column, float* sums) {
  const FlushSubnormals flush;
  for (int from = begin; from < end;) {
    const int step_end = (from / kStepPositions + 1) * kStepPositions;
    const int to = step_end < end ? step_end : end;
    SumStep<R, V>(a, weights, first_position, from, to, column, sums);
    from = to;
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
