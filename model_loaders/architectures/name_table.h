// Configurations of families whose files differ from the native format only in the tensors' names,
// or in that tensors are stacked and joined in regular ways. Two tables describe such a family.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// How the rows of several tensors of the model are stored in one tensor.
enum class RowOrder : uint8_t {
  kJoined,       // all rows of the first tensor, then all rows of the second, ...
  kInterleaved,  // row 0 of each tensor, then row 1 of each, ...
  kQkv,          // the rows of an attention layer's queries, keys and values
  kExperts,  // a matrix with the rows of all experts; if `transposed`, with those of the transposes
  kLatent,   // for each head of latent attention, the rows of its key projection (part 0), whose
             // transpose the model has, then those of its value projection (part 1)
  // Row sections (row_sections.h).
  kGatedQueries,  // for each head, the rows of its query (part 0), then those of its gate (part 1)
  kDelta,         // all queries, all keys, all values of a delta rule
  kDeltaGroups,   // for each key head: its query, its key, its values, its gates
  kDeltaPairs,    // for each key head: its strengths, its decays
  kStateSpace,    // gates, x, b, c, steps
};

// Where the files store the tensors whose names match a pattern. "*" stands for a number: the first
// is the layer, the second the expert.
//
// If `file` has one "*" less than `model`, the files store the tensors of all experts as one tensor
// whose outermost dimension is the number of experts. If `parts` > 1, the files store the rows of
// `parts` tensors in one tensor, and this tensor is number `part`. The tensors have the same shape,
// except with kQkv and kLatent.
struct TensorRule {
  std::string_view model;  // "blocks.*.feed_forward.experts.*.gate.weight"
  std::string_view file;   // "model.layers.*.block_sparse_moe.experts.*.w1.weight"
  int part = 0;
  int parts = 1;
  RowOrder order = RowOrder::kJoined;
  bool transposed = false;        // matrices are stored as their transposes
  float add = 0.0f;               // TensorPlace::add
  ElementFunction function = {};  // TensorPlace::function
  // Above 0: the stored tensor has one more dimension in front, of this size, whose first slice the
  // tensor is.
  int slices = 0;
  bool channel = false;  // the stored tensor has one more dimension behind the first, of size 1
  // Files store the tensor as MXFP4 blocks; the name of the scales ends with "_scales" where that
  // of the blocks ends with "_blocks".
  bool mxfp4 = false;
  bool units = false;  // TensorPlace::units
  // If set, the rule is one for layers whose mixer of tokens is of this kind.
  std::optional<BlockKind> mixer = std::nullopt;
};

constexpr TensorRule Transposed(TensorRule rule) {
  rule.transposed = true;
  return rule;
}

// A configuration key: its name in the native format, without indices
// ("feed_forward.routing.num_experts"), and its name in the family's config.json
// ("num_local_experts").
struct KeyRule {
  std::string_view model;
  std::string_view file;
};

// Files may call the tensors that the rules call `rule` + NAME by the name `file` + NAME: the same
// model has its names without a prefix or with one of several.
struct NamePrefix {
  std::string_view rule;
  std::string_view file;
};

// Files may number layers in a way of their own. Both functions return names that they do not know
// as they are.
struct NameMapping {
  std::string (*in_rules)(std::string_view stored) = nullptr;
  std::string (*in_files)(std::string_view rule) = nullptr;
};

// How files name the tensors of prediction layers. The rules are those of the model's layers, for
// the layer number `layer`, the number of the model's layers; rules for what the prediction layers
// have besides call it "blocks.*.prediction.NAME". Files with a prefix, such as "mtp.", call the
// tensors of the first layer "mtp.layers.0." + NAME, and what there is besides "mtp." + NAME.
struct PredictionNames {
  int layer = -1;  // below 0: there are none
  std::string_view prefix = {};
};

// The numbers in a name at the positions of a pattern's "*".
struct Numbers {
  std::array<int, 2> value{};
  size_t count = 0;
};

// Stored tensors that the model does not need: those whose names match `pattern` and of whose
// numbers the one at `number`, counted from 0, is in [from, to).
struct IgnoredRange {
  std::string_view pattern;
  size_t number = 0;
  int from = 0;
  int to = 0;
};

