#include "model_loaders/architectures/gguf/gguf_model_reader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"

namespace moeserve {
namespace {

constexpr std::string_view kPooling = ".pooling_type";
constexpr std::string_view kLabels = ".classifier.output_labels";
constexpr const char* kScores = "cls.output.weight";

// The values of the key for the pooling. 0 stands for "none": a vector of each row.
constexpr int kMean = 1;
constexpr int kFirst = 2;
constexpr int kLast = 3;
constexpr int kRank = 4;  // scores of labels

}  // namespace

GgufModelReader::GgufModelReader(const GgufFile& file, const WeightFiles& weights,
                                 std::string_view architecture,
                                 const std::vector<std::string>& ignored)
    : file_(file), weights_(weights), keys_(file, architecture, &problems_, &ignored) {
  for (const WeightFiles::Location& tensor : weights.tensors()) {
    stored_.names.insert(tensor.entry->name);
  }
}

int64_t GgufModelReader::RowsOf(std::string_view tensor) const {
  const WeightFiles::Location* const found = weights_.Find(tensor);
  if (found == nullptr || found->entry->shape.empty()) return 0;
  return found->entry->shape.size() == 1 ? 1 : found->entry->shape.front();
}

void GgufModelReader::ReadSizes(std::string_view eps) {
  const int blocks = keys_.Int(".block_count");
  // Every layer has tensors, so a small file cannot demand long lists of them.
  const int64_t most = std::min<int64_t>(kMaxLayers, static_cast<int64_t>(stored_.names.size()));
  if (problems_.empty() && (blocks < 1 || blocks > most)) {
    keys_.Fault(".block_count",
                Concat("an integer in [1, ", most, "] (the files have ", stored_.names.size(),
                       stored_.names.size() == 1 ? " tensor)" : " tensors)"),
                std::to_string(blocks));
  }
  if (problems_.empty()) layers_ = blocks;
  spec_.hidden_size = keys_.Int(".embedding_length");
  spec_.max_position_embeddings = keys_.Int(".context_length");
  spec_.norm.eps = static_cast<float>(keys_.Real(eps));
  const int64_t rows = RowsOf("token_embd.weight");
  spec_.vocab_size = keys_.Int(".vocab_size", rows > 0 && rows <= kMaxVocabulary
                                                  ? std::optional(static_cast<int>(rows))
                                                  : std::nullopt);
}

void GgufModelReader::ReadTokenIds() {
  spec_.bos_token_id = keys_.OptionalInt("tokenizer.ggml.bos_token_id");
  // The ids that end a text, a turn and a message.
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                          "tokenizer.ggml.eom_token_id"}) {
    const std::optional<int> id = keys_.OptionalInt(key);
    std::vector<int32_t>& ids = spec_.eos_token_ids;
    if (id.has_value() && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
  }
}

AttentionSpec GgufModelReader::ReadHeads(const KnownHeads& known) {
  constexpr std::string_view kValues = ".attention.value_length";
  AttentionSpec attention;
  attention.num_heads = known.heads.has_value() ? *known.heads : keys_.Int(".attention.head_count");
  attention.num_kv_heads = known.kv_heads.has_value()
                               ? *known.kv_heads
                               : keys_.Int(".attention.head_count_kv", attention.num_heads);
  const int derived = attention.num_heads > 0 ? spec_.hidden_size / attention.num_heads : 0;
  attention.head_dim = keys_.Int(known.head_dim, derived);
  if (known.value_widths) {
    attention.value_dim = keys_.Int(kValues, attention.head_dim);
  } else {
    keys_.Require(kValues, attention.head_dim);
  }
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  return attention;
}

std::vector<int> GgufModelReader::ExpertWidths(std::string_view key, int count, int width) {
  const int64_t most = layers_ > 0 ? kMaxExpertsOfModel / layers_ : kMaxExperts;
  if (count >= 1 && count <= std::min<int64_t>(kMaxExperts, most)) {
    return std::vector<int>(static_cast<size_t>(count), width);
  }
  keys_.Fault(key,
              Concat("at least 1 expert, at most ", kMaxExperts, " in a layer and ",
                     kMaxExpertsOfModel, " in all layers"),
              Concat(count, " (", keys_.NameOf(".block_count"), " is ", layers_, ')'));
  return {};
}

