// Makes and reads rows in device memory.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/backend.h"

namespace moeserve::testing {

// Returns columns [0, cols) of row r, widened to double.
inline std::vector<double> RowOf(Backend& backend, const RowsView& v, int64_t r, int64_t cols) {
  RowsView row = v;
  row.data = v.row(r);
  row.rows = 1;
  row.cols = cols;
  std::vector<float> values(static_cast<size_t>(cols));
  backend.CopyToHost(row, values);
  return {values.begin(), values.end()};
}

inline std::vector<float> HostRows(Backend& backend, const RowsView& v) {
  std::vector<float> values(static_cast<size_t>(v.rows * v.cols));
  backend.CopyToHost(v, values);
  return values;
}

// Rows in device memory, in an allocation that has NaN before and after them.
struct DeviceRows {
  std::unique_ptr<DeviceBuffer> memory;
  RowsView view;
};

// Makes rows that contain `values` [rows, cols], or NaN if `values` is null. `stride` is in
// elements.
inline DeviceRows MakeRows(Backend& backend, int64_t rows, int64_t cols, int64_t stride,
                           DType dtype, const std::vector<float>* values) {
  DeviceRows r;
  const int64_t floats = (rows + 2) * stride + 16;
  r.memory = std::move(backend.Allocate(static_cast<size_t>(floats) * 4)).value();
  const std::vector<float> poison(static_cast<size_t>(floats), F32FromBits(0xffffffffu));
  backend.CopyFromHost(poison, {r.memory->data(), DType::kF32, 1, floats, floats});
  // The rows begin at a multiple of 64 bytes, as rows in the engine do.
  const int64_t begin = (stride * static_cast<int64_t>(SizeOf(dtype)) + 63) / 64 * 64;
  r.view = {static_cast<char*>(r.memory->data()) + begin, dtype, rows, cols, stride};
  if (values != nullptr) backend.CopyFromHost(*values, r.view);
  return r;
}

inline DeviceRows MakeRows(Backend& backend, const std::vector<float>& values, int64_t cols) {
  return MakeRows(backend, static_cast<int64_t>(values.size()) / cols, cols, cols, DType::kF32,
                  &values);
}

}  // namespace moeserve::testing
