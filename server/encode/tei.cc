#include "server/encode/tei.h"

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/encode/encode_answer.h"
#include "server/encode/encode_results.h"

namespace moeserve::server {
namespace {

// Removes a field. Returns its value; null if it is absent.
Json TakeField(Json& body, const char* name) {
  const auto at = body.find(name);
  if (at == body.end()) return nullptr;
  Json value = std::move(*at);
  body.erase(at);
  return value;
}

// Removes a field that is true or false.
Result<bool> TakeFlag(Json& body, const char* name, bool otherwise) {
  const Json value = TakeField(body, name);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) {
    return InvalidValue(name, Concat("'", name, "' must be true or false"));
  }
  return value.get<bool>();
}

// Translates `truncate` and `truncation_direction`.
absl::Status MoveTruncation(Json& from, Json& to) {
  MOESERVE_ASSIGN_OR_RETURN(const bool truncates, TakeFlag(from, "truncate", false));
  if (truncates) to["truncate_prompt_tokens"] = -1;
  const Json side = TakeField(from, "truncation_direction");
  if (side.is_null()) return absl::OkStatus();
  if (side != "Left" && side != "Right") {
    return InvalidValue("truncation_direction",
                        "'truncation_direction': expected Left or Right, found another value");
  }
  to["truncation_side"] = side == "Left" ? "left" : "right";
  return absl::OkStatus();
}

// Turns a text, or a list of a text or of two, into an input of /classify.
Result<Json> PredictInput(const Json& item) {
  if (item.is_string()) return item;
  if (item.is_array() && (item.size() == 1 || item.size() == 2) && item.front().is_string() &&
      item.back().is_string()) {
    if (item.size() == 1) return item.front();
    return Json{{"text", item.front()}, {"text_pair", item.back()}};
  }
  return InvalidValue("inputs",
                      "'inputs': expected a text, a list of one or two texts, or a list of such "
                      "lists");
}

absl::Status TranslatePredict(const Json& inputs, TeiRequest& out) {
  out.fields = FieldRoute::kClassify;
  out.batch = inputs.is_array() && !inputs.empty() && inputs.front().is_array();
  if (!out.batch) {
    MOESERVE_ASSIGN_OR_RETURN(Json input, PredictInput(inputs));
    out.body["input"] = Json::array({std::move(input)});
  } else {
    Json list = Json::array();
    for (const Json& item : inputs) {
      MOESERVE_ASSIGN_OR_RETURN(Json input, PredictInput(item));
      list.push_back(std::move(input));
    }
    out.body["input"] = std::move(list);
  }
  MOESERVE_ASSIGN_OR_RETURN(const bool raw, TakeFlag(out.body, "raw_scores", false));
  out.body["use_activation"] = !raw;
  return absl::OkStatus();
}

absl::Status TranslateRerank(TeiRequest& out) {
  out.fields = FieldRoute::kRerank;
  out.body["documents"] = TakeField(out.body, "texts");
  MOESERVE_ASSIGN_OR_RETURN(const bool raw, TakeFlag(out.body, "raw_scores", false));
  out.body["use_activation"] = !raw;
  MOESERVE_ASSIGN_OR_RETURN(const bool text, TakeFlag(out.body, "return_text", false));
  out.body["return_documents"] = text;
  return absl::OkStatus();
}

absl::Status TranslateSimilarity(Json inputs, TeiRequest& out) {
  out.fields = FieldRoute::kScore;
  if (!inputs.is_object() || FindText(inputs, "source_sentence") == nullptr ||
      FindField(inputs, "sentences") == nullptr) {
    return InvalidValue("inputs",
                        "'inputs': expected an object with 'source_sentence', a text, and "
                        "'sentences', a list of texts");
  }
  out.body["text_1"] = inputs["source_sentence"];
  out.body["text_2"] = inputs["sentences"];
  Json parameters = TakeField(out.body, "parameters");
  if (parameters.is_null()) return absl::OkStatus();
  if (!parameters.is_object()) {
    return InvalidValue("parameters", "'parameters' must be an object");
  }
  MOESERVE_RETURN_IF_ERROR(MoveTruncation(parameters, out.body));
  for (auto& [name, value] : parameters.items()) {
    // The model has been chosen, and the texts are given elsewhere.
    if (name == "model" || out.body.contains(name)) {
      return InvalidValue("parameters", Concat("'parameters': expected 'truncate', "
                                               "'truncation_direction' or 'prompt_name', found '",
                                               Printable(name, 64), "'"));
    }
    out.body[name] = std::move(value);
  }
  return absl::OkStatus();
}

absl::Status TranslateVectors(TeiRoute route, TeiRequest& out) {
  out.fields = route == TeiRoute::kEmbed ? FieldRoute::kEmbeddings : FieldRoute::kPooling;
  out.body["encoding_format"] = "float";
  if (route == TeiRoute::kEmbedAll) {
    out.body["task"] = "token_embed";
    out.body["use_activation"] = false;
    return absl::OkStatus();
  }
  MOESERVE_ASSIGN_OR_RETURN(const bool normalize, TakeFlag(out.body, "normalize", true));
  out.body["use_activation"] = normalize;
  return absl::OkStatus();
}

void AppendTeiVectors(EncodeRun& run, bool matrix, std::string& out) {
  for (size_t i = 0; i < run.results().size(); ++i) {
    EncodeResult& result = run.results()[i].result;
    FinishValues(run.job(), *run.model().spec, result);
    if (i > 0) out += ',';
    const std::span<const float> values = result.values;
    const auto width = static_cast<size_t>(result.width);
    if (matrix) out += '[';
    for (size_t at = 0; at < values.size(); at += width) {
      if (at > 0) out += ',';
      AppendFloats(values.subspan(at, width), out);
    }
    if (matrix) out += ']';
    result = {};
  }
}

void AppendTeiLabels(EncodeRun& run, bool batch, std::string& out) {
  const ModelSpec& spec = *run.model().spec;
  for (size_t i = 0; i < run.results().size(); ++i) {
    EncodeResult& result = run.results()[i].result;
    FinishValues(run.job(), spec, result);
    if (i > 0) out += ',';
    if (batch) out += '[';
    bool first = true;
    for (const size_t label : Ranking(result.values, std::nullopt)) {
      if (!std::exchange(first, false)) out += ',';
      out += "{\"score\":";
      AppendFloat(result.values[label], out);
      out += Concat(",\"label\":", DumpJson(OrderedJson(spec.head.labels[label])), '}');
    }
    if (batch) out += ']';
  }
}

void AppendTeiRanks(EncodeRun& run, TeiRoute route, std::string& out) {
  std::vector<const EncodeResult*> results;
  for (auto& text : run.results()) {
    FinishValues(run.job(), *run.model().spec, text.result);
    results.push_back(&text.result);
  }
  const std::vector<float> scores = PairScores(run.job(), *run.model().spec, results);
  if (route == TeiRoute::kSimilarity) {
    AppendFloats(scores, out);
    return;
  }
  bool first = true;
  for (const size_t i : Ranking(scores, run.job().top_n)) {
    if (!std::exchange(first, false)) out += ',';
    out += Concat("{\"index\":", i, ",\"score\":");
    AppendFloat(scores[i], out);
    if (!run.job().documents.empty()) {
      out += Concat(",\"text\":", DumpJson(OrderedJson(run.job().documents[i])));
    }
    out += '}';
  }
}

}  // namespace

