// The definitions of RoundingKernels for one instruction set, MOESERVE_ROUNDING, with vectors of
// MOESERVE_ROUNDING_LANES lanes. It uses no function of the standard library: the linker keeps one
// copy of such a function, and that copy could use an instruction set that the processor lacks.

namespace moeserve::rounding::MOESERVE_ROUNDING {
namespace {

// kLanes numbers, of as many groups.
constexpr int kLanes = MOESERVE_ROUNDING_LANES;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using IntLanes = int32_t __attribute__((vector_size(4 * kLanes)));
static_assert(kLanes >= kMinLanes && kLanes <= kMaxLanes);

inline Lanes Splat(float v) { return v - Lanes{}; }

// Drops the fractions and clamps the integers that remain, because integers are clamped in fewer
// instructions than other numbers. What is no int32 becomes any integer from `low` to `high`. That
// happens only in groups with weights that are not finite, whose scale becomes NaN, and in groups
// whose weights are all below about 1e-37, which become 0 in any case.
inline Lanes Clamped(Lanes v, int32_t low, int32_t high) {
  IntLanes level = __builtin_convertvector(v, IntLanes);
  level = level < low ? IntLanes{} + low : level;
  level = level > high ? IntLanes{} + high : level;
  return __builtin_convertvector(level, Lanes);
}

// The bits of magnitudes are in the order of the numbers, and those of NaN follow.
float LargestMagnitude(const float* w, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, w + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  __builtin_memcpy(&largest, &most, 4);
  return largest;
}

void RoundValues(const float* w, int n, float inverse, float low, float high, int8_t* values) {
  for (int i = 0; i < n; ++i) {
    const float v = w[i] * inverse;
    const float above = v < low ? low : v;
    const float clamped = high < above ? high : above;
    values[i] = static_cast<int8_t>(static_cast<int>(clamped + (clamped < 0.0f ? -0.5f : 0.5f)));
  }
}

// kLanes groups of kSubGroup weights, one in each lane: groups of int4 or subgroups of int4-k.
struct SubGroups {
  // Takes `size` weights (RoundingKernels).
  SubGroups(const float* weights, int size);

