#include "server/encode/encode_answer.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/error_text.h"
#include "server/answers/answer.h"
#include "server/encode/encode_results.h"
#include "server/fields/routing_fields.h"
#include "server/generation/token_text.h"

namespace moeserve::server {
namespace {

// Returns the double with the shortest decimal that stands for the float.
double ShortDouble(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double out = value;
  std::from_chars(text, end, out);
  return out;
}

std::string Base64Of(std::span<const float> values) {
  static_assert(std::endian::native == std::endian::little);
  std::string encoded;
  absl::Base64Escape(
      absl::string_view(reinterpret_cast<const char*>(values.data()), values.size_bytes()),
      &encoded);
  return encoded;
}

// Appends members to the text of an object or list whose members are written one by one.
class Members {
 public:
  explicit Members(std::string& out) : out_(out) {}
  // Begins a member; `key` is empty in a list.
  std::string& Next(std::string_view key = {}) {
    if (!std::exchange(first_, false)) out_ += ',';
    if (!key.empty()) out_ += Concat('"', key, "\":");
    return out_;
  }
  void Add(std::string_view key, const OrderedJson& value) { Next(key) += DumpJson(value); }

 private:
  std::string& out_;
  bool first_ = true;
};

// Adds the routes of a text, if the request asked for them.
void AddRouting(const EncodeRun& run, const EncodedText& text, Members& members) {
  const RoutingParams& params = run.job().routing;
  if (!text.routing) return;
  if (params.record) members.Add("routing", RoutingRecordJson(*text.routing, *params.layout));
  if (params.table) {
    members.Add("routed_experts",
                RoutedExpertsTable(*text.routing, *params.layout, params.num_layers));
  }
}

// Appends a vector, or a matrix if the answer has a row for each token.
void AppendValues(const EncodeRun& run, const EncodeResult& result, bool matrix, Members& members,
                  std::string_view key) {
  const std::span<const float> values = result.values;
  std::string& out = members.Next(key);
  const auto width = static_cast<size_t>(result.width);
  if (run.job().base64) {
    out += Concat('"', Base64Of(values), '"');
    if (matrix) members.Add("shape", {values.size() / width, width});
    return;
  }
  if (!matrix) return AppendFloats(values, out);
  out += '[';
  for (size_t at = 0; at < values.size(); at += width) {
    if (at > 0) out += ',';
    AppendFloats(values.subspan(at, width), out);
  }
  out += ']';
}

void AppendVectors(EncodeRun& run, bool pooling, std::string& out) {
  const EncodeTask task = run.job().task;
  const bool matrix = task == EncodeTask::kTokenEmbed || task == EncodeTask::kTokenClassify;
  Members items(out);
  for (size_t i = 0; i < run.results().size(); ++i) {
    EncodedText& text = run.results()[i];
    FinishValues(run.job(), *run.model().spec, text.result);
    items.Next() += '{';
    Members item(out);
    item.Add("object", pooling ? "pooling" : "embedding");
    item.Add("index", i);
    AppendValues(run, text.result, matrix, item, pooling ? "data" : "embedding");
    AddRouting(run, text, item);
    out += '}';
    text = {};
  }
}

void AppendClasses(EncodeRun& run, std::string& out) {
  const ModelSpec& spec = *run.model().spec;
  Members items(out);
  for (size_t i = 0; i < run.results().size(); ++i) {
    EncodedText& text = run.results()[i];
    items.Next() += '{';
    Members item(out);
    item.Add("index", i);
    if (run.job().aggregation) {
      OrderedJson entities = OrderedJson::array();
      for (const TextEntity& found :
           TextEntities(run.job(), run.model(), run.job().inputs[i], run.texts()[i], text.result)) {
        entities.push_back(EntityJson(found));
      }
      item.Add("entities", entities);
    } else {
      FinishValues(run.job(), spec, text.result);
      item.Add("label", BestLabel(spec, text.result));
      AppendFloats(text.result.values, item.Next("probs"));
      item.Add("num_classes", spec.head.labels.size());
    }
    AddRouting(run, text, item);
    out += '}';
  }
}

std::vector<float> ScoresOf(EncodeRun& run) {
  std::vector<const EncodeResult*> results;
  for (EncodedText& text : run.results()) {
    FinishValues(run.job(), *run.model().spec, text.result);
    results.push_back(&text.result);
  }
  return PairScores(run.job(), *run.model().spec, results);
}

void AppendScores(EncodeRun& run, std::string& out) {
  const std::vector<float> scores = ScoresOf(run);
  Members items(out);
  for (size_t i = 0; i < scores.size(); ++i) {
    items.Next() += '{';
    Members item(out);
    item.Add("index", i);
    item.Add("object", "score");
    AppendFloat(scores[i], item.Next("score"));
    // Each score has its text, unless vectors of texts are compared.
    if (run.job().pairs.empty()) AddRouting(run, run.results()[i], item);
    out += '}';
  }
}

void AppendRanking(EncodeRun& run, std::string& out) {
  const std::vector<float> scores = ScoresOf(run);
  Members items(out);
  for (const size_t i : Ranking(scores, run.job().top_n)) {
    items.Next() += '{';
    Members item(out);
    item.Add("index", i);
    AppendFloat(scores[i], item.Next("relevance_score"));
    if (!run.job().documents.empty()) item.Add("document", {{"text", run.job().documents[i]}});
    if (run.job().pairs.empty()) AddRouting(run, run.results()[i], item);
    out += '}';
  }
}

// Returns the text with a mask replaced by `token`; null without a tokenizer.
OrderedJson FilledText(const EncodeModel& model, const PreparedText& text, size_t mask,
                       TokenId token) {
  if (model.tokenizer == nullptr) return nullptr;
  std::vector<TokenId> ids = text.ids;
  ids[static_cast<size_t>(text.masks[mask])] = token;
  // Other masks are special tokens, which must stay.
  const auto filled = model.tokenizer->Decode(ids, text.masks.size() == 1);
  return filled.ok() ? OrderedJson(*filled) : OrderedJson(nullptr);
}

void AppendMasks(EncodeRun& run, Members& members) {
  const PreparedText& text = run.texts().front();
  const EncodeModel& model = run.model();
  const EncodeResult& result = run.results().front().result;
  OrderedJson masks = OrderedJson::array();
  for (size_t mask = 0; mask < text.masks.size(); ++mask) {
    OrderedJson tokens = OrderedJson::array();
    for (const MaskCandidate& candidate : MaskCandidates(run.job(), text, result, mask)) {
      OrderedJson& token = tokens.emplace_back();
      token["token"] = candidate.token;
      token["token_str"] = TokenText(model.tokenizer, candidate.token, false);
      token["score"] = ShortDouble(std::exp(candidate.logprob));
      token["logprob"] = ShortDouble(static_cast<float>(LogprobValue(candidate.logprob)));
      token["sequence"] = FilledText(model, text, mask, candidate.token);
    }
    masks.push_back({{"position", text.masks[mask]}, {"tokens", std::move(tokens)}});
  }
  members.Add("masks", masks);
  if (run.job().logprobs) {
    std::vector<float> logprobs;
    for (const TokenLogprob& row : result.rows) {
      logprobs.push_back(static_cast<float>(LogprobValue(row.logprob)));
    }
    AppendFloats(logprobs, members.Next("logprobs"));
  }
  AddRouting(run, run.results().front(), members);
}

// Appends a list that `append` writes.
template <typename Append>
void AppendList(Members& members, std::string_view key, std::string& out, const Append& append) {
  members.Next(key) += '[';
  append(out);
  out += ']';
}

}  // namespace

OrderedJson EntityJson(const TextEntity& found) {
  OrderedJson out;
  out["entity_group"] = found.entity.name;
  out["score"] = ShortDouble(found.entity.score);
  out["word"] = found.word ? OrderedJson(*found.word) : OrderedJson(nullptr);
  out["start"] = found.characters ? OrderedJson(found.characters->first) : OrderedJson(nullptr);
  out["end"] = found.characters ? OrderedJson(found.characters->second) : OrderedJson(nullptr);
  out["tokens"] = {found.entity.begin, found.entity.end};
  return out;
}

void AppendFloat(float value, std::string& out) {
  char text[32];
  out.append(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

void AppendFloats(std::span<const float> values, std::string& out) {
  out += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    AppendFloat(values[i], out);
  }
  out += ']';
}

OrderedJson EncodeUsageJson(const Usage& usage) {
  OrderedJson out = UsageJson(usage);
  out.erase("completion_tokens");
  return out;
}

Result<std::string> EncodeAnswer(EncodeRun& run, FieldRoute route, const std::string& id) {
  std::string out = "{";
  Members members(out);
  if (route != FieldRoute::kEmbeddings) members.Add("id", id);
  if (route != FieldRoute::kRerank && route != FieldRoute::kFillMask) members.Add("object", "list");
  switch (route) {
    case FieldRoute::kClassify:
      AppendList(members, "data", out, [&](std::string& list) { AppendClasses(run, list); });
      break;
    case FieldRoute::kScore:
      AppendList(members, "data", out, [&](std::string& list) { AppendScores(run, list); });
      break;
    case FieldRoute::kRerank:
      AppendList(members, "results", out, [&](std::string& list) { AppendRanking(run, list); });
      break;
    case FieldRoute::kFillMask:
      AppendMasks(run, members);
      break;
    default:
      AppendList(members, "data", out, [&](std::string& list) {
        AppendVectors(run, route == FieldRoute::kPooling, list);
      });
  }
  if (!run.job().pairs.empty() && run.job().routing.any_record()) {
    AppendList(members, "inputs", out, [&](std::string& list) {
      Members items(list);
      for (const EncodedText& text : run.results()) {
        items.Next() += '{';
        Members item(list);
        AddRouting(run, text, item);
        list += '}';
      }
    });
  }
  members.Add("model", run.job().model);
  if (const RoutingControl* const control = run.job().routing.control.get()) {
    members.Add("routing_control", RoutingControlJson(control->change()));
  }
  members.Add("usage", EncodeUsageJson(run.usage()));
  if (!run.job().warnings.empty()) members.Add("warnings", run.job().warnings);
  out += '}';
  return out;
}

}  // namespace moeserve::server
