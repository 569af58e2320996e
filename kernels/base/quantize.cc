#include "kernels/base/quantize.h"

#include <algorithm>
#include <cmath>

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

// Returns the scale of one int4 group of n weights w. Each of several initial scales is tried and
// yields integers q. For given q the best scale is sum(w q) / sum(q q); it lowers the squared error
// by sum(w q)^2 / sum(q q). The function returns the best scale for the q with the largest such
// gain.
float Int4Scale(const float* w, int n) {
  float extreme = 0.0f;  // the value of largest magnitude
  for (int i = 0; i < n; ++i) {
    if (std::fabs(w[i]) > std::fabs(extreme)) extreme = w[i];
  }
  if (extreme == 0.0f) return 0.0f;
  float best_gain = 0.0f;
  float best = extreme / -8.0f;
  // `level` is the (unrounded) integer that the extreme value maps to. With level -8 all sixteen
  // integers are used. A level below -8 clips the extreme value in exchange for finer steps; a
  // level closer to 0 or of the opposite sign may fit the other values better.
  for (const float level : {-8.0f, -7.6f, -7.2f, -6.8f, -8.4f, -8.8f, -9.3f, 7.0f, 7.4f, 6.6f}) {
    const float inverse = level / extreme;
    float product = 0.0f;
    float square = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float q = Level(w[i], inverse, -8.0f, 7.0f);
      product += w[i] * q;
      square += q * q;
    }
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
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return largest / static_cast<float>(QuantMax(type));
    case Quantization::kInt4:
      return Int4Scale(w, n);
  }
  return 0.0f;
}

}  // namespace

void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales) {
  const int group = QuantGroup(type);
  const float low = static_cast<float>(QuantMin(type));
  const float high = static_cast<float>(QuantMax(type));
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
    if (!finite || largest > kLargestF16) {
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

void PackQuantizedRow(Quantization type, std::span<const int8_t> values, uint8_t* bytes) {
  switch (type) {
    case Quantization::kNone:
      return;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      std::transform(values.begin(), values.end(), bytes,
                     [](int8_t v) { return static_cast<uint8_t>(v); });
      return;
    case Quantization::kInt4:
      for (size_t i = 0; i < values.size(); i += 2) {
        const int high = i + 1 < values.size() ? values[i + 1] & 15 : 0;
        bytes[i / 2] = static_cast<uint8_t>((values[i] & 15) | high << 4);
      }
      return;
  }
}

void UnpackQuantizedRow(Quantization type, const uint8_t* bytes, std::span<int8_t> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<int8_t>(UnpackedValue(type, bytes, static_cast<int64_t>(i)));
  }
}

}  // namespace moeserve
