// What the readers of fairseq checkpoints have in common.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/fairseq/fairseq_config.h"
#include "model_loaders/architectures/fairseq/tables.h"
#include "model_loaders/files/object_reader.h"
#include "nlohmann/json.hpp"

namespace moeserve::fairseq {

// The blocks of each layer.
using Layers = std::vector<std::vector<BlockSpec>>;

// Reads the options of one checkpoint and looks at its tensors. Collects all errors; Finish() comes
// last and returns them. Values that are read after an error are defaults or zero.
//
// A model has a decoder, an encoder or both. Most functions concern one of them, the current stack.
class Reader {
 public:
  // `source` must outlive the object.
  explicit Reader(const FairseqSource& source);

  // The names of the stacks that the files have; an encoder comes before its decoder.
  std::vector<std::string_view> stacks() const;
  bool pair() const { return set_.pair(); }
  // Makes a stack the current one.
  void Use(std::string_view stack);
  bool in_encoder() const { return current_ == &encoder_; }
  // Return the names of an option, of a tensor and of what begins the names of a layer's tensors in
  // the current stack.
  std::string Key(std::string_view option) const { return Concat(current_->name, '_', option); }
  std::string Tensor(std::string_view name) const { return Concat(current_->name, '.', name); }
  std::string Layer(int i) const { return Concat(current_->name, ".layers.", i, '.'); }

  ObjectReader& keys() { return keys_; }
  ModelSpec& spec() { return current_->spec; }
  // The number of layers according to the options: of the current stack, or of both.
  int layers() const { return current_->layers; }
  int encoder_layers() const { return encoder_.layers; }
  int decoder_layers() const { return decoder_.layers; }
  void SetLayers(Layers layers) { current_->blocks = std::move(layers); }
  // All layers of the current stack are alike.
  void SetLayers(const std::vector<BlockSpec>& layer);
  bool ok() const { return problems_.empty(); }

  bool RequiredBool(std::string_view key);
  // Reads an integer, or returns `fallback` if the option is absent or -1.
  int IntOrUnset(std::string_view key, int fallback);
  // Refuses any value of `key` except `value`. `why` says what the engine lacks.
  void Require(std::string_view key, const nlohmann::json& value, std::string_view why);
  void Fault(std::string_view key, std::string_view expected, std::string_view found) {
    keys_.Fault(key, expected, found);
  }
  // The options do not change a model's answers.
  void Ignore(std::span<const std::string_view> keys);

  // Returns null if there is no tensor of this name.
  const TensorEntry* Find(std::string_view tensor) const;
  bool Has(std::string_view tensor) const { return Find(tensor) != nullptr; }
  // Returns whether there is a tensor whose name begins with `prefix`.
  bool HasAny(std::string_view prefix) const;
  const StoredNames& stored() const { return stored_; }

  // Adds a sentence to CheckpointConfig::decisions, unless it is there already.
  void Decide(std::string_view sentence);

  // Reads of all stacks the sizes, the factor and the norm of the embeddings and the token ids,
  // which are the same in all vocabularies of fairseq. Decides which tables of tokens are the same.
  void ReadSizes();
  // Returns the positions that are added to the embeddings; kind kNone if there are none.
  PositionSpec AddedPositions();
  // Reads the head, which is that of the decoder or, of an encoder alone, one of masked tokens or
  // of classification. `activation` is that of the encoder's layers.
  void ReadHead(ActivationKind activation);
  // Checks that the number of experts is one that a model may have in `routed` of its layers.
  // Returns whether it is.
  bool CheckExperts(std::string_view key, int experts, int64_t routed);

  // Reads "decoder_attention_heads": the number of heads, as many kv heads, their width and scale.
  AttentionSpec Heads();
  // Refuses options that switch attention to a source off or join it with another.
  void RequireCrossAttention();
  // Reads the activation of fairseq's own feed-forwards.
  ActivationKind Activation();

  // Refuses options that no function read and whose names are like those of options that change a
  // model. Builds and validates the configuration.
  ConfigResult Finish(const Tables& tables);

 private:
  struct StackOptions {
    std::string_view name;
    ModelSpec spec = {};
    int layers = 0;
    Layers blocks = {};
  };

  void ReadStackSizes();
  // Returns the number of rows of a table of tokens; 0 if there is none.
  int ReadVocabulary(const std::string& tensor);
  // Returns whether both tensors have the same data.
  bool Same(const std::string& a, const std::string& b);
  void ReadSharedTables();
  void ReadDecoderHead();
  void ReadTokenHead(ActivationKind activation);
  void ReadClassifier(const std::string& name);
  void RefuseUnknown();
  absl::Status AddBlocks(StackOptions& stack);

  const FairseqSource& source_;
  const std::string prefix_;  // of error messages
  Problems problems_;
  ObjectReader keys_;
  StoredNames stored_;
  StackOptions decoder_{.name = kDecoderName};
  StackOptions encoder_{.name = kEncoderName};
  StackOptions* current_ = &decoder_;
  StackSet set_;
  std::vector<std::string> decisions_;
};

// The families.
ConfigResult ReadTorchscale(const FairseqSource& source);
ConfigResult ReadMoa(const FairseqSource& source);
ConfigResult ReadTransformerLm(const FairseqSource& source);

// Returns what precedes a problem with an option of this checkpoint in messages.
std::string MessagePrefix(const FairseqSource& source);

}  // namespace moeserve::fairseq
