// What a model computes from its last rows, as plain data: logits of tokens or labels, or vectors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/kinds.h"
#include "kernels/base/activation.h"

namespace moeserve {

// kLanguageModel, kMaskedLm, kTokenClassification and kSpans compute logits of single tokens,
// kSequenceClassification those of a whole text (PoolingSpec). kNone: the model has only vectors.
enum class HeadKind : uint8_t {
  kLanguageModel,
  kMaskedLm,
  kTokenClassification,
  kSpans,  // two labels: the beginning and the end of an answer
  kSequenceClassification,
  kNone
};
constexpr NameTraits Traits(HeadKind k) {
  return NameIn({"language_model", "masked_lm", "token_classification", "spans",
                 "sequence_classification", "none"},
                k);
}
// Whether the head's outputs are logits of the vocabulary.
constexpr bool HasVocabulary(HeadKind k) {
  return k == HeadKind::kLanguageModel || k == HeadKind::kMaskedLm;
}
constexpr bool HasLabels(HeadKind k) { return !HasVocabulary(k) && k != HeadKind::kNone; }

// How the logits of labels become scores.
enum class LabelScores : uint8_t { kSoftmax, kSigmoid, kIdentity };
constexpr NameTraits Traits(LabelScores k) { return NameIn({"softmax", "sigmoid", "identity"}, k); }

// A layer before the head's matrix: norm(act(W x + b)) with a square W.
struct HeadLayerSpec {
  ActivationKind activation = ActivationKind::kGelu;
  bool bias = true;
  bool norm = false;  // of the kind NormSpec::kind
};

struct HeadSpec {
  HeadKind kind = HeadKind::kLanguageModel;
  std::vector<std::string> labels;  // with HasLabels(kind): their names; not empty
  LabelScores scores = LabelScores::kSoftmax;
  std::optional<HeadLayerSpec> layer;
  bool bias = true;  // with HasLabels(kind): of the logits
};

// Which rows of a text become one: the mean or the largest elements of all rows, the first row, or
// the last one.
enum class PoolingKind : uint8_t { kMean, kMax, kFirst, kLast };
constexpr NameTraits Traits(PoolingKind k) { return NameIn({"mean", "max", "cls", "last"}, k); }

// Whether vectors of texts are made of all their rows.
constexpr bool PoolsAll(PoolingKind k) { return k == PoolingKind::kMean || k == PoolingKind::kMax; }

// act(W x + b) of a pooled row.
struct DenseSpec {
  int width = 0;  // of the result
  ActivationKind activation = ActivationKind::kNone;
  bool bias = true;
};

// How the rows of a text become one vector. With kSequenceClassification, its head follows.
struct PoolingSpec {
  PoolingKind kind = PoolingKind::kMean;
  std::vector<DenseSpec> dense;  // in this order; none before a head
  bool normalize = false;        // divides the vector by its length; false before a head
};

}  // namespace moeserve
