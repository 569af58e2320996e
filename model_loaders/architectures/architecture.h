// The interface of a family of checkpoint folders: it recognises and reads a config.json and gives
// the place of each tensor of the model in the files. README.md describes how to add one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "kernels/base/quantize.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// Where the files hold one tensor of the model: a whole stored tensor, or a contiguous part of it.
struct TensorPlace {
  std::string name = {};  // of the stored tensor

  // Shape of the stored tensor. Empty: that of the model's tensor, which is then stored whole.
  std::vector<int64_t> shape = {};

  // The part of it: slice `index` of the outermost dimension, if any, and of that slice the rows
  // from `first_row` on. Gate and up projections of experts that are stored as one tensor
  // [E, 2 * width, d] are rows 0 and `width` of slice e.
  std::optional<int64_t> index = std::nullopt;
  int64_t first_row = 0;

  // The keys that `shape` follows from, in the spelling of TensorRequirement. Empty: those of the
  // model's tensor.
  std::string follows_from = {};
};

// The configuration of one folder, read by its family.
class CheckpointConfig {
 public:
  virtual ~CheckpointConfig() = default;

  // Nothing if the model has no tensor of that name.
  virtual std::optional<TensorPlace> Place(const TensorRequirement& tensor) const = 0;

  // For a stored tensor that no Place() refers to: the reason why it should not be there, usually
  // the setting that excludes it. Nothing if the family ignores the tensor.
  virtual std::optional<std::string> LeftOverReason(std::string_view name) const = 0;

  // `text` with the keys of Validate(), RequiredTensors() and LeftOverReason()
  // ("attention[0].head_dim") replaced by those of config.json.
  virtual std::string AsInFile(std::string_view text) const = 0;

  ModelSpec spec;
  // How the files store the matrices that QuantizationOf() selects. Integers are stored whole.
  Quantization quantization = Quantization::kNone;
};

// A family. Its functions must accept a JSON object of any content.
struct Architecture {
  std::string_view model_type;  // the value in config.json; names the family in messages
  bool (*recognizes)(const nlohmann::json& config);
  // The specification has passed ValidateConfig(). InvalidArgument otherwise: key, expected, found;
  // the message begins with "config.json: ".
  Result<std::unique_ptr<const CheckpointConfig>> (*read)(const nlohmann::json& config);
};

inline constexpr std::string_view kConfigFile = "config.json";

// Parses the text of config.json; fails if its size, depth or number of values exceeds a limit.
// Error messages begin with "config.json: ".
Result<nlohmann::json> ParseConfigJson(std::string_view text);

// Whether `config` has the string `model_type` under the key of that name.
bool HasModelType(const nlohmann::json& config, std::string_view model_type);

// A configuration key and its value.
struct NamedCount {
  std::string_view key;
  int value = 0;
};

// InvalidArgument if a model may not have this many layers with this many experts each (0: none).
// Call it before building lists of these lengths, so that a hostile configuration cannot demand
// memory.
absl::Status CheckListLengths(const NamedCount& layers, const NamedCount& experts);

// Validate(config.spec), with the keys of config.json in the message.
absl::Status ValidateConfig(const CheckpointConfig& config);

}  // namespace moeserve
