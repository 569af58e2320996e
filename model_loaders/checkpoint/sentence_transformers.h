// What the files of sentence-transformers beside a model say: how rows become vectors of texts, the
// longest text, and texts that are put in front of others.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve {

// How texts are prepared before a vector is made of them.
struct TextSettings {
  std::optional<int> max_tokens;  // special tokens included
  // By their names, such as "query" and "search_query: ".
  std::vector<std::pair<std::string, std::string>> prompts;
  std::optional<std::string> default_prompt;  // one of these names
};

// Reads modules.json, the configurations of the modules that it lists, sentence_bert_config.json
// and config_sentence_transformers.json, as far as the folder has them. Sets ModelSpec::pooling,
// unless the model classifies texts, and replaces `weights` by ones that also have the tensors of
// dense modules. InvalidArgument, with the file, for modules that are not computed and for damaged
// files.
Result<TextSettings> ApplySentenceTransformers(const std::filesystem::path& folder, ModelSpec& spec,
                                               std::unique_ptr<WeightSource>& weights);

}  // namespace moeserve
