// Takes tensors of a checkpoint into a backend's layout.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/packed_cache.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "kernels/backend.h"

namespace moeserve {

struct LoadContext {
  WeightSource& source;
  Backend& backend;
  DType compute;  // f32: stored types are kept; bf16: every product's weight becomes bf16
  NormSpec norm;
  Quantization quantization = Quantization::kNone;
  PackedCache* packed_cache = nullptr;  // asked for banks before their tensors are
};

// One of several weights that are stacked into a single product along the output axis.
struct LinearPart {
  std::string prefix;  // "blocks.0.attention.q": .weight and, where `bias`, .bias
  int out_features;
  bool bias;
};

// A dense linear layer whose outputs are the parts, one after the other.
Result<std::unique_ptr<LinearBank>> LoadLinear(LoadContext& load, int in_features,
                                               const std::vector<LinearPart>& parts);

// One matrix per expert: prefixes[e] + "." + main (and gate where given). in_features has one value
// per expert, or one for all.
struct BankNames {
  std::vector<std::string> prefixes;
  std::string main;                 // "up", "down", "q", "o"
  std::optional<std::string> gate;  // "gate"
};
Result<std::unique_ptr<LinearBank>> LoadBank(LoadContext& load, const std::vector<int>& in_features,
                                             const std::vector<int>& out_features,
                                             const BankNames& names, bool bias);

// Norms of the model's kind: prefixes[g] + ".weight" [widths[g]] (and ".bias").
Result<std::unique_ptr<NormBank>> LoadNorm(LoadContext& load,
                                           const std::vector<std::string>& prefixes,
                                           const std::vector<int>& widths);
// RMS without shift, whatever the model's kind: the norms of queries and keys.
Result<std::unique_ptr<NormBank>> LoadRmsNorm(LoadContext& load, const std::string& prefix,
                                              int width);

Result<std::unique_ptr<Router>> LoadRouter(LoadContext& load, const std::string& prefix,
                                           const RoutedLayerSpec& spec, int input_width);

}  // namespace moeserve
