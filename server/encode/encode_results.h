// What the numbers of the engine mean, for the answers of all interfaces.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "server/encode/encode_job.h"
#include "server/encode/entities.h"

namespace moeserve::server {

// Cuts and normalizes the vectors of kEmbed and kTokenEmbed, and turns the logits of labels into
// scores, as the job and the model say. The logits of entities stay as they are.
void FinishValues(const EncodeJob& job, const ModelSpec& spec, EncodeResult& result);

// Returns the label with the highest score.
const std::string& BestLabel(const ModelSpec& spec, const EncodeResult& result);

// kScore: returns the score of each pair of texts. `results` are those of FinishValues().
std::vector<float> PairScores(const EncodeJob& job, const ModelSpec& spec,
                              const std::vector<const EncodeResult*>& results);

// Returns the indices of the best scores, at most `top`, the highest first; of equal ones, the
// first. All without `top`.
std::vector<size_t> Ranking(const std::vector<float>& scores, std::optional<int> top);

// An entity with its place in the text.
struct TextEntity {
  Entity entity;
  std::optional<std::string> word;
  // Characters [first, second) of the text; unknown for token ids.
  std::optional<std::pair<size_t, size_t>> characters;
};
std::vector<TextEntity> TextEntities(const EncodeJob& job, const EncodeModel& model,
                                     const TextInput& input, const PreparedText& text,
                                     const EncodeResult& result);

// A candidate for a mask.
struct MaskCandidate {
  TokenId token = 0;
  float logprob = 0.0f;
};
// Returns the candidates for the mask at place `mask` of PreparedText::masks, the most probable
// first; of equally probable ones, the lower id.
std::vector<MaskCandidate> MaskCandidates(const EncodeJob& job, const PreparedText& text,
                                          const EncodeResult& result, size_t mask);

}  // namespace moeserve::server
