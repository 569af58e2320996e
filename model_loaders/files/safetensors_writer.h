// Writes a safetensors file whose tensors are known beforehand and whose data comes in pieces.
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

// Pieces of different tensors may come in any order; those of one tensor in the order of its data.
// A file that was not finished has holes: write under a name that nobody reads and rename.
class SafetensorsWriter {
 public:
  // Replaces what is at `path`. `begin` and `end` of the entries are set here: data lies in the
  // order of the list and begins at a multiple of 64 bytes of the file. InvalidArgument where the
  // header would be longer than the format allows or the sizes do not fit; else the system's error
  // with the last component of `path`.
  static Result<std::unique_ptr<SafetensorsWriter>> Create(const std::filesystem::path& path,
                                                           std::vector<TensorEntry> tensors);
  // Closes without finishing.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of tensor `index` of the list; never more than it has.
  absl::Status Append(size_t index, std::string_view bytes);

  // All bytes of all tensors have been appended. Brings them to the disk and closes.
  absl::Status Finish();

  const std::vector<TensorEntry>& tensors() const { return tensors_; }

 private:
  SafetensorsWriter() = default;
  absl::Status WriteAt(uint64_t offset, std::string_view bytes);

  int fd_ = -1;
  std::string file_name_;
  uint64_t data_begin_ = 0;  // of the data section in the file
  std::vector<TensorEntry> tensors_;
  std::vector<uint64_t> next_;  // by tensor: where its next byte goes, within the data section
};

}  // namespace moeserve
