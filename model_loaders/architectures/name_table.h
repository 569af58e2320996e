// Configurations of families whose files differ from the native format only in the tensors' names,
// or in that tensors are stacked and joined in regular ways. Two tables describe such a family.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// Where the files store the tensors whose names match a pattern. "*" stands for a number: the first
// is the layer, the second the expert.
//
// If `file` has one "*" less than `model`, the files store the tensors of all experts as one tensor
// whose outermost dimension is the number of experts. If `parts` > 1, the files store `parts`
// tensors of the same shape joined along the rows, and this tensor is number `part`.
struct TensorRule {
  std::string_view model;  // "blocks.*.feed_forward.experts.*.gate.weight"
  std::string_view file;   // "model.layers.*.block_sparse_moe.experts.*.w1.weight"
  int part = 0;
  int parts = 1;
};

// A configuration key: its name in the native format, without indices
// ("feed_forward.routing.num_experts"), and its name in the family's config.json
// ("num_local_experts").
struct KeyRule {
  std::string_view model;
  std::string_view file;
};

class NameTableConfig : public CheckpointConfig {
 public:
  // The tables, and the texts that they refer to, must outlive the configuration.
  NameTableConfig(std::span<const TensorRule> tensors, std::span<const KeyRule> keys)
      : tensors_(tensors), keys_(keys) {}

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;
  std::optional<std::string> LeftOverReason(std::string_view name) const override;
  std::string AsInFile(std::string_view text) const override;

  // Patterns of stored tensors that the model does not need, such as
  // "model.layers.*.self_attn.rotary_emb.inv_freq".
  std::vector<std::string_view> ignored;

 private:
  const std::span<const TensorRule> tensors_;
  const std::span<const KeyRule> keys_;
};

}  // namespace moeserve
