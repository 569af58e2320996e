#include "kernels/base/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/rounding/select_kernels.h"

namespace moeserve {
namespace {

using rounding::RoundingKernels;
using rounding::SubGroupLines;

constexpr F16 kNan = 0x7e00;
constexpr float kLargestF16 = 65504.0f;
static_assert(QuantGroup(Quantization::kInt4) == kSubGroup);

// Rounds a group of n finite weights to int4-k.
void QuantizeSubGroups(const RoundingKernels& kernels, const float* w, int n, int8_t* values,
                       int8_t* factors, F16* scales) {
  const int at_once = kernels.lanes * kSubGroup;
  SubGroupLines lines[kWholeRow / kSubGroup / rounding::kMinLanes];
  float step = 0.0f, low = 0.0f;
  for (int begin = 0; begin < n; begin += at_once) {
    SubGroupLines& own = lines[begin / at_once];
    kernels.fit_lines(w + begin, std::min(at_once, n - begin), &own);
    for (int g = 0; g < kernels.lanes; ++g) {
      step = std::max(step, own.step[g]);
      low = std::min(low, own.low[g]);
    }
  }
  scales[0] = F16FromF32(step / 15.0f);
  const float d = F32FromF16(scales[0]);
  const float u =
      d == 0.0f ? 0.0f
                : std::min(std::ceil(-low / (15.0f * d)), static_cast<float>(kMaxMinimumUnit));
  scales[1] = F16FromF32(u);
  for (int begin = 0; begin < n; begin += at_once) {
    kernels.round_lines(w + begin, std::min(at_once, n - begin), lines[begin / at_once], d, u,
                        values + begin, factors + begin / kSubGroup);
  }
}

}  // namespace

void QuantizeRow(Quantization type, std::span<const float> row, int8_t* values, F16* scales) {
  QuantizeRow(rounding::SelectedKernels(), type, row, values, scales);
}

void QuantizeRow(const RoundingKernels& kernels, Quantization type, std::span<const float> row,
                 int8_t* values, F16* scales) {
  const int group = QuantGroup(type);
  const float low = static_cast<float>(QuantMin(type));
  const float high = static_cast<float>(QuantMax(type));
  int8_t* const factors = values + row.size();
  const auto at_once = static_cast<size_t>(kernels.lanes * kSubGroup);
  float fitted_scales[rounding::kMaxLanes] = {};  // of int4 groups
  for (size_t begin = 0; begin < row.size(); begin += static_cast<size_t>(group), ++scales) {
    const int n = static_cast<int>(std::min(row.size() - begin, static_cast<size_t>(group)));
    const float* w = row.data() + begin;
    int8_t* q = values + begin;
    if (type == Quantization::kInt4 && begin % at_once == 0) {
      kernels.fit_scales(w, static_cast<int>(std::min(row.size() - begin, at_once)), fitted_scales);
    }
    const float largest = kernels.largest_magnitude(w, n);
    const bool finite = largest <= kLargestF16;
    if (HasSubGroups(type)) {
      int8_t* const own = factors + begin / kSubGroup;
      if (finite) {
        QuantizeSubGroups(kernels, w, n, q, own, scales);
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
    const float fitted = type == Quantization::kInt4 ? fitted_scales[begin % at_once / kSubGroup]
                                                     : largest / static_cast<float>(QuantMax(type));
    // The integers are computed with the scale after its rounding to f16.
    *scales = F16FromF32(fitted);
    const float scale = F32FromF16(*scales);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    kernels.round_values(w, n, inverse, low, high, q);
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
