#include "engine/model/trial.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/error_text.h"
#include "engine/model/output_head.h"

namespace moeserve {
namespace {

constexpr int kTokens = std::min(8, kPageTokens);

}  // namespace

absl::Status TryModel(Model& model, KvCacheStorage& cache, StateStorage* states) {
  const std::vector<int32_t> blocks = {0};
  const ModelSpec& spec = model.spec();
  const int vocab = std::min(spec.vocab_size, PromptVocabulary(spec));  // ids of both stacks
  Batch batch;
  for (int i = 0; i < kTokens; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(int64_t{i} * vocab / kTokens));
    batch.positions.push_back(i);
    batch.sequence.push_back(0);
    batch.phase.push_back(Phase::kPrefill);
  }
  batch.tables = cache.num_tables();
  batch.page_tables.assign(static_cast<size_t>(batch.tables), blocks);
  if (states != nullptr) {
    states->Clear(0);
    batch.states.Add(*states, 0, kTokens);
  }
  if (spec.kind != ModelKind::kDecoder) batch.lengths.assign(batch.page_tables.size(), kTokens);
  if (spec.encoder != nullptr) model.EncodeSources(batch, cache, StepOptions{});
  if (RowOutputs(spec) > 0) batch.logit_rows = {kTokens - 1};
  if (TextOutputs(spec) > 0) batch.text_rows = {kTokens - 1};
  std::vector<float> logits(static_cast<size_t>(RowOutputs(spec)));
  std::vector<float> texts(static_cast<size_t>(TextOutputs(spec)));
  const StepReport report =
      model.Forward(batch, cache, StepOptions{}, {.logits = logits, .texts = texts});
  MOESERVE_RETURN_IF_ERROR(model.CheckFiles());
  const bool routed = std::none_of(report.failed.begin(), report.failed.end(),
                                   [](uint8_t failed) { return failed != 0; });
  const auto is_finite = [](float value) { return std::isfinite(value); };
  const bool finite =
      std::ranges::all_of(logits, is_finite) && std::ranges::all_of(texts, is_finite);
  if (routed && finite) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("the model was tried with ", kTokens, " tokens: expected finite results, found ",
             routed ? "outputs" : "router scores",
             " that are not finite; its weights are damaged, or too large for the compute type"));
}

}  // namespace moeserve
