// Writes arrays as .npy files (format 1.0) row by row. The number of rows is written at the end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "base/status.h"

namespace moeserve {

// Returns NumPy's name of a little-endian element type, such as "<f4".
template <typename T>
constexpr std::string_view NpyType() {
  if constexpr (std::is_same_v<T, float>) return "<f4";
  if constexpr (std::is_same_v<T, int32_t>) return "<i4";
  if constexpr (std::is_same_v<T, uint16_t>) return "<u2";
  if constexpr (std::is_same_v<T, uint64_t>) return "<u8";
}

// Returns the first 128 bytes of an .npy file. The elements follow them in row-major order. `type`
// is NumPy's name of a little-endian type; `shape` has at most three dimensions.
std::string NpyHeader(std::string_view type, std::span<const int64_t> shape);

// Writes one file. Not thread-safe. Append() reports no errors; Finish() returns the first one.
class NpyWriter {
 public:
  // With `row_size` > 0, the array has shape [rows, row_size]; with 0, shape [rows]. Error messages
  // contain the file's name.
  static Result<std::unique_ptr<NpyWriter>> Create(const std::filesystem::path& path,
                                                   std::string_view type, int64_t row_size);

  template <typename T>
  void Append(std::span<const T> values) {
    AppendBytes(values.data(), values.size_bytes());
  }

  // Writes the final header, without which the file is not valid, and closes the file.
  absl::Status Finish();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  NpyWriter() = default;
  void AppendBytes(const void* data, size_t size);
  std::string Header() const;

  std::unique_ptr<std::FILE, Close> file_;
  std::string name_;
  std::string type_;
  size_t element_bytes_ = 0;
  int64_t row_size_ = 0;
  uint64_t bytes_ = 0;
  int error_ = 0;  // errno of the first failed write
};

}  // namespace moeserve
