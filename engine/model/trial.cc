#include "engine/model/trial.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/error_text.h"
#include "base/steady_clock.h"
#include "engine/model/output_head.h"

namespace moeserve {
namespace {

constexpr int kTokens = std::min(8, kPageTokens);

// As many rows as decoding steps may have, so that the start does not take much longer.
constexpr int kTimedRows = 64;

// Returns the pages that `tokens` tokens take.
std::vector<int32_t> PagesOf(int tokens) {
  std::vector<int32_t> pages;
  for (int p = 0; p * kPageTokens < tokens; ++p) pages.push_back(p);
  return pages;
}

// Returns a prompt of `tokens` tokens over `pages` of `cache`, to which the batch refers, without
// rows of outputs.
Batch TrialBatch(const Model& model, const KvCacheStorage& cache, StateStorage* states, int tokens,
                 const std::vector<int32_t>& pages) {
  const ModelSpec& spec = model.spec();
  const int vocab = std::min(spec.vocab_size, PromptVocabulary(spec));  // ids of both stacks
  Batch batch;
  for (int i = 0; i < tokens; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(int64_t{i} * vocab / tokens));
    batch.positions.push_back(i);
    batch.sequence.push_back(0);
    batch.phase.push_back(Phase::kPrefill);
  }
  batch.tables = cache.num_tables();
  batch.page_tables.assign(static_cast<size_t>(batch.tables), pages);
  if (states != nullptr) {
    states->Clear(0);
    batch.states.Add(*states, 0, tokens);
  }
  if (spec.kind != ModelKind::kDecoder) batch.lengths.assign(batch.page_tables.size(), tokens);
  return batch;
}

}  // namespace

absl::Status TryModel(Model& model, KvCacheStorage& cache, StateStorage* states) {
  const ModelSpec& spec = model.spec();
  const std::vector<int32_t> pages = PagesOf(kTokens);
  Batch batch = TrialBatch(model, cache, states, kTokens, pages);
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

absl::Duration PredictLongStep(Model& model, KvCacheStorage& cache, StateStorage* states,
                               int rows) {
  int timed = std::min(rows, kTimedRows);
  for (int t = 0; t < cache.num_tables(); ++t) {
    timed = static_cast<int>(std::min<int64_t>(timed, cache.num_pages(t) * kPageTokens));
  }
  const std::vector<int32_t> pages = PagesOf(timed);
  absl::Duration longest;
  for (int runs = 0; runs < 2; ++runs) {
    const Batch batch = TrialBatch(model, cache, states, timed, pages);
    const absl::Time start = SteadyNow();
    if (model.spec().encoder != nullptr) model.EncodeSources(batch, cache, StepOptions{});
    const absl::Time middle = SteadyNow();
    model.Forward(batch, cache, StepOptions{}, {});
    longest = std::max(middle - start, SteadyNow() - middle);
  }
  return longest * (static_cast<double>(std::max(rows, timed)) / timed);
}

}  // namespace moeserve
