// Runs a model without an engine and returns its logits.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/model.h"
#include "engine/model/output_head.h"
#include "engine/step/batch.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/devices.h"

namespace moeserve::testing {

struct RunnerOptions {
  DType compute = DType::kF32;
  Quantization quantization = Quantization::kNone;  // requires compute kBF16
  std::optional<KvCacheType> cache = std::nullopt;  // nullopt selects the compute type
  std::string device = TestDevice();
  std::string isa = "auto";
  int threads = 2;
  int64_t cache_tokens = 4096;
  LoadOptions load = {.require_tokenizer = false};
  std::filesystem::path packed_folder = {};  // of a packed cache; empty: none
  TierOptions tiers = {};
  // The ranks that run the model together, each with a ModelRunner of its own; null: one.
  Exchange* exchange = nullptr;
  // The experts of the ranks.
  std::function<ExpertPlacement(const ModelSpec&, int ranks)> placement = ExpertPlacement::Balanced;
  SplitChoice split_rows = SplitChoice::kAuto;
  SplitChoice split_head = SplitChoice::kAuto;  // if divided, only the leader returns logits
  SplitChoice owner_sums = SplitChoice::kAuto;
  bool keep_fp8 = false;  // ModelOptions::keep_fp8
  // Rounds the matrices of experts and of attention to FP8 with a scale for 128 columns of a row,
  // as which they can be kept.
  bool round_to_fp8 = false;
  std::optional<bool> mxfp4 = std::nullopt;  // replaces HostTensor::mxfp4 of all weights
};

// Returns the value of a number of FP8 (E4M3), but not of NaN.
float Fp8AsF32(int code);

// How ModelRunner runs its steps.
struct StepSetup {
  StepOptions options;
  std::vector<const GivenRoutes*> given = {};               // see Batch
  std::function<void(const StepReport&)> report = nullptr;  // called after every step
  // If set, receives the outputs of the texts, [parts, TextOutputs()]; requires a pooling.
  std::vector<float>* texts = nullptr;
};

// One model with its own backend and cache. Each sequence has a fixed part of the cache, a slot.
class ModelRunner {
 public:
  static Result<std::unique_ptr<ModelRunner>> Load(const std::filesystem::path& model,
                                                   const RunnerOptions& options = {});

  // Returns the logits of every token, [tokens, RowOutputs()], computed in steps of at most `chunk`
  // tokens from position `begin` on. Earlier positions must have been run before; if the model has
  // states, the one before `begin` must be the last that was run. Different sequences use different
  // slots.
  std::vector<float> Run(const std::vector<int32_t>& tokens, int chunk, int begin = 0,
                         const StepSetup& setup = {}, int slot = 0);

  // Runs one step over parts of several sequences. Returns the logits of all rows in order. For
  // long rope scaling, a sequence counts as long if it is long at the end of its part.
  struct Part {
    int slot;
    int begin;
    std::vector<int32_t> tokens;
    std::vector<uint8_t> types = {};  // of the tokens; empty: all 0
  };
  std::vector<float> RunTogether(const std::vector<Part>& parts, const StepSetup& setup = {});

  // Runs the prediction layers on `next`, the tokens behind those at `begin`, ... of a sequence,
  // which the last step computed from its row `source` on. Returns the logits of all rows. With
  // `predicted`, the source rows are those of the last call of this function.
  std::vector<float> Predict(const std::vector<int32_t>& next, int begin, int source = 0,
                             bool predicted = false, int slot = 0);

  const ModelSpec& spec() const { return model_->spec(); }
  Backend& backend() { return *backend_; }
  Model& model() { return *model_; }
  // Returns how many banks were found in RunnerOptions::packed_folder.
  int packed_found() const { return packed_found_; }
  int vocab() const { return model_->spec().vocab_size; }
  // The number of sequences that the cache can store; each has capacity for kTokensPerSlot tokens.
  static constexpr int kTokensPerSlot = 256;
  int slots() const { return static_cast<int>(tables_.size()); }

 private:
  // Adds what the step computes of whole texts, and makes room for it.
  void AddTexts(const std::vector<Part>& parts, Batch& batch, std::vector<float>& texts) const;
  // Adds the rows of a part to the states of a step.
  void AddStates(const Part& part, BatchStates& states);

  std::unique_ptr<Backend> backend_;
  ExpertPlacement placement_;  // with ranks
  std::unique_ptr<Model> model_;
  int packed_found_ = 0;
  std::unique_ptr<KvCacheStorage> cache_;
  std::unique_ptr<KvCacheStorage> predicted_;  // null without prediction layers
  std::unique_ptr<StateStorage> states_;       // null if the model has none
  std::vector<int> state_tokens_;              // [slots] how many tokens a slot's state covers
  std::vector<std::vector<int32_t>> tables_;
};

// Returns the natural logarithm of the softmax at `token`.
double LogSoftmaxAt(const float* logits, int vocab, int token);

}  // namespace moeserve::testing
