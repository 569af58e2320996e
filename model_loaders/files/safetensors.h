// Reader of the safetensors file format: the length of the header, the header (a JSON table of
// tensors), and the raw data. Independent of models; supports every element type of the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/tensor_file.h"

namespace moeserve {

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Largest header that the format allows.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

// Parses the JSON table of a file whose data section has `data_size` bytes. On success, end - begin
// of every entry is its number of elements times the size of an element, and the entries cover [0,
// data_size) without gap or overlap. Otherwise InvalidArgument with tensor, expected and found
// value.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_size);

// A memory-mapped safetensors file, which must not be truncated while it is mapped. Immutable.
// Objects that use its bytes share its ownership.
class SafetensorsFile final : public TensorFile {
 public:
  // Error messages begin with the last component of `path`.
  static Result<std::shared_ptr<const SafetensorsFile>> Open(const std::filesystem::path& path);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Returns null if there is no tensor of that name.
  const TensorEntry* Find(std::string_view name) const;

  // Returns the data of one of tensors(), which can have any alignment. The data is valid as long
  // as this object.
  std::string_view Bytes(const TensorEntry& entry) const {
    return data_.substr(entry.begin, entry.end - entry.begin);
  }
  Result<TensorData> Read(const TensorEntry& entry) const override {
    return TensorData{Bytes(entry), file_};
  }

 private:
  SafetensorsFile() = default;

  std::string_view data_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string_view, const TensorEntry*> by_name_;
};

}  // namespace moeserve
