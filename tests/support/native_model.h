// Writes tiny checkpoint folders for tests. The values of a tensor depend only on its name and on
// the seed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/spec/spec.h"
#include "kernels/base/dtype.h"
#include "nlohmann/json.hpp"

namespace moeserve::testing {

// Creates an empty temporary folder. The destructor removes the folder and its contents.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void WriteFile(const std::filesystem::path& path, std::string_view bytes);
std::string ReadFile(const std::filesystem::path& path);

struct RawTensor {
  std::string name;
  std::string dtype;  // name in the file format, such as "F32"
  std::vector<int64_t> shape;
  std::string bytes;
};

// These functions return the header, the data and all bytes of a safetensors file, which consists
// of the header's length, the header and the data. A test can damage one of these parts.
std::string SafetensorsHeader(const std::vector<RawTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});
std::string SafetensorsData(const std::vector<RawTensor>& tensors);
std::string SafetensorsBytes(std::string_view header, std::string_view data);
std::string SafetensorsBytes(const std::vector<RawTensor>& tensors);

// Returns a configuration of two layers that uses much of the format: dense attention and MoA, a
// split feed-forward with unequal experts and a cosine router, and a top-p feed-forward with a
// shared expert. Has 288 token ids.
nlohmann::json TinyConfig();

// Returns every tensor that `spec` requires, with values that depend on the tensor's name and
// `seed` only: weights uniform with variance 1 / fan-in, norms near 1, small biases. `spec` must be
// valid.
std::vector<RawTensor> RandomTensors(const ModelSpec& spec, DType dtype = DType::kF32,
                                     uint64_t seed = 1);

// Returns a byte-level BPE tokenizer without merges: 256 byte tokens and <|endoftext|> with id 256.
std::string TinyTokenizerJson();

// Writes config.json, model.safetensors and tokenizer.json. `config` must be valid and have at
// least 257 token ids.
void WriteNativeModel(const std::filesystem::path& folder, const nlohmann::json& config,
                      DType dtype = DType::kF32, uint64_t seed = 1);

}  // namespace moeserve::testing
