#include "engine/draft/draft_model.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "base/message.h"

namespace moeserve {

Result<std::unique_ptr<DraftModel>> DraftModel::Create(std::unique_ptr<Model> model,
                                                       std::unique_ptr<KvCacheStorage> cache,
                                                       const ModelSpec& verifier, int max_model_len,
                                                       int max_rows, const TextlessIds& textless) {
  const ModelSpec& spec = model->spec();
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
  if (model->backend().samples_on_device()) {
    return absl::InvalidArgumentError(Concat("draft model: expected the device cpu, found ",
                                             model->backend().name()));
  }
  return std::unique_ptr<DraftModel>(
      new DraftModel(std::move(model), std::move(cache), max_rows, textless));
}

void DraftModel::Propose(std::span<Sequence* const> sequences, int count) {
  for (Sequence* s : sequences) s->proposal = {};
  if (count < 1 || sequences.empty() || !CatchUp(sequences)) return;
  for (int i = 1; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    Extend(sequences);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    seconds_per_token_ += (seconds_per_token_ == 0.0 ? 1.0 : 0.1) * (seconds - seconds_per_token_);
  }
}

bool DraftModel::CatchUp(std::span<Sequence* const> sequences) {
  Batch batch;
  int left = max_rows_;
  for (Sequence* s : sequences) {
    // The last known token is always computed, for its logits.
    const int begin = std::min(s->drafted_until, s->length() - 1);
    const int end = std::min(s->length(), begin + left);
    if (begin < end) Add(batch, *s, begin, end);
    left -= end - begin;
    s->drafted_until = end;
  }
  const bool complete = std::all_of(sequences.begin(), sequences.end(), [](const Sequence* s) {
    return s->drafted_until == s->length();
  });
  // Without the logits of all sequences, those of some are of no use.
  if (!complete) batch.logit_rows.clear();
  Run(batch, complete ? sequences : std::span<Sequence* const>());
  return complete;
}

void DraftModel::Extend(std::span<Sequence* const> sequences) {
  Batch batch;
  for (Sequence* s : sequences) {
    const int at = s->length() + static_cast<int>(s->proposal.tokens.size()) - 1;
    Add(batch, *s, at, at + 1);
    s->drafted_until = at + 1;
  }
  Run(batch, sequences);
}

void DraftModel::Add(Batch& batch, Sequence& s, int begin, int end) const {
  const int index = static_cast<int>(batch.block_tables.size());
  batch.block_tables.emplace_back(s.blocks);
  for (int i = begin; i < end; ++i) {
    batch.tokens.push_back(i < s.length()
                               ? s.tokens[static_cast<size_t>(i)]
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
  model_->Forward(batch, *cache_, {}, logits_);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::span<float> row(logits_.data() + i * vocab, vocab);
    for (const TokenId id : textless_.ids()) {
      row[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
    }
    sequences[i]->proposal.tokens.push_back(ArgMax(row));
  }
}

}  // namespace moeserve
