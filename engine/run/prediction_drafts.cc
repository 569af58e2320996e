#include "engine/run/prediction_drafts.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "kernels/base/sampling.h"

namespace moeserve {
namespace {

constexpr double kNewestPredictionWeight = 0.1;  // of a new time in the average of times

}  // namespace

void PredictionDrafts::Propose(std::span<const SequencePtr> running,
                               std::span<const DraftModel::Wanted> wanted) {
  Batch batch;
  std::vector<int32_t> sources;
  std::vector<Chain> chains;
  for (const SequencePtr& s : running) {
    const bool predicts = AddKnown(*s, batch, sources);
    const auto found =
        std::ranges::find(wanted, s.get(), [](const auto& want) { return want.sequence; });
    if (!predicts || found == wanted.end()) continue;
    s->proposal = {};
    chains.push_back({.wanted = *found, .row = batch.num_tokens() - 1});
    batch.logit_rows.push_back(batch.num_tokens() - 1);
  }
  Run(batch, {.rows = sources}, chains);
  while (true) {
    batch = {};
    sources.clear();
    AddNext(chains, batch, sources);
    if (chains.empty()) return;
    Run(batch, {.rows = sources, .predicted = true}, chains);
  }
}

bool PredictionDrafts::AddKnown(Sequence& s, Batch& batch, std::vector<int32_t>& sources) const {
  const PredictableRows known = std::exchange(s.predictable, {});
  if (known.step != step_) return false;
  const int end = std::min(
      {known.begin + known.count, s.length() - 1, known.begin + max_rows_ - batch.num_tokens()});
  if (known.begin >= end) return false;
  const int index = static_cast<int>(batch.page_tables.size());
  batch.page_tables.emplace_back(s.memory.pages());
  for (int i = known.begin; i < end; ++i) {
    AddRow(batch, index, s.tokens[static_cast<size_t>(i) + 1], i);
    batch.long_sequence.push_back(s.is_long ? 1 : 0);
    sources.push_back(known.row + i - known.begin);
  }
  return end == s.length() - 1;
}

void PredictionDrafts::AddNext(std::vector<Chain>& chains, Batch& batch,
                               std::vector<int32_t>& sources) const {
  std::erase_if(chains, [](const Chain& chain) {
    return std::ssize(chain.wanted.sequence->proposal.tokens) >= chain.wanted.tokens;
  });
  for (Chain& chain : chains) {
    Sequence& s = *chain.wanted.sequence;
    const std::vector<TokenId>& proposed = s.proposal.tokens;
    const int index = static_cast<int>(batch.page_tables.size());
    batch.page_tables.emplace_back(s.memory.pages());
    AddRow(batch, index, proposed.back(), s.length() + static_cast<int>(proposed.size()) - 2);
    batch.long_sequence.push_back(s.is_long ? 1 : 0);
    sources.push_back(std::exchange(chain.row, index));
    batch.logit_rows.push_back(index);
  }
}

void PredictionDrafts::AddRow(Batch& batch, int sequence, TokenId token, int position) {
  batch.tokens.push_back(token);
  batch.positions.push_back(position);
  batch.sequence.push_back(sequence);
  batch.phase.push_back(Phase::kDecode);
}

void PredictionDrafts::Run(Batch& batch, const PredictionSources& sources,
                           std::span<const Chain> chains) {
  if (batch.num_tokens() == 0) return;
  if (std::ranges::count(batch.long_sequence, 1) == 0) batch.long_sequence.clear();
  const auto vocab = static_cast<size_t>(model_.spec().vocab_size);
  const bool on_device = model_.backend().samples_on_device();
  if (on_device) {
    SampleRow greedy{};
    greedy.scale = SamplingScale(0.0);
    greedy.logprobs = -1;
    greedy.drawable = textless_.drawable().value_or(0);
    batch.samples.assign(chains.size(), greedy);
    for (size_t i = 0; i < chains.size(); ++i) batch.samples[i].row = static_cast<int>(i);
    drawn_.resize(chains.size());
  } else {
    logits_.resize(std::max(logits_.size(), chains.size() * vocab));
  }
  const auto begin = std::chrono::steady_clock::now();
  model_.Predict(batch, sources, *cache_, {.logits = logits_, .samples = drawn_});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  // Steps that compute prompts, or that propose for few of the sequences, do not count.
  if (batch.num_tokens() <= 2 * std::ssize(chains)) {
    const double weight = seconds_per_token_ == 0.0 ? 1.0 : kNewestPredictionWeight;
    seconds_per_token_ += weight * (seconds.count() - seconds_per_token_);
  }
  for (size_t i = 0; i < chains.size(); ++i) {
    TokenId best = 0;
    if (on_device) {
      best = drawn_[i].token;
    } else {
      const std::span<float> row(logits_.data() + i * vocab, vocab);
      for (const TokenId id : textless_.ids()) {
        row[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
      }
      best = ArgMax(row);
    }
    // If logits are NaN, there may be no largest one; any token will do.
    const bool valid = best >= 0 && static_cast<size_t>(best) < vocab;
    chains[i].wanted.sequence->proposal.tokens.push_back(valid ? best : 0);
  }
}

}  // namespace moeserve