  Lanes w[kSubGroup];  // element i of every group; 0 where there is none
  Lanes count;         // the numbers of weights; kSubGroup where there is no group
  bool full;           // whether every group there is has kSubGroup weights
};

constexpr int kBlock = 8;
using BlockRow = float __attribute__((vector_size(4 * kBlock)));

// Turns element c of row r into element r of row c: in blocks of 2 x 2, 4 x 4 and 8 x 8.
inline void Transpose(BlockRow* rows) {
  BlockRow two[kBlock], four[kBlock];
  for (int r = 0; r < kBlock; r += 2) {
    const BlockRow a = rows[r], b = rows[r + 1];
    two[r] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    two[r + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  constexpr int kFirst[] = {0, 1, 4, 5};
  for (const int r : kFirst) {
    const BlockRow a = two[r], b = two[r + 2];
    const int to = r % 2 * 2 + r / 4 * 4;
    four[to] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    four[to + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int r = 0; r < kBlock / 2; ++r) {
    const BlockRow a = four[r], b = four[r + kBlock / 2];
    rows[r] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    rows[r + kBlock / 2] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Returns the first elements of n numbers, with zeros behind the last one.
template <typename Vector>
inline Vector FirstOf(const float* numbers, int n) {
  constexpr auto kSize = static_cast<int>(sizeof(Vector) / sizeof(float));
  Vector first = {};
  if (n >= kSize) {
    __builtin_memcpy(&first, numbers, sizeof(first));
  } else {
    for (int l = 0; l < n; ++l) first[l] = numbers[l];
  }
  return first;
}

SubGroups::SubGroups(const float* weights, int size)
    : count(Splat(kSubGroup)), full(size % kSubGroup == 0) {
  for (int part = 0; part < kSubGroup; part += kBlock) {
    for (int group = 0; group < kLanes; group += kBlock) {
      BlockRow rows[kBlock];
      for (int g = 0; g < kBlock; ++g) {
        const int begin = (group + g) * kSubGroup + part;
        rows[g] = FirstOf<BlockRow>(weights + begin, size - begin);
      }
      Transpose(rows);
      for (int i = 0; i < kBlock; ++i) {
        __builtin_memcpy(reinterpret_cast<char*>(w + part + i) + group * 4, rows + i,
                         sizeof(rows[i]));
      }
    }
  }
  if (!full) count[size / kSubGroup] = static_cast<float>(size % kSubGroup);
}

template <int kSums>
struct Totals {
  Lanes of[kSums];
};

// Calls add(i, sums) for all elements and returns the totals. A total is made of eight separate
// sums of every eighth element.
template <int kSums, typename Add>
inline Totals<kSums> TotalsOf(const Add& add) {
  constexpr int kColumns = 8;
  Lanes columns[kColumns][kSums];
  for (int c = 0; c < kColumns; ++c) {
    Lanes sums[kSums];
    for (Lanes& sum : sums) sum = Lanes{};
    for (int i = c; i < kSubGroup; i += kColumns) add(i, sums);
    for (int s = 0; s < kSums; ++s) columns[c][s] = sums[s];
  }
  Totals<kSums> totals;
  for (int s = 0; s < kSums; ++s) {
    totals.of[s] = ((columns[0][s] + columns[4][s]) + (columns[1][s] + columns[5][s])) +
                   ((columns[2][s] + columns[6][s]) + (columns[3][s] + columns[7][s]));
  }
  return totals;
}

// Returns 1 for groups that have element i, else 0.
inline Lanes Used(const SubGroups& groups, int i) {
  return Splat(static_cast<float>(i)) < groups.count ? Splat(1.0f) : Lanes{};
}

// Returns the scales of int4 groups. Each of several initial scales is tried and yields integers q.
// For given q the best scale is sum(w q) / sum(q q); it lowers the squared error by
// sum(w q)^2 / sum(q q). The function returns the best scale for the q with the largest such gain.
Lanes ScalesOf(const SubGroups& groups) {
  const Lanes zero = {};
  Lanes extreme = {};  // the values of largest magnitude
  for (const Lanes& w : groups.w) {
    const Lanes size = w < zero ? -w : w;
    extreme = size > (extreme < zero ? -extreme : extreme) ? w : extreme;
  }
  Lanes best_gain = {};
  Lanes scales = extreme == zero ? zero : extreme / -8.0f;
  const Lanes divisor = extreme == zero ? Splat(1.0f) : extreme;
  // `level` is the (unrounded) integer that the extreme value maps to. With level -8 all sixteen
  // integers are used. A level below -8 clips the extreme value in exchange for finer steps; a
  // level closer to 0 or of the opposite sign may fit the other values better.
  constexpr float kLevels[] = {-8.0f, -7.6f, -7.2f, -6.8f, -8.4f, -8.8f, -9.3f, 7.0f, 7.4f, 6.6f};
  for (const float level : kLevels) {
    const Lanes inverse = level / divisor;
    const auto totals = TotalsOf<2>([&](int i, auto& sums) __attribute__((always_inline)) {
      const Lanes w = groups.w[i];
      const Lanes wanted = w * inverse;
      const Lanes half = wanted < zero ? Splat(-0.5f) : Splat(0.5f);
      const Lanes q = Clamped(wanted + half, -8, 7);
      sums[0] += w * q;
      sums[1] += q * q;
    });
    const Lanes product = totals.of[0], square = totals.of[1];
    const auto better = (square > zero) & (product * product > best_gain * square);
    best_gain = better ? product * product / square : best_gain;
    scales = better ? product / square : scales;
  }
  return scales;
}

void FitScales(const float* w, int n, float* scales) {
  const Lanes own = ScalesOf(SubGroups(w, n));
  __builtin_memcpy(scales, &own, sizeof(own));
}

// As SubGroupLines.
struct Lines {
  Lanes step, low;
};

// Returns the numbers of levels in [0, 15].
inline Lanes LevelsOf(Lanes w, Lanes inverse, Lanes low) {
  return Clamped((w - low) * inverse + 0.5f, 0, 15);
}

// Returns the line of each subgroup. Each of several initial lines, which clip some of the range in
// exchange for finer steps, yields integers q; of the lines that fit the weights best for their q
// (linear regression), the one with the smallest squared error is returned.
template <bool kFull>
inline Lines LinesOf(const SubGroups& groups) {
  Lanes low = {}, high = {};
  for (const Lanes& w : groups.w) {
    low = w < low ? w : low;
    high = w > high ? w : high;
  }
  const Lanes zero = {};
  const Lanes count = groups.count;
  const auto add_weight = [&](int i, auto& sums) __attribute__((always_inline)) {
    sums[0] += groups.w[i];
  };
  const Lanes w1 = TotalsOf<1>(add_weight).of[0];
  constexpr float kShares[][2] = {{1.0f, 1.0f},   {0.94f, 0.94f}, {0.88f, 0.88f}, {0.82f, 0.82f},
                                  {0.76f, 0.76f}, {1.0f, 0.86f},  {0.86f, 1.0f},  {0.94f, 0.8f},
                                  {0.8f, 0.94f},  {0.88f, 0.76f}, {0.76f, 0.88f}};
  Lines best = {};
  Lanes most = {};  // by how much a line lowers the squared error
  for (const auto& share : kShares) {
    const float of_low = share[0], of_high = share[1];
    Lines line{(high * of_high - low * of_low) / 15.0f, low * of_low};
    line.step = low == high ? Splat(1.0f) : line.step;  // no line is returned for these
    const Lanes inverse = 1.0f / line.step;
    const auto totals = TotalsOf<3>([&](int i, auto& sums) __attribute__((always_inline)) {
      const Lanes w = groups.w[i];
      Lanes q = LevelsOf(w, inverse, line.low);
      if constexpr (!kFull) q *= Used(groups, i);
      sums[0] += q;
      sums[1] += q * q;
      sums[2] += q * w;
    });
    const Lanes q1 = totals.of[0], q2 = totals.of[1], qw = totals.of[2];
    const Lanes spread = count * q2 - q1 * q1;
    const Lanes fitted = (count * qw - q1 * w1) / spread;
    line.step = spread > zero ? fitted : line.step;
    // Without a spread and with q = 0, all weights are equal and negative.
    line.low = spread > zero ? (w1 - fitted * q1) / count : w1 / count;
    const auto through_zero = ((spread <= zero) & (q1 != zero)) | (line.low > zero);
    line.low = through_zero ? zero : line.low;
    line.step = through_zero ? (q2 > zero ? qw / q2 : zero) : line.step;
    const Lanes gain = 2.0f * (line.step * qw + line.low * w1) - line.step * line.step * q2 -
                       2.0f * line.step * line.low * q1 - count * line.low * line.low;
    const auto better = (line.step > zero) & (gain > most) & (low != high);
    most = better ? gain : most;
    best.step = better ? line.step : best.step;
    best.low = better ? line.low : best.low;
  }
  return best;
}

void FitLines(const float* w, int n, SubGroupLines* lines) {
  const SubGroups groups(w, n);
  const Lines own = groups.full ? LinesOf<true>(groups) : LinesOf<false>(groups);
  __builtin_memcpy(lines->step, &own.step, sizeof(own.step));
  __builtin_memcpy(lines->low, &own.low, sizeof(own.low));
}

// Returns the squared errors of weights that are rounded to the levels of their lines.
template <bool kFull>
inline Lanes ErrorsOf(const SubGroups& groups, const Lines& line) {
  const Lanes zero = {};
  const Lanes inverse = line.step > zero ? 1.0f / line.step : zero;
  return TotalsOf<1>([&](int i, auto& sums) __attribute__((always_inline)) {
    const Lanes w = groups.w[i];
    const Lanes rest = line.step * LevelsOf(w, inverse, line.low) + line.low - w;
    if constexpr (kFull) {
      sums[0] += rest * rest;
    } else {
      sums[0] += rest * rest * Used(groups, i);
    }
  }).of[0];
}

// The factors of subgroups, and the lines that follow from them.
struct RoundedLines {
  Lines lines;
  Lanes step, minimum;  // integers in [0, 15]
};

// Returns the nearest integers in [0, 15] of numbers that are not negative.
inline Lanes NearestFactor(Lanes v) {
  return Clamped((v < 15.0f ? v : Splat(15.0f)) + 0.5f, 0, 15);
}

// Returns the best factors near the lines, if d and u are given (QuantizedMatrix).
template <bool kFull>
inline RoundedLines Rounded(const SubGroups& groups, const Lines& lines, float d, float u) {
  const Lanes zero = {};
  const Lanes step = d == 0.0f ? zero : NearestFactor(lines.step / d);
  const Lanes low = d * u == 0.0f ? zero : NearestFactor(-lines.low / (d * u));
  const float most_minimum = u == 0.0f ? 0.0f : 15.0f;
  RoundedLines best = {};
  Lanes least = Splat(__builtin_inff());
  for (float s_change = -1.0f; s_change <= 1.0f; ++s_change) {
    for (float m_change = -1.0f; m_change <= 1.0f; ++m_change) {
      const Lanes s = step + s_change, m = low + m_change;
      const Lines rounded{d * s, -d * u * m};
      const Lanes error = ErrorsOf<kFull>(groups, rounded);
      const auto better =
          (error < least) & (s >= zero) & (s <= 15.0f) & (m >= zero) & (m <= most_minimum);
      least = better ? error : least;
      best.step = better ? s : best.step;
      best.minimum = better ? m : best.minimum;
      best.lines.step = better ? rounded.step : best.lines.step;
      best.lines.low = better ? rounded.low : best.lines.low;
    }
  }
  return best;
}

// Rounds n weights of one subgroup to the levels of a line.
void RoundWeights(const float* weights, int n, float step, float low, int8_t* values) {
  const Lanes inverse = Splat(step > 0.0f ? 1.0f / step : 0.0f);
  int32_t levels[kSubGroup];
  for (int begin = 0; begin < kSubGroup; begin += kLanes) {
    const Lanes w = FirstOf<Lanes>(weights + begin, n - begin);
    const IntLanes own = __builtin_convertvector(LevelsOf(w, inverse, Splat(low)), IntLanes);
    __builtin_memcpy(levels + begin, &own, sizeof(own));
  }
  if (n == kSubGroup) {  // a loop of constant length is compiled to vector instructions
    for (int i = 0; i < kSubGroup; ++i) values[i] = static_cast<int8_t>(levels[i]);
  } else {
    for (int i = 0; i < n; ++i) values[i] = static_cast<int8_t>(levels[i]);
  }
}

void RoundLines(const float* w, int n, const SubGroupLines& lines, float d, float u, int8_t* values,
                int8_t* factors) {
  const SubGroups groups(w, n);
  Lines own;
  __builtin_memcpy(&own.step, lines.step, sizeof(own.step));
  __builtin_memcpy(&own.low, lines.low, sizeof(own.low));
  const RoundedLines rounded =
      groups.full ? Rounded<true>(groups, own, d, u) : Rounded<false>(groups, own, d, u);
  for (int g = 0; g * kSubGroup < n; ++g) {
    const int first = g * kSubGroup;
    factors[g] = static_cast<int8_t>(static_cast<int>(rounded.step[g]) +
                                     16 * static_cast<int>(rounded.minimum[g]));
    RoundWeights(w + first, n - first < kSubGroup ? n - first : kSubGroup, rounded.lines.step[g],
                 rounded.lines.low[g], values + first);
  }
}

constexpr RoundingKernels MakeKernels(const char* name) {
  return {.name = name,
          .lanes = kLanes,
          .largest_magnitude = &LargestMagnitude,
          .round_values = &RoundValues,
          .fit_scales = &FitScales,
          .fit_lines = &FitLines,
          .round_lines = &RoundLines};
}

}  // namespace
}  // namespace moeserve::rounding::MOESERVE_ROUNDING
