#include "model_loaders/architectures/huggingface/parts/model_head.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>
#include <vector>

#include "engine/spec/spec_limits.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

constexpr std::pair<std::string_view, ModelClass> kClasses[] = {
    {"ForCausalLM", ModelClass::kCausalLm},
    {"LMHeadModel", ModelClass::kCausalLm},
    {"ForMaskedLM", ModelClass::kMaskedLm},
    {"ForPreTraining", ModelClass::kMaskedLm},
    {"ForSequenceClassification", ModelClass::kSequenceClassification},
    {"ForTokenClassification", ModelClass::kTokenClassification},
    {"ForQuestionAnswering", ModelClass::kSpans},
    {"MTModel", ModelClass::kCausalLm},
    {"Model", ModelClass::kBase},
};

constexpr TensorRule kScoreTensors[] = {
    {"classifier.weight", "score.weight"},
    {"classifier.bias", "score.bias"},
    {"classifier.weight", "qa_outputs.weight"},
    {"classifier.bias", "qa_outputs.bias"},
};

// Returns the names of "id2label", whose keys are the numbers from 0 on, or as many default names
// as "num_labels" says.
std::vector<std::string> ReadLabels(DecoderConfig& config) {
  ObjectReader& keys = config.keys();
  std::vector<std::string> labels;
  const int count = keys.Int("num_labels", 2);
  keys.Optional("label2id");
  const Json* const names = keys.Optional("id2label");
  if (names == nullptr) {
    if (count < 1 || count > kMaxLabels) {
      keys.Fault("num_labels", Concat("an integer in [1, ", kMaxLabels, ']'),
                 std::to_string(count));
      return labels;
    }
    for (int i = 0; i < count; ++i) labels.push_back(Concat("LABEL_", i));
    return labels;
  }
  const auto fault = [&](const std::string& found) {
    keys.Fault("id2label", "an object with a text for each number from 0 on", found);
    return std::vector<std::string>();
  };
  if (!names->is_object() || names->empty()) return fault(ShowJson(*names));
  labels.resize(names->size());
  for (const auto& [key, value] : names->items()) {
    size_t index = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), index);
    const bool number = error == std::errc() && end == key.data() + key.size();
    if (!number || index >= labels.size() || !value.is_string() || !labels[index].empty()) {
      return fault(Concat("the key ", Quoted(key), " with ", ShowJson(value)));
    }
    labels[index] = value.get<std::string>();
  }
  return labels;
}

// Returns how logits of texts become scores: as the problem says, unless a cross-encoder's
// activation function does.
LabelScores ReadScores(DecoderConfig& config, size_t labels) {
  ObjectReader& keys = config.keys();
  LabelScores scores = labels == 1 ? LabelScores::kSigmoid : LabelScores::kSoftmax;
  enum class Problem { kRegression, kSingle, kMulti };
  const auto problem = keys.Pick<Problem>("problem_type",
                                          {{"regression", Problem::kRegression},
                                           {"single_label_classification", Problem::kSingle},
                                           {"multi_label_classification", Problem::kMulti}},
                                          Problem::kSingle);
  if (problem == Problem::kMulti) scores = LabelScores::kSigmoid;
  if (problem == Problem::kRegression && labels > 1) scores = LabelScores::kIdentity;
  const Json* function = keys.Optional("sbert_ce_default_activation_function");
  if (const Json* const own = keys.Optional("sentence_transformers"); own != nullptr) {
    if (own->is_object() && own->contains("activation_fn")) function = &(*own)["activation_fn"];
  }
  if (function == nullptr || !function->is_string()) return scores;
  const auto& name = function->get_ref<const std::string&>();
  if (name.ends_with(".Identity")) return LabelScores::kIdentity;
  if (name.ends_with(".Sigmoid")) return LabelScores::kSigmoid;
  keys.Fault("sentence_transformers.activation_fn", "Identity or Sigmoid", ShowJson(*function));
  return scores;
}

}  // namespace

ModelClass ClassOf(DecoderConfig& config, ModelClass fallback) {
  const Json* const classes = config.keys().Optional("architectures");
  if (classes == nullptr || !classes->is_array() || classes->empty()) return fallback;
  if (!classes->front().is_string()) return fallback;
  const auto& name = classes->front().get_ref<const std::string&>();
  for (const auto& [suffix, model_class] : kClasses) {
    if (name.ends_with(suffix)) return model_class;
  }
  return fallback;
}

void ReadHead(DecoderConfig& config, ModelClass model_class, PoolingKind pooling) {
  ModelSpec& spec = config.spec();
  HeadSpec& head = spec.head;
  switch (model_class) {
    case ModelClass::kBase:
      head.kind = HeadKind::kNone;
      spec.pooling = PoolingSpec{.kind = pooling, .dense = {}};
      break;
    case ModelClass::kCausalLm:
      head.kind = HeadKind::kLanguageModel;
      return;
    case ModelClass::kMaskedLm:
      head.kind = HeadKind::kMaskedLm;
      return;
    case ModelClass::kSequenceClassification:
      head.kind = HeadKind::kSequenceClassification;
      spec.pooling = PoolingSpec{.kind = pooling, .dense = {}};
      head.labels = ReadLabels(config);
      head.scores = ReadScores(config, head.labels.size());
      break;
    case ModelClass::kTokenClassification:
      head.kind = HeadKind::kTokenClassification;
      head.labels = ReadLabels(config);
      break;
    case ModelClass::kSpans:
      head.kind = HeadKind::kSpans;
      head.labels = {"start", "end"};
      break;
  }
  // The matrix of the vocabulary is not needed.
  spec.tie_word_embeddings = false;
}

void ReadDecoderHead(DecoderConfig& config) {
  const ModelClass model_class = ClassOf(config, ModelClass::kCausalLm);
  const bool has_head = config.Stores("lm_head.weight") || config.spec().tie_word_embeddings;
  const bool base = model_class == ModelClass::kBase && !config.Stores("lm_head.weight");
  if (model_class == ModelClass::kCausalLm || (model_class == ModelClass::kBase && !base)) return;
  if (model_class == ModelClass::kMaskedLm && has_head) return;
  ReadHead(config, model_class, PoolingKind::kLast);
  if (HasLabels(config.spec().head.kind)) {
    config.spec().head.bias = config.Stores("score.bias") || config.Stores("qa_outputs.bias");
  }
  config.Tensors(kScoreTensors);
}

}  // namespace moeserve::huggingface
