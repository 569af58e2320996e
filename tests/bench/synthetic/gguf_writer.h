// Writes GGUF files, version 3: metadata, the tensor table, and aligned data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/spec/weights.h"

namespace moeserve::testing {

enum class GgufType : uint32_t { kF32 = 0, kBF16 = 30 };

struct GgufTensor {
  std::string name;
  GgufType type = GgufType::kF32;
  std::vector<int64_t> shape;  // slowest-varying dimension first; the file stores them reversed
  // The names of the source tensors that contain this tensor's values: one tensor, or one for each
  // index of the first dimension.
  std::vector<std::string> sources;
};

class GgufWriter {
 public:
  void AddU32(std::string_view key, uint32_t value);
  void AddF32(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddString(std::string_view key, std::string_view value);
  void AddStrings(std::string_view key, const std::vector<std::string>& values);
  void AddI32s(std::string_view key, const std::vector<int32_t>& values);
  void AddTensor(GgufTensor tensor);

  // Writes the file, reading one source tensor after the other. Returns Unavailable if the file
  // cannot be written, and Internal if a source tensor has another type or size than declared.
  absl::Status Write(const std::filesystem::path& path, WeightSource& weights) const;

 private:
  void AddKey(std::string_view key, uint32_t type);

  std::string metadata_;
  uint64_t metadata_count_ = 0;
  std::vector<GgufTensor> tensors_;
};

}  // namespace moeserve::testing
