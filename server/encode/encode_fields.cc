#include "server/encode/encode_fields.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/routing_fields.h"
#include "server/fields/shared_fields.h"

namespace moeserve::server {
namespace {

constexpr int64_t kMostInt = std::numeric_limits<int32_t>::max();

// Reads {"text", "text_pair"}.
Result<TextInput> PairInput(const Json& value) {
  TextInput input;
  for (const auto& [name, member] : value.items()) {
    if (name != "text" && name != "text_pair") {
      return InvalidValue("input", Concat("'input': an object has 'text' and 'text_pair', found '",
                                          Printable(name, 32), "'"));
    }
    if (!member.is_string()) {
      return InvalidValue("input", Concat("'input.", name, "' must be a string"));
    }
  }
  const std::string* const text = FindText(value, "text");
  if (text == nullptr) return InvalidValue("input", "'input': an object must have 'text'");
  input.text = *text;
  if (const std::string* const pair = FindText(value, "text_pair")) input.pair = *pair;
  return input;
}

Result<TextInput> IdInput(const Json& value, int vocab_size) {
  TextInput input;
  input.is_text = false;
  MOESERVE_ASSIGN_OR_RETURN(input.ids, TokenIdList(value, "input", vocab_size));
  if (input.ids.empty()) return InvalidValue("input", "'input': a list of ids must not be empty");
  return input;
}

Result<TextInput> OneInput(const Json& value, bool pairs, int vocab_size) {
  if (value.is_array()) return IdInput(value, vocab_size);
  if (pairs && value.is_object()) return PairInput(value);
  if (!value.is_string()) {
    return InvalidValue("input", Concat("'input' must be a string, a list of token ids or a list ",
                                        pairs ? "of these or of objects" : "of these"));
  }
  TextInput input;
  input.text = value.get<std::string>();
  return input;
}

absl::Status TooMany(std::string_view field, size_t found) {
  return InvalidValue(field, Concat("'", field, "': at most ", kMaxEncodeInputs,
                                    " texts are accepted in one request, found ", found));
}

// Reads `input`: a text or token ids, or a list of texts or of lists of token ids. `single`: no
// lists of several.
absl::Status ParseInput(const Json& body, bool pairs, bool single, int vocab_size, EncodeJob& job) {
  const Json* const field = FindField(body, "input");
  if (field == nullptr) return MissingField("input");
  const bool is_list = field->is_array() && !field->empty() && !field->front().is_number();
  if (field->is_array() && field->empty()) {
    return InvalidValue("input", "'input' must not be empty");
  }
  if (!is_list || single) {
    if (is_list) return InvalidValue("input", "'input' must be a string or a list of token ids");
    MOESERVE_ASSIGN_OR_RETURN(job.inputs.emplace_back(), OneInput(*field, pairs, vocab_size));
    return absl::OkStatus();
  }
  if (field->size() > kMaxEncodeInputs) return TooMany("input", field->size());
  const bool ids = field->front().is_array();
  for (const Json& item : *field) {
    if (item.is_array() != ids || item.is_number()) {
      return InvalidValue("input",
                          "'input': a list must have only texts, only token ids or only lists of "
                          "token ids");
    }
    MOESERVE_ASSIGN_OR_RETURN(job.inputs.emplace_back(), OneInput(item, pairs, vocab_size));
  }
  return absl::OkStatus();
}

// Reads `token_type_ids`, which has the form of `input`.
absl::Status ParseTypes(const Json& body, const ModelSpec& spec, EncodeJob& job) {
  constexpr const char* kField = "token_type_ids";
  const Json* const field = FindField(body, kField);
  if (field == nullptr) return absl::OkStatus();
  if (!field->is_array()) return InvalidValue(kField, "'token_type_ids' must be a list");
  const bool nested = !field->empty() && field->front().is_array();
  if ((nested ? field->size() : 1) != job.inputs.size()) {
    return InvalidValue(kField, "'token_type_ids' must have a list for each list of 'input'");
  }
  for (size_t i = 0; i < job.inputs.size(); ++i) {
    TextInput& input = job.inputs[i];
    const Json& list = nested ? (*field)[i] : *field;
    if (input.is_text || !list.is_array() || list.size() != input.ids.size()) {
      return InvalidValue(kField, "'token_type_ids' must have a type for each id of 'input'");
    }
    for (const Json& item : list) {
      const std::optional<int64_t> type = AsInteger(item);
      if (!type || *type < 0 || *type >= std::max(spec.token_types, 1)) {
        return InvalidValue(kField, Concat("'token_type_ids': expected types from 0 to ",
                                           std::max(spec.token_types, 1) - 1));
      }
      input.types.push_back(static_cast<uint8_t>(*type));
    }
  }
  return absl::OkStatus();
}

// Reads a text or a list of texts, which in rankings may be objects {"text"}.
Result<std::vector<std::string>> TextList(const Json& body, const char* name, bool objects) {
  const Json* const field = FindField(body, name);
  std::vector<std::string> texts;
  const auto add = [&](const Json& item) -> absl::Status {
    const std::string* text = item.is_string() ? &item.get_ref<const std::string&>() : nullptr;
    if (text == nullptr && objects) text = FindText(item, "text");
    if (text == nullptr) {
      return InvalidValue(
          name, Concat("'", name, "': expected strings", objects ? " or objects with 'text'" : ""));
    }
    texts.push_back(*text);
    return absl::OkStatus();
  };
  if (field == nullptr) return MissingField(name);
  if (!field->is_array()) {
    MOESERVE_RETURN_IF_ERROR(add(*field));
    return texts;
  }
  if (field->empty()) return InvalidValue(name, Concat("'", name, "' must not be empty"));
  if (field->size() > kMaxEncodeInputs) return TooMany(name, field->size());
  for (const Json& item : *field) MOESERVE_RETURN_IF_ERROR(add(item));
  return texts;
}

absl::Status ParseShared(const Json& body, const RequestRules& rules, EncodeJob& job) {
  MOESERVE_ASSIGN_OR_RETURN(auto model, StringField(body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(job.model, ResolveModel(model.value_or(""), rules.served_names));
  GenerationParams shared;
  MOESERVE_RETURN_IF_ERROR(ParseIdentity(body, rules, shared));
  job.priority = shared.priority;
  job.cache_salt = std::move(shared.cache_salt);
  job.request_id = std::move(shared.request_id);
  MOESERVE_RETURN_IF_ERROR(ParseRoutingFields(body, rules.routing, false, job.routing));
  MOESERVE_ASSIGN_OR_RETURN(auto records, BoolField(body, "routing_records"));
  if (records.value_or(false)) {
    MOESERVE_RETURN_IF_ERROR(CheckRecords(rules.routing, "routing_records"));
    job.routing.record = true;
    job.routing.layout = rules.routing.layout;
    job.routing.num_layers = rules.routing.spec->num_layers();
  }
  MOESERVE_ASSIGN_OR_RETURN(auto special, BoolField(body, "add_special_tokens"));
  job.add_special_tokens = special.value_or(true);
  MOESERVE_ASSIGN_OR_RETURN(auto truncate, IntField(body, "truncate_prompt_tokens", -1, kMostInt));
  if (truncate == 0) {
    return InvalidValue("truncate_prompt_tokens", "'truncate_prompt_tokens' must not be 0");
  }
  if (truncate) job.truncate = static_cast<int>(*truncate);
  MOESERVE_ASSIGN_OR_RETURN(auto side, StringField(body, "truncation_side"));
  if (side && *side != "left" && *side != "right") {
    return InvalidValue("truncation_side", Concat("'truncation_side': expected left or right, ",
                                                  "found ", Printable(*side, 64)));
  }
  if (side) job.truncates_left = *side == "left";
  MOESERVE_ASSIGN_OR_RETURN(job.activation, BoolField(body, "normalize"));
  MOESERVE_ASSIGN_OR_RETURN(auto activation, BoolField(body, "use_activation"));
  if (activation) job.activation = activation;
  return absl::OkStatus();
}

absl::Status ParseVectors(const Json& body, const EncodeModel& model, EncodeJob& job) {
  MOESERVE_ASSIGN_OR_RETURN(auto format, StringField(body, "encoding_format"));
  if (format && *format != "float" && *format != "base64") {
    return InvalidValue("encoding_format", Concat("'encoding_format': expected float or base64, ",
                                                  "found ", Printable(*format, 64)));
  }
  job.base64 = format == "base64";
  MOESERVE_ASSIGN_OR_RETURN(auto dimensions, IntField(body, "dimensions", 1, kMostInt));
  if (dimensions) {
    if (job.task != EncodeTask::kEmbed && job.task != EncodeTask::kTokenEmbed) {
      return InvalidValue("dimensions", "'dimensions' can be given for vectors only");
    }
    job.dimensions = static_cast<int>(*dimensions);
  }
  MOESERVE_RETURN_IF_ERROR(CheckDimensions(model, job));
  MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(body, "prompt_name"));
  MOESERVE_ASSIGN_OR_RETURN(const auto kind, StringField(body, "input_type"));
  MOESERVE_RETURN_IF_ERROR(SetPrompt(*model.settings, name, kind, job));
  if (name && !job.inputs.front().is_text) {
    return InvalidValue("prompt_name", "'prompt_name' needs texts, found token ids");
  }
  return absl::OkStatus();
}

absl::Status ParsePooling(const Json& body, const EncodeModel& model, EncodeJob& job) {
  MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(body, "task"));
  job.task = DefaultPoolingTask(*model.spec);
  if (name) {
    const auto task = KindNamed<EncodeTask>(*name);
    if (!task || *task > EncodeTask::kTokenClassify) {
      return InvalidValue("task", Concat("'task': expected embed, token_embed, classify or "
                                         "token_classify, found ",
                                         Printable(*name, 64)));
    }
    job.task = *task;
  }
  return CheckTask(*model.spec, job.task, name ? "task" : "model");
}

absl::Status ParseClassify(const Json& body, const EncodeModel& model, EncodeJob& job) {
  const ModelSpec& spec = *model.spec;
  MOESERVE_ASSIGN_OR_RETURN(const auto name, StringField(body, "aggregation"));
  if (spec.head.kind != HeadKind::kTokenClassification) {
    MOESERVE_RETURN_IF_ERROR(CheckTask(spec, EncodeTask::kClassify, "model"));
    job.task = EncodeTask::kClassify;
    if (!name) return absl::OkStatus();
    return InvalidValue("aggregation", "'aggregation': this model labels whole texts, not tokens");
  }
  job.task = EncodeTask::kTokenClassify;
  return SetAggregation(spec, name, job);
}

absl::Status ParseScore(const Json& body, const EncodeModel& model, EncodeJob& job) {
  job.task = EncodeTask::kScore;
  MOESERVE_RETURN_IF_ERROR(CheckTask(*model.spec, job.task, "model"));
  const char* const first = FindField(body, "queries") != nullptr ? "queries" : "text_1";
  const char* const second = FindField(body, "documents") != nullptr ? "documents" : "text_2";
  job.input_field = second;
  for (const auto& [name, other] :
       {std::pair("queries", "text_1"), std::pair("documents", "text_2")}) {
    if (FindField(body, name) != nullptr && FindField(body, other) != nullptr) {
      return InvalidValue(name,
                          Concat("either '", name, "' or '", other, "' can be given, not both"));
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(auto firsts, TextList(body, first, false));
  MOESERVE_ASSIGN_OR_RETURN(auto seconds, TextList(body, second, false));
  return SetPairs(*model.spec, std::move(firsts), std::move(seconds), first, job);
}

absl::Status ParseRerank(const Json& body, const EncodeModel& model, bool returns_documents,
                         EncodeJob& job) {
  job.task = EncodeTask::kScore;
  job.input_field = "documents";
  MOESERVE_RETURN_IF_ERROR(CheckTask(*model.spec, job.task, "model"));
  MOESERVE_ASSIGN_OR_RETURN(auto query, StringField(body, "query"));
  if (!query) return MissingField("query");
  MOESERVE_ASSIGN_OR_RETURN(auto documents, TextList(body, "documents", true));
  MOESERVE_ASSIGN_OR_RETURN(const auto returned, BoolField(body, "return_documents"));
  if (returned.value_or(returns_documents)) job.documents = documents;
  MOESERVE_ASSIGN_OR_RETURN(const auto top, IntField(body, "top_n", 1, kMostInt));
  if (top) job.top_n = static_cast<int>(*top);
  MOESERVE_ASSIGN_OR_RETURN(const auto most, IntField(body, "max_tokens_per_doc", 1, kMostInt));
  if (most) job.max_document_tokens = static_cast<int>(*most);
  return SetPairs(*model.spec, {*std::move(query)}, std::move(documents), "query", job);
}

// Reads `targets`: ids, or texts of one token each.
absl::Status ParseTargets(const Json& body, const EncodeModel& model, EncodeJob& job) {
  const Json* const field = FindField(body, "targets");
  if (field == nullptr) return absl::OkStatus();
  const auto fault = [](const std::string& message) {
    return InvalidValue("targets", Concat("'targets': ", message));
  };
  if (!field->is_array() || field->size() > kMaxEncodeInputs) {
    return fault(Concat("expected a list of at most ", kMaxEncodeInputs, " texts or token ids"));
  }
  if (!field->empty() && field->front().is_number()) {
    MOESERVE_ASSIGN_OR_RETURN(job.targets, TokenIdList(*field, "targets", model.spec->vocab_size));
    return absl::OkStatus();
  }
  for (const Json& item : *field) {
    if (!item.is_string()) return fault("expected only texts or only token ids");
    if (model.tokenizer == nullptr) return fault("this model has no tokenizer: send token ids");
    const auto& text = item.get_ref<const std::string&>();
    auto ids = model.tokenizer->Encode(text, false);
    if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
    if (ids->size() != 1) {
      return fault(
          Concat("expected texts of one token, found ", ids->size(), " in ", Printable(text, 64)));
    }
    job.targets.push_back(ids->front());
  }
  return absl::OkStatus();
}

absl::Status ParseFillMask(const Json& body, const EncodeModel& model, EncodeJob& job) {
  job.task = EncodeTask::kFillMask;
  MOESERVE_RETURN_IF_ERROR(CheckTask(*model.spec, job.task, "model"));
  const int vocab_size = model.spec->vocab_size;
  MOESERVE_RETURN_IF_ERROR(ParseInput(body, false, true, vocab_size, job));
  MOESERVE_ASSIGN_OR_RETURN(const auto top, IntField(body, "top_k", 1, kMaxFillTokens));
  job.top_k = static_cast<int>(top.value_or(job.top_k));
  job.fills = true;
  MOESERVE_RETURN_IF_ERROR(ParseTargets(body, model, job));
  MOESERVE_ASSIGN_OR_RETURN(const auto logprobs, BoolField(body, "logprobs"));
  job.logprobs = logprobs.value_or(false);
  const Json* const own = FindField(body, "targets_of");
  if (own == nullptr) return absl::OkStatus();
  if (!job.logprobs) return InvalidValue("targets_of", "'targets_of' needs 'logprobs': true");
  MOESERVE_ASSIGN_OR_RETURN(job.targets_of, TokenIdList(*own, "targets_of", vocab_size));
  return absl::OkStatus();
}

absl::Status ParseByRoute(const Json& body, FieldRoute route, const EncodeModel& model,
                          bool returns_documents, EncodeJob& job) {
  const int vocab_size = model.spec->vocab_size;
  switch (route) {
    case FieldRoute::kEmbeddings:
      MOESERVE_RETURN_IF_ERROR(CheckTask(*model.spec, EncodeTask::kEmbed, "model"));
      MOESERVE_RETURN_IF_ERROR(ParseInput(body, false, false, vocab_size, job));
      return ParseVectors(body, model, job);
    case FieldRoute::kPooling:
      MOESERVE_RETURN_IF_ERROR(ParsePooling(body, model, job));
      MOESERVE_RETURN_IF_ERROR(ParseInput(body, false, false, vocab_size, job));
      return ParseVectors(body, model, job);
    case FieldRoute::kClassify:
      MOESERVE_RETURN_IF_ERROR(ParseClassify(body, model, job));
      return ParseInput(body, job.task == EncodeTask::kClassify, false, vocab_size, job);
    case FieldRoute::kScore:
      return ParseScore(body, model, job);
    case FieldRoute::kRerank:
      return ParseRerank(body, model, returns_documents, job);
    default:
      return ParseFillMask(body, model, job);
  }
}

}  // namespace

Result<EncodeJob> ParseEncode(const Json& body, FieldRoute route, const RequestRules& rules,
                              const EncodeModel& model, bool returns_documents) {
  EncodeJob job;
  MOESERVE_RETURN_IF_ERROR(ParseShared(body, rules, job));
  MOESERVE_RETURN_IF_ERROR(ParseByRoute(body, route, model, returns_documents, job));
  MOESERVE_RETURN_IF_ERROR(ParseTypes(body, *model.spec, job));
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(CheckRequestFields(body, route, rules.strict_fields, findings));
  job.ignored_fields = findings.ignored;
  job.warnings = std::move(findings.warnings);
  return job;
}

}  // namespace moeserve::server
