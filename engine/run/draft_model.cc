#include "engine/run/draft_model.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "base/error_text.h"

namespace moeserve {
namespace {

constexpr double kNewestDraftWeight = 0.1;  // the weight of a new time in the average of times

}  // namespace

absl::Status DraftModel::Check(const Model& model, const ModelSpec& verifier, int max_model_len) {
  const ModelSpec& spec = model.spec();
  if (spec.vocab_size != verifier.vocab_size) {
    return absl::InvalidArgumentError(Concat("draft model: expected a vocabulary of ",
                                             verifier.vocab_size, " tokens, found ",
                                             spec.vocab_size));
  }
  if (spec.max_position_embeddings < max_model_len) {
    return absl::InvalidArgumentError(
        Concat("draft model: expected a context length of max-model-len ", max_model_len,
               " or more, found ", spec.max_position_embeddings));
  }
  // A draft model sees the text that is generated, not its source.
  if (spec.encoder != nullptr) {
    return absl::InvalidArgumentError(
        "draft model: expected a decoder, found a model with an encoder");
  }
  if (!StateShapes(spec).empty()) {
    return absl::InvalidArgumentError(
        "draft model: expected attention in every layer, found layers with a state");
  }
  if (model.backend().samples_on_device()) {
    return absl::InvalidArgumentError(
        Concat("draft model: expected the device cpu, found ", model.backend().name()));
  }
  return absl::OkStatus();
}

void DraftModel::Propose(std::span<const Wanted> wanted) {
  std::vector<Sequence*> sequences;
  for (const Wanted& w : wanted) sequences.push_back(w.sequence);
  if (sequences.empty() || !CatchUp(sequences)) return;
  for (int count = 1;; ++count) {
    sequences.clear();
    for (const Wanted& w : wanted) {
      if (w.tokens > count) sequences.push_back(w.sequence);
    }
    if (sequences.empty()) return;
    Extend(sequences);
  }
}

bool DraftModel::CatchUp(std::span<Sequence* const> sequences) {
  Batch batch;
  int left = max_rows_;
  bool complete = true;
  for (Sequence* s : sequences) {
    // The last known token is always computed, for its logits.
    const int begin = std::min(s->memory.drafted_until, s->length() - 1);
    const int end = std::min(s->length(), begin + left);
    if (begin < end) Add(batch, *s, begin, end);
    left -= end - begin;
    s->memory.drafted_until = end;
    complete = complete && end == s->length();
  }
  if (!complete) batch.logit_rows.clear();  // those of some sequences are of no use
  if (complete) {
    for (Sequence* s : sequences) s->proposal = {};
  }
  Run(batch, complete ? sequences : std::span<Sequence* const>());
  return complete;
}

void DraftModel::Extend(std::span<Sequence* const> sequences) {
  Batch batch;
  for (Sequence* s : sequences) {
    const int at = s->length() + static_cast<int>(s->proposal.tokens.size()) - 1;
    Add(batch, *s, at, at + 1);
    s->memory.drafted_until = at + 1;
  }
  Run(batch, sequences);
}

void DraftModel::Add(Batch& batch, Sequence& s, int begin, int end) const {
  const int index = static_cast<int>(batch.page_tables.size());
  batch.page_tables.emplace_back(s.memory.pages());
  for (int i = begin; i < end; ++i) {
    batch.tokens.push_back(i < s.length() ? s.tokens[static_cast<size_t>(i)]
                                          : s.proposal.tokens[static_cast<size_t>(i - s.length())]);
    batch.positions.push_back(i);
    batch.sequence.push_back(index);
    batch.phase.push_back(Phase::kDecode);
  }
  batch.logit_rows.push_back(batch.num_tokens() - 1);
}

void DraftModel::Run(const Batch& batch, std::span<Sequence* const> sequences) {
  const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
  logits_.resize(std::max(logits_.size(), batch.logit_rows.size() * vocab));
  const auto begin = std::chrono::steady_clock::now();
  model_->Forward(batch, *cache_, {}, {.logits = logits_});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  // Steps that compute much more than the last tokens do not count: they happen once a prompt.
  if (batch.num_tokens() <= 2 * std::ssize(sequences)) {
    const double weight = seconds_per_token_ == 0.0 ? 1.0 : kNewestDraftWeight;
    seconds_per_token_ += weight * (seconds.count() - seconds_per_token_);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::span<float> row(logits_.data() + i * vocab, vocab);
    for (const TokenId id : textless_.ids()) {
      row[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
    }
    // If logits are NaN, there may be no largest one; any token will do.
    const TokenId best = ArgMax(row);
    sequences[i]->proposal.tokens.push_back(static_cast<size_t>(best) < vocab ? best : 0);
  }
}

}  // namespace moeserve
