// Loads tensors of a checkpoint into a backend's layout.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/guarded_mapping.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "engine/weights/packed_cache.h"
#include "kernels/backend.h"

namespace moeserve {

// Biases of the scores by distance, AttentionArgs::bias, in device memory.
struct RelativeBiases {
  std::unique_ptr<DeviceBuffer> values;  // f32, as AttentionArgs::bias says
  int distances = 0;
};

struct RankShare;
class ExpertTiers;

// The experts of a routed block.
struct RoutedExperts {
  std::vector<bool> here;  // [E] those that are loaded; empty: all

  bool IsHere(size_t expert) const { return here.empty() || here[expert]; }
  // Returns the widths with 0 for experts that are not loaded.
  std::vector<int> WidthsHere(std::vector<int> widths) const;
};

struct LoadContext {
  WeightSource& source;
  Backend& backend;
  DType compute;  // f32: weights keep their stored type; bf16: weights of products become bf16
  NormSpec norm;
  Quantization quantization = Quantization::kNone;
  // Looked up before a bank's tensors are loaded; null: no cache.
  PackedCache* packed_cache = nullptr;
  int vocabulary = 0;  // ModelSpec::vocab_size
  // The table that all layers share; null if there is none.
  const RelativeBiases* relative_biases = nullptr;
  int first_cache_layer = 0;  // of the stack (CacheLayer())
  // Receives the mapped files that the model reads after loading; may be null.
  WatchedMappings* files_in_use = nullptr;
  // The experts that are loaded; null: all.
  const RankShare* ranks = nullptr;
  bool keep_fp8 = false;  // ModelOptions::keep_fp8

  // Receives the banks of routed experts that are read from files; null: such files are read and
  // checked when they are opened, like those of other banks.
  ExpertTiers* tiers = nullptr;

  // `block` is an index in ModelSpec::blocks.
  RoutedExperts ExpertsOf(const ModelSpec& model, int block) const;
};

// One of several weights that are stacked along the output axis into a single product.
struct LinearPart {
  std::string prefix;  // "blocks.0.attention.q": tensor .weight and, if `bias`, tensor .bias
  int out_features;
  bool bias;
  std::string bias_prefix = {};  // of the bias, if it differs

  std::string bias_name() const { return (bias_prefix.empty() ? prefix : bias_prefix) + ".bias"; }
};

// Loads a dense linear layer whose parts all have the same QuantizationOf(), and whose outputs are
// the outputs of `parts`, one after the other. `bf16_rows`: a run in bf16 multiplies only bf16 rows
// by the layer, so that weights of FP8 may stay as stored (ModelOptions::keep_fp8).
Result<std::unique_ptr<LinearBank>> LoadLinear(LoadContext& load, int in_features,
                                               const std::vector<LinearPart>& parts,
                                               bool bf16_rows = false);

// Loads the outputs [first, first + count), at least one, of such a layer with a single part.
// Without a packed cache.
Result<std::unique_ptr<LinearBank>> LoadLinearOutputs(LoadContext& load, int in_features,
                                                      const LinearPart& part, int first, int count);

// A dense linear layer whose parts may have different types of weights. Immutable after loading.
class StackedLinear {
 public:
  // The outputs are those of `parts`, one after the other. `bf16_rows` is that of LoadLinear().
  static Result<StackedLinear> Load(LoadContext& load, int in_features,
                                    const std::vector<LinearPart>& parts, bool bf16_rows = false);
  // `norm` is that of LinearArgs.
  void Run(Backend& backend, const RowsView& input, const RowsView& output,
           const AddNormArgs* norm = nullptr) const;

 private:
  struct Product {
    std::unique_ptr<LinearBank> bank;
    int first_column;
    int columns;
  };
  std::vector<Product> products_;  // one for each run of parts with the same type
};

// Names of a bank's tensors. Expert e's matrix is prefixes[e] + "." + main + ".weight"; if `gate`
// is set, the gate matrix is prefixes[e] + "." + gate + ".weight".
struct BankNames {
  std::vector<std::string> prefixes;
  std::string main;                 // "up", "down", "q", "o"
  std::optional<std::string> gate;  // "gate"
};
// Loads a bank with one matrix per expert. in_features has one value per expert, or one for all
// experts. `routed`: the bank is used with routing plans only, and lacks the matrices of experts
// that are not here. Null: it has all.
Result<std::unique_ptr<LinearBank>> LoadBank(LoadContext& load, const std::vector<int>& in_features,
                                             const std::vector<int>& out_features,
                                             const BankNames& names, bool bias,
                                             const RoutedExperts* routed = nullptr);

// Loads norms of the kind NormSpec::kind, one per prefix: tensor prefixes[g] + ".weight"
// [widths[g]], for layer norms also ".bias".
Result<std::unique_ptr<NormBank>> LoadNorm(LoadContext& load,
                                           const std::vector<std::string>& prefixes,
                                           const std::vector<int>& widths);
// The same for rows of ModelSpec::hidden_size, which have NormSpec::groups.
Result<std::unique_ptr<NormBank>> LoadRowNorm(LoadContext& load, const std::string& prefix,
                                              int width);
// Loads an RMS norm without bias, whatever NormSpec::kind is; used for queries and keys. `parts` is
// that of NormShape.
Result<std::unique_ptr<NormBank>> LoadRmsNorm(LoadContext& load, const std::string& prefix,
                                              int width, int parts = 1);
// Returns an RMS norm without a weight.
Result<std::unique_ptr<NormBank>> NewPlainNorm(LoadContext& load, int width);

PositionScale ScaleOf(const QueryScaleSpec& spec);

// Loads the tensor `name` [width] as f32.
Result<std::unique_ptr<DeviceBuffer>> LoadVector(LoadContext& load, const std::string& name,
                                                 int width);

// Loads a table of ModelSpec::relative_bias, which must be set: that of a layer, or the one that
// all layers share.
Result<RelativeBiases> LoadRelativeBiases(LoadContext& load, const ModelSpec& spec,
                                          std::optional<int> layer = std::nullopt);

Result<std::unique_ptr<Router>> LoadRouter(LoadContext& load, const std::string& prefix,
                                           const RoutedLayerSpec& spec, int input_width);

}  // namespace moeserve
