#include "kernels/base/quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

// Compiles a function for AVX2, too, and chooses at run time. The result is the same, because
// nothing is contracted and the order of all sums is written out. The resolver of the choice runs
// before a sanitizer is ready, so the builds with sanitizers do without.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOESERVE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define MOESERVE_WIDE
#endif
// What such a function calls must be a part of it; a function of its own would not use AVX2.
#define MOESERVE_PART inline __attribute__((always_inline))

namespace moeserve {
namespace {

constexpr F16 kNan = 0x7e00;
constexpr float kLargestF16 = 65504.0f;

// Rounds halves away from zero. Unlike std::round, this needs no library call per element.
inline float Nearest(float v) {
  return static_cast<float>(static_cast<int>(v + (v < 0.0f ? -0.5f : 0.5f)));
}

// Returns value * inverse, clamped to [low, high] and rounded; `inverse` is 1 / scale.
inline float Level(float value, float inverse, float low, float high) {
  return Nearest(std::min(std::max(value * inverse, low), high));
}

// kLanes numbers, of as many groups. Every instruction set computes the same.
constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using IntLanes = int32_t __attribute__((vector_size(4 * kLanes)));

MOESERVE_PART Lanes Splat(float v) { return v - Lanes{}; }

// Drops the fractions and clamps the integers that remain, because integers are clamped in fewer
// instructions than other numbers. What is no int32 becomes any integer from `low` to `high`. That
// happens only in groups with weights that are not finite, whose scale becomes NaN, and in groups
// whose weights are all below about 1e-37, which become 0 in any case.
MOESERVE_PART Lanes Clamped(Lanes v, int32_t low, int32_t high) {
  IntLanes level = __builtin_convertvector(v, IntLanes);
  level = level < low ? IntLanes{} + low : level;
  level = level > high ? IntLanes{} + high : level;
  return __builtin_convertvector(level, Lanes);
}

// Returns the largest magnitude of n numbers; infinity or NaN if one of them is not finite. The
// bits of magnitudes are in the order of the numbers, and those of NaN follow.
MOESERVE_WIDE float LargestMagnitude(const float* w, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; ++i) most = std::max(most, std::bit_cast<int32_t>(w[i]) & 0x7fffffff);
  return std::bit_cast<float>(most);
}

// Weights that are fitted together.
constexpr int kAtOnce = kLanes * kSubGroup;
static_assert(QuantGroup(Quantization::kInt4) == kSubGroup);

// kLanes groups of kSubGroup weights that follow each other in a row, one in each lane: groups of
// int4 or subgroups of int4-k.
struct SubGroups {
  // Takes `size` weights, at most kAtOnce. Only the last group may have fewer than kSubGroup.
  SubGroups(const float* weights, int size);

