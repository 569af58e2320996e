// Finds named parts of a text in the logits of its tokens' labels.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/kinds.h"
#include "model_loaders/checkpoint/sentence_transformers.h"

namespace moeserve::server {

// kNone: each token whose label is not O is a part. kSimple: tokens of one name that follow each
// other are one part; a label B-NAME or S-NAME begins another. kViterbi: the most probable sequence
// of labels in which each follows from the one before (TransitionBiases), and the parts that it
// consists of.
enum class Aggregation : uint8_t { kNone, kSimple, kViterbi };
constexpr NameTraits Traits(Aggregation k) { return NameIn({"none", "simple", "viterbi"}, k); }

struct Entity {
  std::string name;    // the label without B-, I-, E- or S-; with kNone the whole label
  float score = 0.0f;  // the mean of the probabilities of the tokens' labels
  int begin = 0;       // tokens [begin, end)
  int end = 0;
};

// Whether all labels but O have the forms B-NAME, I-NAME, E-NAME and S-NAME, and some have the last
// two.
bool AreBioes(std::span<const std::string> labels);

// `logits` [T, labels], finite. Tokens with skipped[t] != 0, such as [CLS], are as if they were not
// there; `skipped` is empty or has T values. kViterbi requires AreBioes(labels).
std::vector<Entity> FindEntities(std::span<const float> logits, std::span<const uint8_t> skipped,
                                 std::span<const std::string> labels, Aggregation aggregation,
                                 const TransitionBiases& biases);

}  // namespace moeserve::server