void GgufModelReader::ReadTextHead(const TextHead& head) {
  const int type = keys_.Int(kPooling, 0);
  if (type < 0 || type > kRank) {
    keys_.Fault(kPooling, "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)",
                std::to_string(type));
  }
  if (head.generates && type == 0) return;
  spec_.tie_word_embeddings = false;  // the matrix of the vocabulary is not needed
  if (type == kRank && head.generates && ReadReranker()) return;
  if (type == kRank && (head.generates || !Has(kScores))) {
    keys_.Fault(kPooling, "1 (mean), 2 (cls) or 3 (last)",
                head.generates ? Concat("4 (rank), but not two rows of ", kScores,
                                        " with the labels \"yes\" and \"no\"")
                               : Concat("4 (rank), but no tensor ", Quoted(kScores)));
  }
  if (!head.generates && (type == kRank || (type == 0 && Has(kScores)))) {
    ReadLabels(head);
    return;
  }
  keys_.Ignore(kLabels);
  spec_.head.kind = HeadKind::kNone;
  const PoolingKind kind = type == kFirst  ? PoolingKind::kFirst
                           : type == kLast ? PoolingKind::kLast
                                           : PoolingKind::kMean;
  spec_.pooling = PoolingSpec{.kind = kind, .dense = {}, .normalize = true};
  if (type == 0) {
    decisions_.push_back(Concat("the metadata does not say how rows are pooled (",
                                keys_.NameOf(kPooling), "): vectors are the mean of all rows"));
  }
  decisions_.push_back("vectors are divided by their length, which no key of GGUF files says");
}

// Qwen3-Reranker's logits are those of the next tokens "yes" and "no". The score of two texts is
// that of the last label.
bool GgufModelReader::ReadReranker() {
  const GgufValue* const labels = keys_.Find(kLabels);
  const auto names = labels == nullptr ? std::nullopt : labels->Strings();
  if (!names.has_value() || *names != std::vector<std::string_view>{"yes", "no"} ||
      RowsOf(kScores) != 2) {
    return false;
  }
  spec_.head.kind = HeadKind::kSequenceClassification;
  spec_.head.labels = {"no", "yes"};
  spec_.head.bias = false;
  spec_.pooling = PoolingSpec{.kind = PoolingKind::kLast, .dense = {}};
  reversed_scores_ = true;
  decisions_.push_back(
      "texts are scored as they are: requests must contain the prompt that the model was made for");
  return true;
}

// The scores of one label are logistic values, those of several labels have the sum 1.
void GgufModelReader::ReadLabels(const TextHead& head) {
  HeadSpec& scores = spec_.head;
  scores.kind = HeadKind::kSequenceClassification;
  spec_.pooling = PoolingSpec{.kind = head.scored, .dense = {}};
  const int64_t count = RowsOf(kScores);
  const GgufValue* const labels = keys_.Find(kLabels);
  if (labels != nullptr) {
    const std::optional<std::vector<std::string_view>> names = labels->Strings();
    if (!names.has_value() || std::ssize(*names) != count) {
      keys_.Fault(kLabels, Concat("an array of ", count, " strings (the rows of ", kScores, ')'),
                  ShowGguf(*labels));
    } else {
      scores.labels.assign(names->begin(), names->end());
    }
  } else {
    // The rows are in the file, so they bound the memory.
    for (int64_t i = 0; i < std::min<int64_t>(count, kMaxLabels); ++i) {
      scores.labels.push_back(Concat("LABEL_", i));
    }
  }
  scores.scores = count == 1 ? LabelScores::kSigmoid : LabelScores::kSoftmax;
  scores.bias = Has("cls.output.bias");
  if (!Has("cls.weight")) {
    problems_.Add(
        "tensor \"cls.weight\": expected the layer in front of the scores, found no such tensor; "
        "converters drop that of BERT's classifiers");
  }
  scores.layer = head.layer;
  scores.layer->bias = Has("cls.bias");
}

std::string GgufModelReader::Prefix() const {
  return Concat(Printable(file_.file_name()), ": ", kGgufMetadata);
}

ConfigResult GgufModelReader::Finish(std::unique_ptr<NameTableConfig> config) {
  config->decisions = std::move(decisions_);
  if (!HasVocabulary(config->spec.head.kind)) config->ignored.push_back("output.weight");
  if (config->spec.head.kind == HeadKind::kNone) {
    for (const char* tensor :
         {"cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias"}) {
      config->ignored.push_back(tensor);
    }
  }
  const absl::Status valid = Validate(config->spec);
  if (!valid.ok()) {
    const std::string message(valid.message());
    return absl::Status(valid.code(), Concat(Prefix(), ": ", config->AsInFile(message)));
  }
  return config;
}

}  // namespace moeserve
