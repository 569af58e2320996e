// Routing of one row with the arithmetic of kernels/base/routing.h: the results have the same bits
// in every instruction set.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// Sums that are computed at once: they fit into registers, and they are enough that no multiply-add
// waits for the one before it.
inline constexpr int kDotChains = kPanelTile == 4 ? 8 : 4;
// Rows that share the loads of the vectors.
inline constexpr int kDotRows = kDotChains / 2;

// Adds G groups of elements, `count` of each, to the lanes [R][P] of R rows and P panels. The
// groups belong to different lanes, so their sums do not depend on each other.
template <int R, int P, int G>
inline void AddGroups(const float* columns, const float* const* x, int64_t n, int64_t group,
                      int64_t count, float (&lane)[kRoutingLanes][R * P * kPanel]) {
  const int64_t first_lane = group % kRoutingLanes;
  Vec sum[G][R][P];
  const auto for_sums = [&](const auto& f) {
    Unrolled<G>(
        [&](auto g) { Unrolled<R>([&](auto r) { Unrolled<P>([&](auto p) { f(g, r, p); }); }); });
  };
  for_sums([&](auto g, auto r, auto p) {
    sum[g][r][p] =
        group < kRoutingLanes ? Zero() : Load(lane[first_lane + g] + (r * P + p) * kPanel);
  });
  for (int64_t j = 0; j < count; ++j) {
    Unrolled<G>([&](auto g) {
      const int64_t i = (group + g) * kRoutingGroup + j;
      Unrolled<P>([&](auto p) {
        const Vec weight = Load(columns + (p * n + i) * kPanel);
        Unrolled<R>(
            [&](auto r) { sum[g][r][p] = ContractFma(weight, Broadcast(x[r][i]), sum[g][r][p]); });
      });
    });
  }
  for_sums([&](auto g, auto r, auto p) {
    Store(lane[first_lane + g] + (r * P + p) * kPanel, sum[g][r][p]);
  });
}

// Computes the dot products of R rows with the vectors of P panels, each in the order of
// ContractDot().
template <int R, int P>
inline void PanelDots(const float* columns, const float* const* x, int64_t n, Vec (&dots)[R][P]) {
  constexpr int kGroups = kDotChains / (R * P);
  static_assert(kRoutingLanes % kGroups == 0);
  alignas(64) float lane[kRoutingLanes][R * P * kPanel];
  int64_t group = 0;
  for (; (group + kGroups) * kRoutingGroup <= n; group += kGroups) {
    AddGroups<R, P, kGroups>(columns, x, n, group, kRoutingGroup, lane);
  }
  for (; group * kRoutingGroup < n; ++group) {
    const int64_t left = n - group * kRoutingGroup;
    AddGroups<R, P, 1>(columns, x, n, group, left < kRoutingGroup ? left : kRoutingGroup, lane);
  }
  const int64_t used = group < kRoutingLanes ? group : kRoutingLanes;
  // Adds the lanes as a tree. Lanes without products count as +0 and are skipped: adding +0 changes
  // no value except -0, and the addition of Zero() below makes that change.
  for (int width = kRoutingLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width && l + width < used; ++l) {
      for (int p = 0; p < R * P * kPanel; p += kPanel) {
        Store(lane[l] + p, Add(Load(lane[l] + p), Load(lane[l + width] + p)));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      dots[r][p] = used == 0 ? Zero() : Load(lane[0] + (r * P + p) * kPanel);
      if (used < kRoutingLanes) dots[r][p] = Add(dots[r][p], Zero());
    }
  }
}

// Computes the products with the vectors [first, first + P * kPanel), of which there are `count`.
template <int R, int P>
inline void StoreDots(const float* columns, const float* const* x, int64_t n, int count, int first,
                      float* const* dots) {
  Vec of_panel[R][P];
  PanelDots(columns + first * n, x, n, of_panel);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const int at = first + p * kPanel;
      if (at + kPanel <= count) {
        Store(dots[r] + at, of_panel[r][p]);
        continue;
      }
      alignas(64) float some[kPanel];
      Store(some, of_panel[r][p]);
      for (int c = 0; at + c < count; ++c) dots[r][at + c] = some[c];
    }
  }
}

