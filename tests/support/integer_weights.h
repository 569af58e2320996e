// Makes quantized weights for tests, and defines what they mean.
#pragma once

#include <memory>
#include <vector>

#include "kernels/base/quantize.h"
#include "tests/support/random.h"

namespace moeserve::testing {

// Returns column c of a row from its unpacked integers [QuantRowValues] and scales [QuantScales].
// The definition is that of QuantizedMatrix.
inline double ElementOf(Quantization type, int64_t columns, const int8_t* values, const F16* scales,
                        int64_t c) {
  if (type != Quantization::kInt4K)
    return static_cast<double>(values[c]) * F32FromF16(scales[c / QuantGroup(type)]);
  const auto factors = static_cast<uint8_t>(values[columns + c / 32]);
  const int s = factors % 16, m = factors / 16;
  const F16* const of_group = scales + c / QuantGroup(type) * 2;
  const double d = F32FromF16(of_group[0]), u = F32FromF16(of_group[1]);
  return d * (s * values[c] - u * m);
}

// Returns all elements of a matrix, row by row.
inline std::vector<double> ElementsOf(const QuantizedMatrix& m) {
  std::vector<double> elements;
  std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(m.type, m.columns)));
  for (int64_t r = 0; r < m.rows; ++r) {
    UnpackQuantizedRow(m.type, m.columns, m.values + r * QuantRowBytes(m.type, m.columns),
                       values.data());
    for (int64_t c = 0; c < m.columns; ++c) {
      elements.push_back(ElementOf(m.type, m.columns, values.data(),
                                   m.scales + r * QuantScales(m.type, m.columns), c));
    }
  }
  return elements;
}

// A matrix and its quantized form.
struct IntegerWeight {
  HostTensor numbers;
  QuantizedMatrix integers;
};

inline IntegerWeight MakeWeight(Random& random, Quantization type, int out, int in) {
  struct Owner {
    std::vector<uint8_t> bytes;
    std::vector<F16> scales;
  };
  auto owner = std::make_shared<Owner>();
  const int64_t row_bytes = QuantRowBytes(type, in), scales = QuantScales(type, in);
  owner->bytes.resize(static_cast<size_t>(out * row_bytes));
  owner->scales.resize(static_cast<size_t>(out * scales));
  std::vector<float> all = random.Normals(int64_t{out} * in, 0.3);
  std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(type, in)));
  for (int r = 0; r < out; ++r) {
    QuantizeRow(type, std::span(all).subspan(static_cast<size_t>(r * in), static_cast<size_t>(in)),
                values.data(), owner->scales.data() + r * scales);
    PackQuantizedRow(type, in, values.data(), owner->bytes.data() + r * row_bytes);
  }
  return {MakeTensor(all, {out, in}),
          {type, out, in, owner->bytes.data(), owner->scales.data(), owner}};
}

}  // namespace moeserve::testing