  Lanes w[kSubGroup];  // element i of every group; 0 where there is none
  Lanes count;         // the numbers of weights; kSubGroup where there is no group
  bool full;           // whether every group there is has kSubGroup weights
};

// Turns element c of row r into element r of row c: in blocks of 2 x 2, 4 x 4 and 8 x 8.
MOESERVE_PART void Transpose(Lanes* rows) {
  Lanes two[kLanes], four[kLanes];
  for (int r = 0; r < kLanes; r += 2) {
    const Lanes a = rows[r], b = rows[r + 1];
    two[r] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    two[r + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (const int r : {0, 1, 4, 5}) {
    const Lanes a = two[r], b = two[r + 2];
    const int to = r % 2 * 2 + r / 4 * 4;
    four[to] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    four[to + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int r = 0; r < kLanes / 2; ++r) {
    const Lanes a = four[r], b = four[r + kLanes / 2];
    rows[r] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    rows[r + kLanes / 2] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Returns the first kLanes of n numbers, with zeros behind the last one.
MOESERVE_PART Lanes FirstOf(const float* numbers, int n) {
  Lanes first = {};
  if (n >= kLanes) {
    std::memcpy(&first, numbers, sizeof(first));
  } else {
    for (int l = 0; l < n; ++l) first[l] = numbers[l];
  }
  return first;
}

MOESERVE_WIDE void ReadSubGroups(const float* weights, int count, Lanes* w) {
  for (int part = 0; part < kSubGroup / kLanes; ++part) {
    Lanes* const rows = w + part * kLanes;
    for (int g = 0; g < kLanes; ++g) {
      const int begin = g * kSubGroup + part * kLanes;
      rows[g] = FirstOf(weights + begin, count - begin);
    }
    Transpose(rows);
  }
}

SubGroups::SubGroups(const float* weights, int size)
    : count(Splat(kSubGroup)), full(size % kSubGroup == 0) {
  ReadSubGroups(weights, size, w);
  if (!full) count[size / kSubGroup] = static_cast<float>(size % kSubGroup);
}

// Calls add(i, sums) for all elements and returns the totals. A total is made of kLanes separate
// sums of every eighth element.
template <int kSums, typename Add>
MOESERVE_PART std::array<Lanes, kSums> TotalsOf(const Add& add) {
  std::array<Lanes, kSums> columns[kLanes];
  for (auto& column : columns) {
    const auto l = static_cast<int>(&column - columns);
    std::array<Lanes, kSums> sums;
    for (Lanes& sum : sums) sum = Lanes{};
    for (int part = 0; part < kSubGroup / kLanes; ++part) add(part * kLanes + l, sums);
    for (int s = 0; s < kSums; ++s) column[s] = sums[s];
  }
  std::array<Lanes, kSums> totals;
  for (int s = 0; s < kSums; ++s) {
    totals[s] = ((columns[0][s] + columns[4][s]) + (columns[1][s] + columns[5][s])) +
                ((columns[2][s] + columns[6][s]) + (columns[3][s] + columns[7][s]));
  }
  return totals;
}

// Returns 1 for groups that have element i, else 0.
MOESERVE_PART Lanes Used(const SubGroups& groups, int i) {
  return Splat(static_cast<float>(i)) < groups.count ? Splat(1.0f) : Lanes{};
}

// Returns the scales of int4 groups. Each of several initial scales is tried and yields integers q.
// For given q the best scale is sum(w q) / sum(q q); it lowers the squared error by
// sum(w q)^2 / sum(q q). The function returns the best scale for the q with the largest such gain.
MOESERVE_WIDE void FitScales(const SubGroups& groups, Lanes& scales) {
  const Lanes zero = {};
  Lanes extreme = {};  // the values of largest magnitude
  for (const Lanes& w : groups.w) {
    const Lanes size = w < zero ? -w : w;
    extreme = size > (extreme < zero ? -extreme : extreme) ? w : extreme;
  }
  Lanes best_gain = {};
  scales = extreme == zero ? zero : extreme / -8.0f;
  const Lanes divisor = extreme == zero ? Splat(1.0f) : extreme;
  // `level` is the (unrounded) integer that the extreme value maps to. With level -8 all sixteen
  // integers are used. A level below -8 clips the extreme value in exchange for finer steps; a
  // level closer to 0 or of the opposite sign may fit the other values better.
  for (const float level : {-8.0f, -7.6f, -7.2f, -6.8f, -8.4f, -8.8f, -9.3f, 7.0f, 7.4f, 6.6f}) {
    const Lanes inverse = level / divisor;
    const auto [product, square] =
        TotalsOf<2>([&](int i, auto& sums) __attribute__((always_inline)) {
          const Lanes w = groups.w[i];
          const Lanes wanted = w * inverse;
          const Lanes half = wanted < zero ? Splat(-0.5f) : Splat(0.5f);
          const Lanes q = Clamped(wanted + half, -8, 7);
          sums[0] += w * q;
          sums[1] += q * q;
        });
    const auto better = (square > zero) & (product * product > best_gain * square);
    best_gain = better ? product * product / square : best_gain;
    scales = better ? product / square : scales;
  }
}

// The lines step * q + low for q = 0..15; step >= 0 and low <= 0.
struct Lines {
  Lanes step, low;
};

// Returns the numbers of levels in [0, 15].
MOESERVE_PART Lanes LevelsOf(Lanes w, Lanes inverse, Lanes low) {
  return Clamped((w - low) * inverse + 0.5f, 0, 15);
}

// Returns the line of each subgroup. Each of several initial lines, which clip some of the range in
// exchange for finer steps, yields integers q; of the lines that fit the weights best for their q
// (linear regression), the one with the smallest squared error is returned.
template <bool kFull>
MOESERVE_PART Lines LinesOf(const SubGroups& groups) {
  Lanes low = {}, high = {};
  for (const Lanes& w : groups.w) {
    low = w < low ? w : low;
    high = w > high ? w : high;
  }
  const Lanes zero = {};
  const Lanes count = groups.count;
  const Lanes w1 = TotalsOf<1>([&](int i, auto& sums)
                                   __attribute__((always_inline)) { sums[0] += groups.w[i]; })[0];
  constexpr float kShares[][2] = {{1.0f, 1.0f},   {0.94f, 0.94f}, {0.88f, 0.88f}, {0.82f, 0.82f},
                                  {0.76f, 0.76f}, {1.0f, 0.86f},  {0.86f, 1.0f},  {0.94f, 0.8f},
                                  {0.8f, 0.94f},  {0.88f, 0.76f}, {0.76f, 0.88f}};
  Lines best = {};
  Lanes most = {};  // by how much a line lowers the squared error
  for (const auto& [of_low, of_high] : kShares) {
    Lines line{(high * of_high - low * of_low) / 15.0f, low * of_low};
    line.step = low == high ? Splat(1.0f) : line.step;  // no line is returned for these
    const Lanes inverse = 1.0f / line.step;
    const auto [q1, q2, qw] = TotalsOf<3>([&](int i, auto& sums) __attribute__((always_inline)) {
      const Lanes w = groups.w[i];
      Lanes q = LevelsOf(w, inverse, line.low);
      if constexpr (!kFull) q *= Used(groups, i);
      sums[0] += q;
      sums[1] += q * q;
      sums[2] += q * w;
    });
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

MOESERVE_WIDE void FitLines(const SubGroups& groups, Lines& lines) {
  lines = groups.full ? LinesOf<true>(groups) : LinesOf<false>(groups);
}

// Returns the squared errors of weights that are rounded to the levels of their lines.
template <bool kFull>
MOESERVE_PART Lanes ErrorsOf(const SubGroups& groups, const Lines& line) {
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
  })[0];
}

// The factors of subgroups, and the lines that follow from them.
struct RoundedLines {
  Lines lines;
  Lanes step, minimum;  // integers in [0, 15]
};

// Returns the nearest integers in [0, 15] of numbers that are not negative.
MOESERVE_PART Lanes NearestFactor(Lanes v) {
  return Clamped((v < 15.0f ? v : Splat(15.0f)) + 0.5f, 0, 15);
}

// Returns the best factors near the lines, if d and u are given (QuantizedMatrix).
template <bool kFull>
MOESERVE_PART RoundedLines Rounded(const SubGroups& groups, const Lines& lines, float d, float u) {
  const Lanes zero = {};
  const Lanes step = d == 0.0f ? zero : NearestFactor(lines.step / d);
  const Lanes low = d * u == 0.0f ? zero : NearestFactor(-lines.low / (d * u));
  const float most_minimum = u == 0.0f ? 0.0f : 15.0f;
  RoundedLines best = {};
  Lanes least = Splat(std::numeric_limits<float>::infinity());
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

MOESERVE_WIDE void RoundLines(const SubGroups& groups, const Lines& lines, float d, float u,
                              RoundedLines& rounded) {
  rounded = groups.full ? Rounded<true>(groups, lines, d, u) : Rounded<false>(groups, lines, d, u);
}

// Rounds n weights of one subgroup to the levels of a line.
MOESERVE_WIDE void RoundWeights(const float* weights, int n, float step, float low,
                                int8_t* values) {
  const Lanes inverse = Splat(step > 0.0f ? 1.0f / step : 0.0f);
  int32_t levels[kSubGroup];
  for (int begin = 0; begin < kSubGroup; begin += kLanes) {
    const Lanes w = FirstOf(weights + begin, n - begin);
    const IntLanes own = __builtin_convertvector(LevelsOf(w, inverse, Splat(low)), IntLanes);
    std::memcpy(levels + begin, &own, sizeof(own));
  }
  if (n == kSubGroup) {  // a loop of constant length is compiled to vector instructions
    for (int i = 0; i < kSubGroup; ++i) values[i] = static_cast<int8_t>(levels[i]);
  } else {
    for (int i = 0; i < n; ++i) values[i] = static_cast<int8_t>(levels[i]);
  }
}

// Rounds a group of n finite weights to int4-k.
void QuantizeSubGroups(const float* w, int n, int8_t* values, int8_t* factors, F16* scales) {
  Lines lines[kWholeRow / kAtOnce];
  Lines widest = {};
  for (int begin = 0; begin < n; begin += kAtOnce) {
    Lines& own = lines[begin / kAtOnce];
    FitLines(SubGroups(w + begin, std::min(kAtOnce, n - begin)), own);
    widest.step = own.step > widest.step ? own.step : widest.step;
    widest.low = own.low < widest.low ? own.low : widest.low;
  }
  float step = 0.0f, low = 0.0f;
  for (int g = 0; g < kLanes; ++g) {
    step = std::max(step, widest.step[g]);
    low = std::min(low, widest.low[g]);
  }
  scales[0] = F16FromF32(step / 15.0f);
  const float d = F32FromF16(scales[0]);
  const float u =
      d == 0.0f ? 0.0f
                : std::min(std::ceil(-low / (15.0f * d)), static_cast<float>(kMaxMinimumUnit));
  scales[1] = F16FromF32(u);
  for (int begin = 0; begin < n; begin += kAtOnce) {
    RoundedLines rounded;
    RoundLines(SubGroups(w + begin, std::min(kAtOnce, n - begin)), lines[begin / kAtOnce], d, u,
               rounded);
    for (int g = 0; g < kLanes && begin + g * kSubGroup < n; ++g) {
      const int first = begin + g * kSubGroup;
      factors[first / kSubGroup] = static_cast<int8_t>(static_cast<int>(rounded.step[g]) +
                                                       16 * static_cast<int>(rounded.minimum[g]));
      RoundWeights(w + first, std::min(kSubGroup, n - first), rounded.lines.step[g],
                   rounded.lines.low[g], values + first);
    }
  }
}

}  // namespace

void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales) {
  const int group = QuantGroup(type);
  const float low = static_cast<float>(QuantMin(type));
  const float high = static_cast<float>(QuantMax(type));
  int8_t* const factors = values + row.size();
  Lanes fitted_scales = {};  // of int4 groups
  for (size_t begin = 0; begin < row.size(); begin += static_cast<size_t>(group), ++scales) {
    const int n = static_cast<int>(std::min(row.size() - begin, static_cast<size_t>(group)));
    const float* w = row.data() + begin;
    int8_t* q = values + begin;
    if (type == Quantization::kInt4 && begin % kAtOnce == 0) {
      FitScales(SubGroups(w, static_cast<int>(std::min<size_t>(row.size() - begin, kAtOnce))),
                fitted_scales);
    }
    const float largest = LargestMagnitude(w, n);
    const bool finite = largest <= kLargestF16;
    if (HasSubGroups(type)) {
      int8_t* const own = factors + begin / kSubGroup;
      if (finite) {
        QuantizeSubGroups(w, n, q, own, scales);
      } else {
        std::fill_n(q, n, static_cast<int8_t>(1));
        std::fill_n(own, QuantSubGroups(type, n), static_cast<int8_t>(1));
        scales[0] = kNan;
        scales[1] = 0;
      }
      ++scales;
      continue;
    }
    if (!finite) {
      *scales = kNan;
      std::fill_n(q, n, static_cast<int8_t>(1));
      continue;
    }
    const float fitted = type == Quantization::kInt4 ? fitted_scales[begin / kSubGroup % kLanes]
                                                     : largest / static_cast<float>(QuantMax(type));
    // The integers are computed with the scale after its rounding to f16.
    *scales = F16FromF32(fitted);
    const float scale = F32FromF16(*scales);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int i = 0; i < n; ++i) q[i] = static_cast<int8_t>(Level(w[i], inverse, low, high));
  }
}

void DequantizeRow(Quantization type, const int8_t* values, const F16* scales,
                   std::span<float> row) {
  const auto columns = static_cast<int64_t>(row.size());
  const int64_t group = QuantGroup(type);
  for (int64_t c = 0; c < columns; ++c) {
    const auto value = static_cast<float>(values[c]);
    if (!HasSubGroups(type)) {
      row[static_cast<size_t>(c)] = value * F32FromF16(scales[c / group]);
      continue;
    }
    const auto factors = static_cast<uint8_t>(values[columns + c / kSubGroup]);
    const F16* const own = scales + c / group * 2;
    row[static_cast<size_t>(c)] =
        F32FromF16(own[0]) * (static_cast<float>(factors & 15) * value -
                              F32FromF16(own[1]) * static_cast<float>(factors >> 4));
  }
}

void PackQuantizedRow(Quantization type, int64_t columns, const int8_t* values, uint8_t* bytes) {
  const int64_t packed = (columns + Traits(type).per_byte - 1) / Traits(type).per_byte;
  for (int64_t i = 0; i < packed; ++i) {
    if (Traits(type).per_byte == 1) {
      bytes[i] = static_cast<uint8_t>(values[i]);
    } else {
      const int high = 2 * i + 1 < columns ? values[2 * i + 1] & 15 : 0;
      bytes[i] = static_cast<uint8_t>((values[2 * i] & 15) | high << 4);
    }
  }
  std::memcpy(bytes + packed, values + columns, static_cast<size_t>(QuantSubGroups(type, columns)));
}

void UnpackQuantizedRow(Quantization type, int64_t columns, const uint8_t* bytes, int8_t* values) {
  for (int64_t i = 0; i < columns; ++i) {
    values[i] = static_cast<int8_t>(UnpackedValue(type, bytes, i));
  }
  const auto factors = static_cast<size_t>(QuantSubGroups(type, columns));
  std::memcpy(values + columns,
              bytes + QuantRowBytes(type, columns) - QuantSubGroups(type, columns), factors);
}

}  // namespace moeserve
