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
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/files/object_reader.h"
#include "nlohmann/json.hpp"

namespace moeserve::fairseq {

// What a family's tables say about its files, beside what those of all families have in common: the
// names of embeddings, norms, dense attention and sizes. The texts must outlive the configuration.
struct Tables {
  std::span<const TensorRule> tensors;
  std::span<const KeyRule> keys;
  std::span<const std::string_view> ignored;  // patterns of stored tensors that are not needed
};

// Reads the options of one checkpoint and looks at its tensors. Collects all errors; Finish() comes
// last and returns them. Values that are read after an error are defaults or zero.
class Reader {
 public:
  // `source` must outlive the object.
  explicit Reader(const FairseqSource& source);

  ObjectReader& keys() { return keys_; }
  ModelSpec& spec() { return spec_; }
  int layers() const { return layers_; }
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

  // Adds a sentence to CheckpointConfig::decisions.
  void Decide(std::string_view sentence) { decisions_.emplace_back(sentence); }

  // Reads the sizes, the factor and the norm of the embeddings, and the token ids, which are the
  // same in all vocabularies of fairseq.
  void ReadSizes();
  // Returns the positions that are added to the embeddings; kind kNone if there are none.
  PositionSpec AddedPositions();
  // Decides whether the LM head is the embedding matrix. `shared` is what the options say.
  void ReadHead(bool shared);
  // Checks that the number of experts is one that a model may have in `routed` of its layers.
  // Returns whether it is.
  bool CheckExperts(std::string_view key, int experts, int64_t routed);

  // Reads "decoder_attention_heads": the number of heads, as many kv heads, their width and scale.
  AttentionSpec Heads();
  // Reads the activation of fairseq's own feed-forwards.
  ActivationKind Activation();

  // Refuses options that no function read and whose names are like those of options that change a
  // model. Builds and validates the configuration.
  ConfigResult Finish(const Tables& tables, std::vector<LayerSpec> layers);
  // The same for layers that are all alike.
  ConfigResult Finish(const Tables& tables, const LayerSpec& layer);

 private:
  void RefuseUnknown();

  const FairseqSource& source_;
  const std::string prefix_;  // of error messages
  Problems problems_;
  ObjectReader keys_;
  StoredNames stored_;
  ModelSpec spec_;
  int layers_ = 0;
  bool ignore_head_ = false;  // the files store the LM head although it is the embedding matrix
  std::vector<std::string> decisions_;
};

// The families.
ConfigResult ReadTorchscale(const FairseqSource& source);
ConfigResult ReadMoa(const FairseqSource& source);
ConfigResult ReadTransformerLm(const FairseqSource& source);

// Returns what precedes a problem with an option of this checkpoint in messages.
std::string MessagePrefix(const FairseqSource& source);

}  // namespace moeserve::fairseq
