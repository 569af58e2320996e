// Writes a safetensors file: first the header with all entries, then the data in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/safetensors.h"

namespace moeserve {

// Pieces of one tensor must be appended in order; pieces of different tensors may be appended in
// any order. An unfinished file has gaps, so callers should write under a temporary name and rename
// the file.
class SafetensorsWriter {
 public:
  // Replaces the file at `path`. Sets `begin` and `end` of the entries: the data has the order of
  // the list, and the data section begins at a multiple of 64 bytes. InvalidArgument if the header
  // is longer than the format allows or if a size overflows; else the system's error, with the last
  // component of `path`.
  static Result<std::unique_ptr<SafetensorsWriter>> Create(const std::filesystem::path& path,
                                                           std::vector<TensorEntry> tensors);
  // Closes the file. Without Finish(), it stays incomplete.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Appends the next bytes of tensor number `index` in the list. The bytes of all calls must not
  // exceed the tensor's size.
  absl::Status Append(size_t index, std::string_view bytes);

  // Syncs the file to disk and closes it. All bytes of all tensors must have been appended.
  absl::Status Finish();

  const std::vector<TensorEntry>& tensors() const { return tensors_; }

 private:
  SafetensorsWriter() = default;
  absl::Status WriteAt(uint64_t offset, std::string_view bytes);

  int fd_ = -1;
  std::string file_name_;
  uint64_t data_begin_ = 0;  // offset of the data section in the file
  std::vector<TensorEntry> tensors_;
  std::vector<uint64_t> next_;  // [tensor]: offset of its next byte in the data section
};

}  // namespace moeserve
