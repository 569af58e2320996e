// Checkpoint folders for tests: tiny, deterministic, written with values that depend on names
// alone.
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

// A fresh empty directory, removed with everything in it at the end.
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
  std::string dtype;  // as the format spells it: "F32"
  std::vector<int64_t> shape;
  std::string bytes;
};

// A safetensors file: header length, header, data. The parts are separate so that a test can
// damage one of them.
std::string SafetensorsHeader(const std::vector<RawTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});
std::string SafetensorsData(const std::vector<RawTensor>& tensors);
std::string SafetensorsBytes(std::string_view header, std::string_view data);
std::string SafetensorsBytes(const std::vector<RawTensor>& tensors);

// Two layers that use much of the format at once: dense attention and MoA, a split feed-forward
// with unequal experts and a cosine router, a plain top-p one with a shared expert. 288 token ids.
nlohmann::json TinyConfig();

// Every tensor that `spec` requires with values that depend on its name and `seed` alone: weights
// uniform with the variance of 1 / fan-in, norms near 1, biases small. The specification must be
// valid.
std::vector<RawTensor> RandomTensors(const ModelSpec& spec, DType dtype = DType::kF32,
                                     uint64_t seed = 1);

// A byte-level BPE tokenizer without merges: 256 byte tokens, then <|endoftext|> as id 256.
std::string TinyTokenizerJson();

// Writes config.json, model.safetensors and tokenizer.json. `config` must be a valid one whose
// vocabulary has at least 257 ids.
void WriteNativeModel(const std::filesystem::path& folder, const nlohmann::json& config,
                      DType dtype = DType::kF32, uint64_t seed = 1);

}  // namespace moeserve::testing
