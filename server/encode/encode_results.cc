#include "server/encode/encode_results.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "server/base/utf8.h"
#include "server/encode/label_scores.h"

namespace moeserve::server {
namespace {

void FinishVectors(const EncodeJob& job, const ModelSpec& spec, EncodeResult& result) {
  const auto width = static_cast<size_t>(result.width);
  const auto keep = static_cast<size_t>(job.dimensions.value_or(result.width));
  const size_t rows = result.values.size() / width;
  const bool normalize = job.activation.value_or(spec.pooling->normalize);
  for (size_t r = 0; r < rows; ++r) {
    const std::span<float> row(result.values.data() + r * keep, keep);
    if (keep < width) std::copy_n(result.values.data() + r * width, keep, row.data());
    if (normalize) NormalizeVector(row);
  }
  result.values.resize(rows * keep);
  result.width = static_cast<int>(keep);
}

}  // namespace

void FinishValues(const EncodeJob& job, const ModelSpec& spec, EncodeResult& result) {
  if (result.width == 0 || job.task == EncodeTask::kFillMask) return;
  const bool vectors =
      spec.head.kind != HeadKind::kSequenceClassification && job.task != EncodeTask::kTokenClassify;
  if (vectors) {
    // Similarities do not depend on lengths.
    if (job.task != EncodeTask::kScore) FinishVectors(job, spec, result);
    return;
  }
  // The scores of spans are probabilities of positions, not of labels.
  if (job.aggregation || !job.activation.value_or(true) || spec.head.kind == HeadKind::kSpans) {
    return;
  }
  const auto width = static_cast<size_t>(result.width);
  for (size_t at = 0; at + width <= result.values.size(); at += width) {
    ScoreLabels(spec.head.scores, std::span<float>(result.values).subspan(at, width));
  }
}

const std::string& BestLabel(const ModelSpec& spec, const EncodeResult& result) {
  const auto best = std::ranges::max_element(result.values) - result.values.begin();
  return spec.head.labels[static_cast<size_t>(best)];
}

std::vector<float> PairScores(const EncodeJob& job, const ModelSpec& spec,
                              const std::vector<const EncodeResult*>& results) {
  std::vector<float> scores;
  if (spec.head.kind == HeadKind::kSequenceClassification) {
    // Of two labels, the second says that the texts belong together.
    for (const EncodeResult* result : results) scores.push_back(result->values.back());
    return scores;
  }
  for (const auto& [a, b] : job.pairs) {
    scores.push_back(
        CosineOf(results[static_cast<size_t>(a)]->values, results[static_cast<size_t>(b)]->values));
  }
  return scores;
}

std::vector<size_t> Ranking(const std::vector<float>& scores, std::optional<int> top) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  if (top && static_cast<size_t>(*top) < order.size()) order.resize(static_cast<size_t>(*top));
  return order;
}

std::vector<TextEntity> TextEntities(const EncodeJob& job, const EncodeModel& model,
                                     const TextInput& input, const PreparedText& text,
                                     const EncodeResult& result) {
  const std::vector<Entity> entities =
      FindEntities(result.values, text.special, model.spec->head.labels, *job.aggregation,
                   model.settings->transitions);
  std::vector<TextEntity> out;
  // The characters before a byte, counted on from the entity before.
  size_t bytes = 0;
  size_t characters = 0;
  const auto characters_before = [&](size_t byte) {
    if (byte < bytes) bytes = characters = 0;
    characters += CountCodePoints(std::string_view(input.text).substr(bytes, byte - bytes));
    bytes = byte;
    return characters;
  };
  for (const Entity& entity : entities) {
    TextEntity& found = out.emplace_back();
    found.entity = entity;
    const auto first = static_cast<size_t>(entity.begin);
    const auto last = static_cast<size_t>(entity.end) - 1;
    if (input.is_text && !text.spans.empty()) {
      const size_t begin = std::min(text.spans[first].begin, input.text.size());
      const size_t end = std::clamp(text.spans[last].end, begin, input.text.size());
      found.word = input.text.substr(begin, end - begin);
      const size_t from = characters_before(begin);
      found.characters = {from, characters_before(end)};
    } else if (model.tokenizer != nullptr) {
      const std::span<const TokenId> ids(text.ids.data() + first, last + 1 - first);
      if (auto word = model.tokenizer->Decode(ids, true); word.ok()) found.word = *std::move(word);
    }
  }
  return out;
}

std::vector<MaskCandidate> MaskCandidates(const EncodeJob& job, const PreparedText& text,
                                          const EncodeResult& result, size_t mask) {
  // With log-probabilities of all positions, each has its row.
  const size_t row = job.logprobs ? static_cast<size_t>(text.masks[mask]) : mask;
  std::vector<MaskCandidate> out;
  if (job.targets.empty()) {
    for (const auto& [token, logprob] : result.rows[row].top) out.push_back({token, logprob});
    return out;
  }
  for (size_t i = 0; i < job.targets.size(); ++i) {
    out.push_back({job.targets[i], result.targets[row * job.targets.size() + i]});
  }
  std::ranges::sort(out, [](const MaskCandidate& a, const MaskCandidate& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  });
  if (static_cast<size_t>(job.top_k) < out.size()) out.resize(static_cast<size_t>(job.top_k));
  return out;
}

}  // namespace moeserve::server
