// Routing of one row: the same bits in every instruction set. Every sum's order is fixed: products
// in 32 partial sums over groups of 8 elements, then an exchange tree 16, 8, 4, 2, 1; sums over
// selected experts in rank order.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

inline constexpr int kLanes = 32;
inline constexpr int kGroup = 8;

// l + (l ^ 16), then ^ 8 and so on: lane 0 holds the sum in the order every backend uses.
inline float TreeSum(float* lane) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] = lane[l] + lane[l + width];
  }
  return lane[0];
}

float ContractDot(const float* a, const float* b, int64_t n) {
  float lane[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t l = i / kGroup % kLanes;
    lane[l] = __builtin_fmaf(a[i], b[i], lane[l]);
  }
  return TreeSum(lane);
}

// Dots of one vector with the columns of `columns` [n][padded], 16 at a time: each sums as
// ContractDot does.
void ContractDots(const float* columns, const float* x, int64_t n, int count, float* dots) {
  const int64_t padded = (count + kPanel - 1) / kPanel * kPanel;
  for (int first = 0; first < count; first += kPanel) {
    float lane[kLanes][kPanel] = {};
    for (int64_t group = 0; group < n; group += kGroup) {
      float* of_lane = lane[group / kGroup % kLanes];
      float sum[kPanel];
      for (int c = 0; c < kPanel; ++c) sum[c] = of_lane[c];
      const int64_t end = group + kGroup < n ? group + kGroup : n;
      for (int64_t i = group; i < end; ++i) {
        const float* column = columns + i * padded + first;
        for (int c = 0; c < kPanel; ++c) sum[c] = __builtin_fmaf(column[c], x[i], sum[c]);
      }
      for (int c = 0; c < kPanel; ++c) of_lane[c] = sum[c];
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int l = 0; l < width; ++l) {
        for (int c = 0; c < kPanel; ++c) lane[l][c] += lane[l + width][c];
      }
    }
    for (int c = 0; c < kPanel && first + c < count; ++c) dots[first + c] = lane[0][c];
  }
}

// Element j of lane l of every 256 stands at j * 32 + l, so the lanes are adjacent.
void RouterScores(const float* x, const float* weights, int64_t padded, int experts,
                  float* scores) {
  for (int e = 0; e < experts; ++e) {
    const float* w = weights + e * padded;
    float lane[kLanes] = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      for (int l = 0; l < kLanes; ++l) lane[l] = __builtin_fmaf(x[i + l], w[i + l], lane[l]);
    }
    scores[e] = TreeSum(lane);
  }
}

// Sum of n values by the rule of ContractDot.
inline float ContractSum(const float* v, int n) {
  float lane[kLanes] = {};
  for (int i = 0; i < n; ++i) lane[i / kGroup % kLanes] += v[i];
  return TreeSum(lane);
}

// Descending keys order experts by score, ties by lower index; NaN comes last, +0 equals -0.
inline uint64_t SelectionKey(float score, int expert) {
  const uint64_t low = 0xffffffffu - static_cast<uint32_t>(expert);
  if (score != score) return low;
  const uint32_t bits = BitsFromF32(score + 0.0f);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | low;
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
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(top));
}

int RouteRow(const RouteRowArgs& a) {
  const RouteSettings& s = *a.settings;
  const int experts = s.num_experts;
  *a.status = 0;
  float maximum = -__builtin_inff();
  for (int e = 0; e < experts; ++e) {
    a.keys[e] = SelectionKey(a.scores[e], e);
    if (a.scores[e] != a.scores[e]) {
      *a.status = 1;
      a.scores[e] = -__builtin_inff();
    }
    maximum = a.scores[e] > maximum ? a.scores[e] : maximum;
  }
  for (int i = experts / 2 - 1; i >= 0; --i) SiftDown(a.keys, experts, i);

  const bool finite = maximum - maximum == 0.0f;
  if (!finite) *a.status = 2;
  const bool sigmoid = s.gate == RouteSettings::Gate::kSigmoid;
  float total = 1.0f;
  if (finite) {
    for (int e = 0; e < experts; ++e) {
      a.exps[e] =
          sigmoid ? 1.0f / (1.0f + ContractExp(-a.scores[e])) : ContractExp(a.scores[e] - maximum);
    }
    if (!sigmoid) total = ContractSum(a.exps, experts);
  }

  // Ranks in descending key order; a.experts holds them until the final ascending pass.
  int remaining = experts;
  int selected = 0;
  float sum = 0.0f;
  const float threshold = s.p * total;
  while (selected < s.k) {
    const int e = PopExpert(a.keys, &remaining);
    a.experts[selected++] = e;
    if (!finite) {
      if (s.top_p) break;
      continue;
    }
    sum = sum + a.exps[e];
    if (s.top_p && (s.strict ? sum > threshold : sum >= threshold)) break;
  }
  const bool over_selected = s.gate == RouteSettings::Gate::kSoftmaxSelected || s.renormalize;
  const float denominator = over_selected ? sum : total;
  for (int i = 0; i < selected; ++i) {
    const int e = a.experts[i];
    float gate = 0.0f;
    if (finite && denominator != 0.0f) {
      gate = sigmoid && !over_selected ? a.exps[e] : a.exps[e] / denominator;
    }
    a.gates[e] = gate * s.scale;
  }
  // Ascending expert order. Insertion would be quadratic for large top-p sets.
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