// Returns whether a name matches a pattern, in which each "*" stands for a number without leading
// zeros.
bool MatchesName(std::string_view pattern, std::string_view name);

class NameTableConfig : public CheckpointConfig {
 public:
  // If several rules match a tensor of the model, the first of them whose file tensor is in
  // `stored` is used, or else the first of them, if possible one for which other layers are there.
  // The texts of the tables must outlive the configuration.
  NameTableConfig(std::span<const TensorRule> tensors, std::span<const KeyRule> keys,
                  const StoredNames& stored, const NamePrefix& prefix = {},
                  const NameMapping& mapping = {}, const PredictionNames& predictions = {});

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override;
  std::optional<std::string> LeftOverReason(std::string_view name) const override;
  std::string AsInFile(std::string_view text) const override;
  std::unique_ptr<const CheckpointConfig> WithOwnHead() const override;

  // Patterns of stored tensors that the model does not need, such as
  // "model.layers.*.self_attn.rotary_emb.inv_freq".
  std::vector<std::string_view> ignored;
  // Stored tensors with these prefixes are not needed either.
  std::vector<std::string> ignored_prefixes;
  std::vector<IgnoredRange> ignored_ranges;
  // The stored names of tensors of the model that have names of their own, which no rule gives.
  std::map<std::string, std::string> named;
  // Rows of the stored table of positions in front of the one for a text's first token.
  int positions_from = 0;
  // The rectangle of elements with one scale if the files have FP8 weights: of every stored matrix
  // whose name plus "_scale_inv" is also stored.
  std::optional<BlockFormat> fp8;

 protected:
  // Returns the name that rules have for a tensor of the model: "prediction.blocks.0.NAME" becomes
  // "blocks.LAYER.NAME".
  std::string NameForRules(const std::string& tensor) const;
  // Return a block by its layer; null if there is none. Those of prediction layers follow the
  // model's.
  const BlockSpec* FindBlock(int layer, BlockKind kind) const;
  const BlockSpec* TokenMixer(int layer) const;

 private:
  // Returns the name that rules have for a stored tensor.
  std::string NameInRules(std::string_view stored) const;
  // The same, with the numbers of layers that files have.
  std::string WithPrefixOfRules(std::string_view stored) const;
  // As Place(), but with the names that rules have.
  std::optional<TensorPlace> PlaceInRules(const TensorRequirement& tensor) const;

  // Returns whether the rule is one for a layer, the first of the numbers.
  bool IsFor(const TensorRule& rule, const Numbers& numbers) const;

  // Returns the routing of the block that a tensor with this pattern of its name belongs to; null
  // if the block is not routed.
  const RoutedLayerSpec* RoutingOf(std::string_view pattern, int layer) const;

  // Returns the rule that counts for a tensor of the model; null if none matches.
  const TensorRule* RuleOf(std::string_view tensor) const;

  // Returns the block format of the stored tensor `stored`, to which `rule` leads.
  BlockFormat FormatOf(const TensorRule& rule, const std::string& stored) const;

  // Returns `place` with the position of a matrix of one head in the stored matrix of all heads.
  std::optional<TensorPlace> LatentPlace(const TensorRule& rule, const Numbers& numbers,
                                         TensorPlace place) const;

  // Returns `place` with the position of a section of rows (row_sections.h).
  std::optional<TensorPlace> SectionPlace(const TensorRule& rule, const Numbers& numbers,
                                          const TensorRequirement& tensor, TensorPlace place) const;

  const std::vector<TensorRule> tensors_;
  const std::vector<KeyRule> keys_;
  const NamePrefix prefix_;
  const NameMapping mapping_;
  const PredictionNames predictions_;
  std::map<std::string, std::string> stored_names_;  // by the names in rules, where they differ
  // The patterns `TensorRule::file` that match at least one stored tensor.
  std::set<std::string_view> found_;
  // The patterns `TensorRule::model` for which several file patterns were found, and the stored
  // names that match one of these.
  std::set<std::string_view> ambiguous_;
  std::set<std::string> ambiguous_names_;
  std::set<std::string> scales_;  // the stored names that end with "_scale_inv"
};

}  // namespace moeserve
