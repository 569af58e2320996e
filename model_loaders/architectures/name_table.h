// Configurations of families whose tensors differ from the model's by their names alone, or are
// stacked and joined in regular ways. Such a family is a table.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// Where the files hold the tensors of one name. "*" stands for a number: the first is the layer,
// the second the expert.
//
// `file` with one "*" less than `model` is a stack of all experts: the stored tensor has the number
// of experts as its outermost dimension. Of `parts` tensors that are joined row by row, all of the
// same shape, this is number `part`.
struct TensorRule {
  std::string_view model;  // "blocks.*.feed_forward.experts.*.gate.weight"
  std::string_view file;   // "model.layers.*.block_sparse_moe.experts.*.w1.weight"
  int part = 0;
  int parts = 1;
};

// A configuration key by its native name, without indices ("feed_forward.routing.num_experts"), and
// by its name in the family's config.json ("num_local_experts").
struct KeyRule {
  std::string_view model;
  std::string_view file;
};

class NameTableConfig : public CheckpointConfig {
 public:
  // What the views point to must outlive the configuration.
  NameTableConfig(std::span<const TensorRule> tensors, std::span<const KeyRule> keys)
      : tensors_(tensors), keys_(keys) {}

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;
  std::optional<std::string> LeftOverReason(std::string_view name) const override;
  std::string AsInFile(std::string_view text) const override;

  // Stored tensors that the model does not need ("model.layers.*.self_attn.rotary_emb.inv_freq");
  // "*" as above.
  std::vector<std::string_view> ignored;

 private:
  const std::span<const TensorRule> tensors_;
  const std::span<const KeyRule> keys_;
};

}  // namespace moeserve
