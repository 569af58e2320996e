#include "model_loaders/checkpoint/checkpoint_notes.h"

#include <algorithm>
#include <iterator>

#include "base/error_text.h"
#include "model_loaders/checkpoint/tensor_check.h"

namespace moeserve {
namespace {

bool IsOfPrediction(const CheckpointConfig& config, std::string_view stored) {
  return !config.prediction_prefix.empty() &&
         stored.find(config.prediction_prefix) != std::string_view::npos;
}

}  // namespace

std::vector<std::string> CheckpointNotes(const CheckpointConfig& config,
                                         const std::vector<std::string>& ignored,
                                         const LoadOptions& options) {
  std::vector<std::string> notes = config.decisions;
  const auto list = [&](std::string_view what, const std::vector<std::string>& keys) {
    std::string text;
    for (const std::string& key : keys) text.append(Concat(text.empty() ? "" : ", ", key));
    if (!keys.empty()) notes.push_back(Concat(config.key_place, ": ", what, ": ", text));
  };
  list("these keys do not change the model's answers", config.ignored_keys);
  list("read without these keys, as --ignore-config says", options.ignored_keys);
  std::vector<std::string> others;
  std::copy_if(ignored.begin(), ignored.end(), std::back_inserter(others),
               [&](const std::string& name) { return !IsOfPrediction(config, name); });
  if (const size_t count = ignored.size() - others.size(); count > 0) {
    notes.push_back(Concat("tensors that the model does not need: those of prediction layers, ",
                           config.prediction_prefix, "* (", count, " tensors)"));
  }
  for (const std::string& names : GroupedNames(others)) {
    notes.push_back(Concat("tensors that the model does not need: ", names));
  }
  return notes;
}

void SetContextReason(const CheckpointConfig& config, Checkpoint* checkpoint) {
  checkpoint->context_reason = config.context_reason;
  if (config.context_reason.empty()) return;
  checkpoint->warnings.push_back(Concat(config.key_place, ": texts have at most ",
                                        config.spec.max_position_embeddings, " tokens, fewer than ",
                                        config.AsInFile("max_position_embeddings"),
                                        " says: ", config.context_reason));
}

std::string IdentityText(std::string_view config_text, const LoadOptions& options) {
  std::string text(config_text);
  for (const std::string& key : options.ignored_keys) text.append(Concat("\nwithout ", key));
  return text;
}

}  // namespace moeserve
