#include "kernels/base/quantize.h"

#include <algorithm>
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

// kLanes numbers. The sums below are made of kLanes separate sums, so that every instruction set
// computes the same.
constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using IntLanes = int32_t __attribute__((vector_size(4 * kLanes)));

inline Lanes Splat(float v) { return v - Lanes{}; }
inline Lanes Truncated(Lanes v) {
  return __builtin_convertvector(__builtin_convertvector(v, IntLanes), Lanes);
}
inline Lanes Clamped(Lanes v, float low, float high) {
  const Lanes least = Splat(low), most = Splat(high);
  v = v < least ? least : v;
  return v > most ? most : v;
}
inline float Total(Lanes v) {
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// Up to 32 weights, with zeros behind the last one.
struct SubGroup {
  static constexpr int kParts = kSubGroup / kLanes;

  SubGroup(const float* weights, int count) : n(count) {
    float values[kSubGroup] = {}, ones[kSubGroup] = {};
    std::copy_n(weights, count, values);
    std::fill_n(ones, count, 1.0f);
    std::memcpy(w, values, sizeof(w));
    std::memcpy(used, ones, sizeof(used));
  }
  Lanes w[kParts];
  Lanes used[kParts];  // 1 for a weight, 0 behind the end
  int n;
};

// Returns the scale of one int4 group. Each of several initial scales is tried and yields integers
// q. For given q the best scale is sum(w q) / sum(q q); it lowers the squared error by
// sum(w q)^2 / sum(q q). The function returns the best scale for the q with the largest such gain.
MOESERVE_WIDE float Int4Scale(const SubGroup& group) {
  float extreme = 0.0f;  // the value of largest magnitude
  for (const Lanes& part : group.w) {
    for (int l = 0; l < kLanes; ++l) {
      if (std::fabs(part[l]) > std::fabs(extreme)) extreme = part[l];
    }
  }
  if (extreme == 0.0f) return 0.0f;
  float best_gain = 0.0f;
  float best = extreme / -8.0f;
  // `level` is the (unrounded) integer that the extreme value maps to. With level -8 all sixteen
  // integers are used. A level below -8 clips the extreme value in exchange for finer steps; a
  // level closer to 0 or of the opposite sign may fit the other values better.
  for (const float level : {-8.0f, -7.6f, -7.2f, -6.8f, -8.4f, -8.8f, -9.3f, 7.0f, 7.4f, 6.6f}) {
    const float inverse = level / extreme;
    Lanes products = {}, squares = {};
    for (const Lanes& w : group.w) {
      const Lanes level_of = Clamped(w * inverse, -8.0f, 7.0f);
      const Lanes half = level_of < Lanes{} ? Splat(-0.5f) : Splat(0.5f);
      const Lanes q = Truncated(level_of + half);
      products += w * q;
      squares += q * q;
    }
    const float product = Total(products), square = Total(squares);
    if (square > 0.0f && product * product > best_gain * square) {
      best_gain = product * product / square;
      best = product / square;
    }
  }
  return best;
}

// Returns the scale of a group of n finite values whose largest magnitude is `largest`.
float GroupScale(Quantization type, const float* w, int n, float largest) {
  switch (type) {
    case Quantization::kNone:
    case Quantization::kInt4K:
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return largest / static_cast<float>(QuantMax(type));
    case Quantization::kInt4:
      return Int4Scale(SubGroup(w, n));
  }
  return 0.0f;
}

// The line step * q + low for q = 0..15; step >= 0 and low <= 0.
struct Line {
  float step = 0.0f;
  float low = 0.0f;
};

// Returns the numbers of levels in [0, 15].
inline Lanes LevelsOf(Lanes w, float inverse, float low) {
  return Truncated(Clamped((w - low) * inverse, 0.0f, 15.0f) + 0.5f);
}

// Returns the line for the weights. Each of several initial lines, which clip some of the range in
// exchange for finer steps, yields integers q; of the lines that fit the weights best for their q
// (linear regression), the one with the smallest squared error is returned.
MOESERVE_WIDE Line FitLine(const SubGroup& group) {
  Lanes least = {}, largest = {};
  for (const Lanes& w : group.w) {
    least = w < least ? w : least;
    largest = w > largest ? w : largest;
  }
  float low = 0.0f, high = 0.0f;
  for (int l = 0; l < kLanes; ++l) {
    low = std::min(low, least[l]);
    high = std::max(high, largest[l]);
  }
  if (low == high) return {};
  constexpr float kShares[][2] = {{1.0f, 1.0f},   {0.94f, 0.94f}, {0.88f, 0.88f}, {0.82f, 0.82f},
                                  {0.76f, 0.76f}, {1.0f, 0.86f},  {0.86f, 1.0f},  {0.94f, 0.8f},
                                  {0.8f, 0.94f},  {0.88f, 0.76f}, {0.76f, 0.88f}};
  const auto count = static_cast<float>(group.n);
  Line best;
  float most = 0.0f;  // by how much a line lowers the squared error
  for (const auto& [of_low, of_high] : kShares) {
    Line line{(high * of_high - low * of_low) / 15.0f, low * of_low};
    const float inverse = 1.0f / line.step;
    Lanes sum = {}, product = {}, square = {}, weights = {};
    for (int i = 0; i < SubGroup::kParts; ++i) {
      const Lanes w = group.w[i];
      const Lanes q = LevelsOf(w, inverse, line.low) * group.used[i];
      sum += q;
      square += q * q;
      product += q * w;
      weights += w;
    }
    const float q1 = Total(sum), q2 = Total(square), qw = Total(product), w1 = Total(weights);
    const float spread = count * q2 - q1 * q1;
    if (spread > 0.0f) {
      line.step = (count * qw - q1 * w1) / spread;
      line.low = (w1 - line.step * q1) / count;
    } else if (q1 == 0.0f) {  // equal negative weights
      line.low = w1 / count;
    }
    if ((!(spread > 0.0f) && q1 != 0.0f) || line.low > 0.0f) {  // a line through 0
      line.low = 0.0f;
      line.step = q2 > 0.0f ? qw / q2 : 0.0f;
    }
    if (line.step <= 0.0f) continue;
    const float gain = 2.0f * (line.step * qw + line.low * w1) - line.step * line.step * q2 -
                       2.0f * line.step * line.low * q1 - count * line.low * line.low;
    if (gain > most) {
      most = gain;
      best = line;
    }
  }
  return best;
}

// Returns the squared error of weights that are rounded to the levels of a line.
inline float ErrorOf(const SubGroup& group, Line line) {
  const float inverse = line.step > 0.0f ? 1.0f / line.step : 0.0f;
  Lanes error = {};
  for (int i = 0; i < SubGroup::kParts; ++i) {
    const Lanes w = group.w[i];
    const Lanes rest = line.step * LevelsOf(w, inverse, line.low) + line.low - w;
    error += rest * rest * group.used[i];
  }
  return Total(error);
}

// Rounds a subgroup whose best line is `line`, if d and u are given (QuantizedMatrix). Returns the
// subgroup's byte.
MOESERVE_WIDE int8_t RoundSubGroup(const SubGroup& group, Line line, float d, float u,
                                   int8_t* values) {
  const int step = d == 0.0f ? 0 : static_cast<int>(Nearest(std::min(line.step / d, 15.0f)));
  const int low =
      d * u == 0.0f ? 0 : static_cast<int>(Nearest(std::min(-line.low / (d * u), 15.0f)));
  const int most_minimum = u == 0.0f ? 0 : 15;
  int factors = 0;
  Line best;
  float least = std::numeric_limits<float>::infinity();
  for (int s = std::max(step - 1, 0); s <= std::min(step + 1, 15); ++s) {
    for (int m = std::max(low - 1, 0); m <= std::min(low + 1, most_minimum); ++m) {
      const Line rounded{d * static_cast<float>(s), -d * u * static_cast<float>(m)};
      const float error = ErrorOf(group, rounded);
      if (!(error < least)) continue;
      least = error;
      best = rounded;
      factors = s + 16 * m;
    }
  }
  const float inverse = best.step > 0.0f ? 1.0f / best.step : 0.0f;
  for (int i = 0; i < SubGroup::kParts; ++i) {
    const Lanes levels = LevelsOf(group.w[i], inverse, best.low);
    for (int l = 0; l < kLanes && i * kLanes + l < group.n; ++l) {
      values[i * kLanes + l] = static_cast<int8_t>(levels[l]);
    }
  }
  return static_cast<int8_t>(factors);
}

// Rounds a group of n finite weights to int4-k.
void QuantizeSubGroups(const float* w, int n, int8_t* values, int8_t* factors, F16* scales) {
  Line lines[kWholeRow / kSubGroup];
  const int count = (n + kSubGroup - 1) / kSubGroup;
  float step = 0.0f, low = 0.0f;
  for (int i = 0; i < count; ++i) {
    const int begin = i * kSubGroup;
    lines[i] = FitLine(SubGroup(w + begin, std::min(kSubGroup, n - begin)));
    step = std::max(step, lines[i].step);
    low = std::min(low, lines[i].low);
  }
  scales[0] = F16FromF32(step / 15.0f);
  const float d = F32FromF16(scales[0]);
  const float u =
      d == 0.0f ? 0.0f
                : std::min(std::ceil(-low / (15.0f * d)), static_cast<float>(kMaxMinimumUnit));
  scales[1] = F16FromF32(u);
  for (int i = 0; i < count; ++i) {
    const int begin = i * kSubGroup;
    const SubGroup group(w + begin, std::min(kSubGroup, n - begin));
    factors[i] = RoundSubGroup(group, lines[i], d, u, values + begin);
  }
}

}  // namespace

void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales) {
  const int group = QuantGroup(type);
  const float low = static_cast<float>(QuantMin(type));
  const float high = static_cast<float>(QuantMax(type));
  int8_t* const factors = values + row.size();
  for (size_t begin = 0; begin < row.size(); begin += static_cast<size_t>(group), ++scales) {
    const int n = static_cast<int>(std::min(row.size() - begin, static_cast<size_t>(group)));
    const float* w = row.data() + begin;
    int8_t* q = values + begin;
    float largest = 0.0f;
    bool finite = true;
    for (int i = 0; i < n; ++i) {
      largest = std::max(largest, std::fabs(w[i]));
      finite = finite && std::isfinite(w[i]);
    }
    finite = finite && largest <= kLargestF16;
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
    // The integers are computed with the scale after its rounding to f16.
    *scales = F16FromF32(GroupScale(type, w, n, largest));
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
