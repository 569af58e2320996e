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

// What is added to the log-probabilities of labels where one label follows another, for labels of
// the form B-NAME (the first token of several), I-NAME, E-NAME (the last), S-NAME (the only one)
// and O (outside).
struct TransitionBiases {
  double background_stay = 0.0;      // O after O
  double background_to_start = 0.0;  // B or S after O
  double end_to_background = 0.0;    // O after E or S
  double end_to_start = 0.0;         // B or S after E or S
  double inside_to_continue = 0.0;   // I after B or I
  double inside_to_end = 0.0;        // E after B or I
};

// How texts are prepared before a vector is made of them, and what is done with the results.
struct TextSettings {
  std::optional<int> max_tokens;  // special tokens included
  // By their names, such as "query" and "search_query: ".
  std::vector<std::pair<std::string, std::string>> prompts;
  std::optional<std::string> default_prompt;  // one of these names
  // `matryoshka_dimensions` of config.json: the sizes to which vectors may be cut; empty: any.
  std::vector<int> dimensions;
  TransitionBiases transitions;  // of viterbi_calibration.json
};

// Reads modules.json, the configurations of the modules that it lists, sentence_bert_config.json,
// config_sentence_transformers.json, viterbi_calibration.json and the sizes of vectors in
// config.json, as far as the folder has them. Sets ModelSpec::pooling,
// unless the model classifies texts, and replaces `weights` by ones that also have the tensors of
// dense modules. InvalidArgument, with the file, for modules that are not computed and for damaged
// files.
Result<TextSettings> ApplySentenceTransformers(const std::filesystem::path& folder, ModelSpec& spec,
                                               std::unique_ptr<WeightSource>& weights);

}  // namespace moeserve
