// What the readers of GGUF files of all kinds of models share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/gguf/gguf_keys.h"
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// The functions collect errors in problems_; what they return counts only if there are none.
class GgufModelReader {
 protected:
  // All arguments must outlive the object. `architecture` is that of the file.
  GgufModelReader(const GgufFile& file, const WeightFiles& weights, std::string_view architecture,
                  const std::vector<std::string>& ignored);
  ~GgufModelReader() = default;

  bool Has(std::string_view tensor) const { return stored_.contains(tensor); }
  // Returns the rows of a stored matrix; 1 of a vector, 0 if there is no such tensor.
  int64_t RowsOf(std::string_view tensor) const;

  // Reads the numbers of layers, elements, positions and tokens; `eps` is the key of the norms.
  void ReadSizes(std::string_view eps);
  void ReadTokenIds();
  // What was read of heads before the rest.
  struct KnownHeads {
    std::string_view head_dim = ".attention.key_length";  // the key of their width
    std::optional<int> heads = std::nullopt;              // their numbers
    std::optional<int> kv_heads = std::nullopt;
    bool value_widths = false;  // values may be of another width
  };
  // Returns the settings of heads.
  AttentionSpec ReadHeads(const KnownHeads& known);
  // Returns `count` widths of experts, if the model may have so many; else reports `key`.
  std::vector<int> ExpertWidths(std::string_view key, int count, int width);

  // What a file does not say about a model's head.
  struct TextHead {
    bool generates = false;  // unless the file names a pooling, the model generates texts
    PoolingKind scored = PoolingKind::kFirst;  // of the rows, before labels are scored
    HeadLayerSpec layer;                       // in front of the scores of labels
  };
  // Reads whether the model generates texts, makes vectors of them, or scores labels of them, and
  // sets the head and the pooling of spec_.
  void ReadTextHead(const TextHead& head);
  bool generates() const { return spec_.head.kind == HeadKind::kLanguageModel; }

  // Returns what stands in front of messages about the metadata.
  std::string Prefix() const;
  // Completes a configuration whose layers are set, and checks it.
  ConfigResult Finish(std::unique_ptr<NameTableConfig> config);

  const GgufFile& file_;
  const WeightFiles& weights_;
  Problems problems_;
  GgufKeys keys_;
  StoredNames stored_;

  ModelSpec spec_;  // without layers
  int layers_ = 0;
  std::vector<std::string> decisions_;  // CheckpointConfig::decisions
  // The rows of cls.output.weight are in the opposite order of the labels.
  bool reversed_scores_ = false;

 private:
  void ReadLabels(const TextHead& head);
  // Returns whether the file is a reranker made of a decoder's head, and if so, sets its labels.
  bool ReadReranker();
};

}  // namespace moeserve
