// Pruned models ("Mixture of Novice Experts"): experts that were replaced by vectors. They keep
// their ids, and the router is that of the model before.
#pragma once

#include <map>
#include <span>
#include <string>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/files/object_reader.h"
#include "nlohmann/json.hpp"

namespace moeserve::huggingface {

// The experts of one layer that are replaced.
struct ReplacedLayer {
  std::string key = {};  // the configuration key that names them, for error messages
  int num_experts = 0;   // of the layer; 0: the key does not say it
  // By id: the name of the stored vector; "" if it follows from the expert's name.
  std::map<int, std::string> experts = {};
};

// By the number that the files give to the layer.
using ReplacedExperts = std::map<int, ReplacedLayer>;

// Reads "approximate_experts", or "expert_substitution" in "compression_config". Reports errors to
// `problems`, which `reader` also has; returns nothing then, or without such keys.
ReplacedExperts ReadReplacedExperts(ObjectReader& reader, Problems& problems);

// The names of vectors that follow from those of their experts, and of the key for messages.
std::span<const TensorRule> ReplacedExpertTensors();
std::span<const KeyRule> ReplacedExpertKeys();

// Replaces the experts of a model that has all of them. Adds the stored names of vectors that have
// names of their own to `named`, by the names of the model's tensors. InvalidArgument with the key
// if a layer has no such experts, or would have none with matrices.
absl::Status ReplaceExperts(const ReplacedExperts& replaced, const NameMapping& mapping,
                            ModelSpec& spec, std::map<std::string, std::string>& named);

}  // namespace moeserve::huggingface
