// Where GGUF files store the tensors of a model, and the keys that its settings are from.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/gguf/gguf_families.h"
#include "model_loaders/architectures/name_table.h"

namespace moeserve {

inline constexpr std::string_view kGgufMetadata = "metadata";
// Tensors with one divisor for each rotary frequency: those of Llama 3, and LongRoPE's for texts up
// to the original context length and for longer ones.
inline constexpr std::string_view kRopeFactors = "rope_freqs.weight";
inline constexpr std::string_view kShortRopeFactors = "rope_factors_short.weight";
inline constexpr std::string_view kLongRopeFactors = "rope_factors_long.weight";

// The tables of one file. A base class of GgufConfig, so that it exists before NameTableConfig.
struct GgufTables {
  std::vector<TensorRule> tensors;
  std::deque<std::string> names;  // of keys, to which `keys` refers
  std::vector<KeyRule> keys;

  // Keys that begin with a dot stand for keys of the architecture.
  GgufTables(std::string_view architecture, std::span<const TensorRule> tensor_rules,
             std::span<const KeyRule> key_rules);
  // `head_dim_key` is the key that attention.head_dim is from, such as ".attention.key_length".
  GgufTables(const GgufFamily& family, const StoredNames& stored, std::string_view head_dim_key);

 private:
  void AddKeys(std::string_view architecture, std::span<const KeyRule> rules);
};

// The configuration of a file that tables describe alone. Its reader sets `spec`.
class GgufTableConfig final : private GgufTables, public NameTableConfig {
 public:
  GgufTableConfig(std::string_view architecture, std::span<const TensorRule> tensor_rules,
                  std::span<const KeyRule> key_rules, const StoredNames& stored)
      : GgufTables(architecture, tensor_rules, key_rules), NameTableConfig(tensors, keys, stored) {
    key_place = kGgufMetadata;
  }

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;

  // Stored vectors that are matrices of one row in the model: older converters drop that dimension.
  std::vector<std::string_view> vectors;
};

// The configuration of one file. Its reader sets `spec`.
class GgufConfig final : private GgufTables, public NameTableConfig {
 public:
  // `prediction_layer` is the number of the block that is a prediction layer; below 0: none is.
  GgufConfig(const GgufFamily& family, const StoredNames& stored, std::string_view head_dim_key,
             int prediction_layer = -1);

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;

  int64_t paired_rows = 0;       // TensorPlace::paired_rows of query and key projections
  bool reversed_scores = false;  // the rows of the labels' scores are in the opposite order
  // The gate of the shared expert, a matrix of one row, is stored as a vector.
  bool vector_gate = false;

 private:
  // Returns the place of a matrix of one head of latent attention if the files have stacks of them.
  std::optional<TensorPlace> HeadPlace(const TensorRequirement& tensor) const;

  // Latent attention: the key and value projections are stacks of the heads' matrices, of which
  // those of keys are transposed. Older files have one matrix instead, as other formats do.
  bool split_heads_ = false;
  const bool tiled_values_;  // GgufFamily::tiled_values
};

}  // namespace moeserve