Result<TeiRequest> FromTei(TeiRoute route, const Json& body) {
  TeiRequest out;
  out.body = body;
  MOESERVE_RETURN_IF_ERROR(MoveTruncation(out.body, out.body));
  if (route == TeiRoute::kRerank) {
    MOESERVE_RETURN_IF_ERROR(TranslateRerank(out));
    return out;
  }
  Json inputs = TakeField(out.body, "inputs");
  if (inputs.is_null()) return MissingField("inputs");
  switch (route) {
    case TeiRoute::kPredict:
      MOESERVE_RETURN_IF_ERROR(TranslatePredict(inputs, out));
      break;
    case TeiRoute::kSimilarity:
      MOESERVE_RETURN_IF_ERROR(TranslateSimilarity(std::move(inputs), out));
      break;
    default:
      out.body["input"] = std::move(inputs);
      MOESERVE_RETURN_IF_ERROR(TranslateVectors(route, out));
  }
  return out;
}

absl::Status TeiError(TeiRoute route, const absl::Status& error) {
  std::vector<std::pair<std::string, std::string>> names = {{"'input'", "'inputs'"}};
  if (route == TeiRoute::kRerank) names = {{"'documents'", "'texts'"}};
  if (route == TeiRoute::kSimilarity) {
    names = {{"'text_1'", "'inputs.source_sentence'"}, {"'text_2'", "'inputs.sentences'"}};
  }
  absl::Status out(error.code(), absl::StrReplaceAll(error.message(), names));
  error.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

std::string TeiAnswer(EncodeRun& run, TeiRoute route, bool batch) {
  std::string out;
  switch (route) {
    case TeiRoute::kEmbed:
    case TeiRoute::kEmbedAll:
      AppendTeiVectors(run, route == TeiRoute::kEmbedAll, out);
      break;
    case TeiRoute::kPredict:
      AppendTeiLabels(run, batch, out);
      break;
    case TeiRoute::kRerank:
      AppendTeiRanks(run, route, out);
      break;
    case TeiRoute::kSimilarity:
      AppendTeiRanks(run, route, out);
      return out;
  }
  return Concat('[', out, ']');
}

}  // namespace moeserve::server