template <int R>
void RowDots(const float* columns, const float* const* x, int64_t n, int count,
             float* const* dots) {
  constexpr int kWide = kDotChains / R;  // panels
  int first = 0;
  for (; count - first > (kWide - 1) * kPanel; first += kWide * kPanel) {
    StoreDots<R, kWide>(columns, x, n, count, first, dots);
  }
  if constexpr (kWide > 4) {
    for (; count - first > 3 * kPanel; first += 4 * kPanel) {
      StoreDots<R, 4>(columns, x, n, count, first, dots);
    }
  }
  if constexpr (kWide > 2) {
    for (; count - first > kPanel; first += 2 * kPanel) {
      StoreDots<R, 2>(columns, x, n, count, first, dots);
    }
  }
  if (first < count) StoreDots<R, 1>(columns, x, n, count, first, dots);
}

void ContractDots(const float* columns, const float* const* x, int rows, int64_t n, int count,
                  float* const* dots) {
  int r = 0;
  for (; r + kDotRows <= rows; r += kDotRows) {
    RowDots<kDotRows>(columns, x + r, n, count, dots + r);
  }
  for (; r < rows; ++r) RowDots<1>(columns, x + r, n, count, dots + r);
}

// Returns the largest of n values, none of which is NaN.
inline float LargestOf(const float* v, int n) {
  Vec of_lanes = Broadcast(-__builtin_inff());
  int i = 0;
  for (; i + kPanel <= n; i += kPanel) of_lanes = Max(Load(v + i), of_lanes);
  float largest = MaxOfLanes(of_lanes);
  for (; i < n; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

inline void SiftDown(uint64_t* heap, int n, int i) {
  const uint64_t value = heap[i];
  for (int child = 2 * i + 1; child < n; child = 2 * i + 1) {
    if (child + 1 < n && heap[child + 1] > heap[child]) ++child;
    if (heap[child] <= value) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = value;
}

inline int PopExpert(uint64_t* heap, int* n) {
  const uint64_t top = heap[0];
  heap[0] = heap[--*n];
  if (*n > 0) SiftDown(heap, *n, 0);
  return ExpertOfKey(top);
}

// Up to this many experts are selected by one scan over all keys per expert; more are selected with
// a heap.
inline constexpr int kScannedExperts = 8;

// Returns the expert with the largest key and sets its key to 0. keys[e] must be the key of expert
// e.
inline int TakeLargest(uint64_t* keys, int n) {
  uint64_t largest = 0;
  for (int i = 0; i < n; ++i) largest = keys[i] > largest ? keys[i] : largest;
  const int e = ExpertOfKey(largest);
  keys[e] = 0;
  return e;
}

inline void SortFew(int32_t* values, int n) {
  for (int i = 1; i < n; ++i) {
    const int32_t v = values[i];
    int j = i;
    for (; j > 0 && values[j - 1] > v; --j) values[j] = values[j - 1];
    values[j] = v;
  }
}

// Replaces the keys, which rank the experts by score, by keys that rank them by choice value.
// `total` is the sum of the gate values if NeedsTotal() is true.
void RankByChoice(const RouteRowArgs& a, float total) {
  const RouteSettings& s = *a.settings;
  const int experts = s.num_experts;
  for (int e = 0; e < experts; ++e) {
    const float bias = a.choice_bias == nullptr ? 0.0f : a.choice_bias[e];
    a.orders[e] = OrderOfChoice(a.scores[e], ChoiceValue(s, a.values[e], total, bias));
  }
  if (s.best_groups < s.groups) {
    uint64_t keys[kMaxExpertGroups];
    for (int g = 0; g < s.groups; ++g) keys[g] = GroupKey(s, a.orders, g);
    const uint32_t masked = OrderOfScore(MaskedChoice(s.group_mask));
    const int size = experts / s.groups;
    for (int g = 0; g < s.groups; ++g) {
      int better = 0;
      for (int other = 0; other < s.groups; ++other) better += keys[other] > keys[g];
      if (better < s.best_groups) continue;
      for (int e = g * size; e < (g + 1) * size; ++e) a.orders[e] = a.orders[e] == 0 ? 0 : masked;
    }
  }
  for (int e = 0; e < experts; ++e) a.keys[e] = SelectionKey(a.orders[e], e);
}

// Changes the keys of the experts that the table lists.
void RankByTable(const RouteRowArgs& a) {
  for (int i = 0; i < a.settings->k; ++i) {
    uint64_t& key = a.keys[a.listed[i]];
    key = SelectionKey(OrderInTable(static_cast<uint32_t>(key >> 32), i), a.listed[i]);
  }
}

// Returns the weight of a selected expert with the gate kSparseMixer. Overwrites the gate values.
float MixerWeight(const RouteRowArgs& a, int expert) {
  const RouteSettings& s = *a.settings;
  MixerValues(s, a.scores, expert, a.values);
  return MixerGate(a.scores[expert], ContractSum(a.values, s.num_experts), s.scale);
}

int RouteRow(const RouteRowArgs& a) {
  const RouteSettings& s = *a.settings;
  const RowSelection& row = a.selection;
  const int experts = s.num_experts;
  *a.status = 0;
  int nan = 0;
  for (int e = 0; e < experts; ++e) {
    const float score = a.scores[e];
    a.keys[e] = SelectionKey(OrderOfScore(score), e);
    nan |= score != score;
    a.scores[e] = score != score ? -__builtin_inff() : score;
  }
  const float maximum = LargestOf(a.scores, experts);
  if (nan != 0) *a.status = 1;
  const bool finite = maximum - maximum == 0.0f;
  if (!finite) *a.status = 2;
  float total = 1.0f;
  if (finite) {
    GateValues(s.gate, a.scores, experts, maximum, a.values);
    if (NeedsTotal(s, row)) total = ContractSum(a.values, experts);
    if (RanksByChoice(s)) RankByChoice(a, total);
    if (row.kind == SelectKind::kTable) RankByTable(a);
  }
  const bool scanned = row.k <= kScannedExperts;
  if (!scanned) {
    for (int i = experts / 2 - 1; i >= 0; --i) SiftDown(a.keys, experts, i);
  }

  // Selects experts in descending order of keys. a.experts has that order until it is sorted below.
  int remaining = experts;
  int selected = 0;
  float sum = 0.0f;
  const float threshold = row.p * total;
  const int most = finite ? row.k : CountWithoutScores(row);
  while (selected < most) {
    const int e = scanned ? TakeLargest(a.keys, experts) : PopExpert(a.keys, &remaining);
    a.experts[selected++] = e;
    if (!finite) continue;
    sum = sum + a.values[e];
    if (EndsSelection(row, sum, threshold)) break;
  }
  const float divisor = DivisorValue(DivisorOf(s), total, sum);
  for (int i = 0; i < selected; ++i) {
    const int e = a.experts[i];
    a.gates[e] = finite && DivisorOf(s) == GateDivisor::kNear
                     ? MixerWeight(a, e)
                     : FinalGate(finite ? a.values[e] : 0.0f, divisor, s.scale);
    if (finite && a.expert_scale != nullptr) a.gates[e] *= a.expert_scale[e];
  }
  // Sorts the selected experts in ascending order.
  if (scanned) {
    SortFew(a.experts, selected);
    for (int i = 0; i < selected; ++i) a.weights[i] = a.gates[a.experts[i]];
    return selected;
  }
  for (int i = 0; i < experts; ++i) a.keys[i] = 0;
  for (int i = 0; i < selected; ++i) a.keys[a.experts[i]] = 1;
  int out = 0;
  for (int e = 0; e < experts; ++e) {
    if (a.keys[e] == 0) continue;
    a.experts[out] = e;
    a.weights[out] = a.gates[e];
    ++out;
  }
  return selected;
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
