#include "server/rpc/messages/encode_messages.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/encode/encode_results.h"
#include "server/generation/token_text.h"
#include "server/rpc/messages/messages.h"

namespace moeserve::server::rpc {
namespace {

Result<EncodeTask> TaskOf(const v1::EncodeRequest& request, const ModelSpec& spec) {
  switch (request.task()) {
    case v1::ENCODE_TASK_UNSPECIFIED:
      return DefaultPoolingTask(spec);
    case v1::ENCODE_TASK_EMBED:
      return EncodeTask::kEmbed;
    case v1::ENCODE_TASK_TOKEN_EMBED:
      return EncodeTask::kTokenEmbed;
    case v1::ENCODE_TASK_CLASSIFY:
      return EncodeTask::kClassify;
    case v1::ENCODE_TASK_TOKEN_CLASSIFY:
      return EncodeTask::kTokenClassify;
    case v1::ENCODE_TASK_SCORE:
      return EncodeTask::kScore;
    case v1::ENCODE_TASK_FILL_MASK:
      return EncodeTask::kFillMask;
    default:
      return InvalidValue("task", Concat("'task': unknown number ", request.task()));
  }
}

absl::Status CheckTokens(const char* name, const google::protobuf::RepeatedField<int32_t>& ids,
                         int vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return InvalidValue(name, Concat("'", name, "': expected token ids from 0 to ",
                                       vocab_size - 1, ", found ", id));
    }
  }
  return absl::OkStatus();
}

Result<TextInput> InputOf(const v1::EncodeInput& input, EncodeTask task, const ModelSpec& spec) {
  TextInput out;
  if (input.has_text_pair() && task != EncodeTask::kClassify && task != EncodeTask::kScore) {
    return InvalidValue("inputs.text_pair", "'inputs.text_pair' needs the task CLASSIFY or SCORE");
  }
  if (input.has_text()) {
    out.text = input.text();
    if (input.has_text_pair()) out.pair = input.text_pair();
  } else {
    out.is_text = false;
    if (input.token_ids().ids().empty()) {
      return InvalidValue("inputs", "'inputs': expected a text, or token ids and not none of them");
    }
    MOESERVE_RETURN_IF_ERROR(
        CheckTokens("inputs.token_ids", input.token_ids().ids(), spec.vocab_size));
    out.ids.assign(input.token_ids().ids().begin(), input.token_ids().ids().end());
    if (input.has_text_pair()) {
      return InvalidValue("inputs.text_pair", "'inputs.text_pair' needs a text beside it");
    }
  }
  if (input.token_type_ids().empty()) return out;
  if (static_cast<size_t>(input.token_type_ids_size()) != out.ids.size()) {
    return InvalidValue("inputs.token_type_ids",
                        "'inputs.token_type_ids' must have a type for each of token_ids");
  }
  for (const uint32_t type : input.token_type_ids()) {
    if (type >= static_cast<uint32_t>(std::max(spec.token_types, 1))) {
      return InvalidValue("inputs.token_type_ids",
                          Concat("'inputs.token_type_ids': expected types from 0 to ",
                                 std::max(spec.token_types, 1) - 1, ", found ", type));
    }
    out.types.push_back(static_cast<uint8_t>(type));
  }
  return out;
}

absl::Status ParseInputs(const v1::EncodeRequest& request, const ModelSpec& spec, EncodeJob& job) {
  if (request.inputs().empty()) return MissingField("inputs");
  if (static_cast<size_t>(request.inputs_size()) > kMaxEncodeInputs) {
    return InvalidValue(
        "inputs", Concat("'inputs': at most ", kMaxEncodeInputs,
                         " texts are accepted in one request, found ", request.inputs_size()));
  }
  if (job.task != EncodeTask::kScore) {
    for (const v1::EncodeInput& input : request.inputs()) {
      MOESERVE_ASSIGN_OR_RETURN(job.inputs.emplace_back(), InputOf(input, job.task, spec));
    }
    return absl::OkStatus();
  }
  std::vector<std::string> first;
  std::vector<std::string> second;
  for (const v1::EncodeInput& input : request.inputs()) {
    if (!input.has_text() || !input.has_text_pair()) {
      return InvalidValue("inputs", "'inputs': SCORE needs 'text' and 'text_pair' in each");
    }
    first.push_back(input.text());
    second.push_back(input.text_pair());
  }
  return SetPairs(spec, std::move(first), std::move(second), "inputs", job);
}

absl::Status ParseServing(const v1::EncodeRequest& request, const RequestRules& rules,
                          EncodeJob& job) {
  MOESERVE_ASSIGN_OR_RETURN(job.model, ResolveModel(request.model(), rules.served_names));
  if (!request.request_id().empty() && !IsValidRequestId(request.request_id())) {
    return InvalidValue("request_id",
                        "'request_id' must be 1 to 128 letters, digits, '.', '_', '-'");
  }
  job.request_id = request.request_id();
  // The protocol does not tell a priority of 0 from none.
  job.priority = request.priority() == 0 ? DefaultPriority(rules) : request.priority();
  if (job.priority < rules.min_priority || job.priority > kMaxPriority) {
    return InvalidValue("priority",
                        Concat("'priority': expected a number from ", rules.min_priority, " to ",
                               kMaxPriority, ", found ", job.priority));
  }
  if (request.cache_salt().size() > 128) {
    return InvalidValue("cache_salt", "'cache_salt' has at most 128 bytes");
  }
  job.cache_salt = request.cache_salt();
  job.routing.layout = rules.routing.layout;
  job.routing.num_layers = rules.routing.spec->num_layers();
  MOESERVE_ASSIGN_OR_RETURN(job.routing.control,
                            ParseControl(request.routing_control(), rules.routing));
  job.routing.record = request.return_routing();
  if (!job.routing.record) return absl::OkStatus();
  return CheckRecords(rules.routing, "return_routing");
}

absl::Status ParseTexts(const v1::EncodeRequest& request, const EncodeModel& model,
                        EncodeJob& job) {
  job.input_field = "inputs";
  job.add_special_tokens = !request.has_add_special_tokens() || request.add_special_tokens();
  if (request.has_truncate_prompt_tokens()) {
    job.truncate = request.truncate_prompt_tokens();
    if (*job.truncate < -1 || *job.truncate == 0) {
      return InvalidValue(
          "truncate_prompt_tokens",
          Concat("'truncate_prompt_tokens': expected -1 or a number above 0, found ",
                 *job.truncate));
    }
  }
  const std::string& side = request.truncation_side();
  if (!side.empty() && side != "left" && side != "right") {
    return InvalidValue("truncation_side", Concat("'truncation_side': expected left or right, ",
                                                  "found ", Printable(side, 64)));
  }
  if (!side.empty()) job.truncates_left = side == "left";
  const auto given = [](const std::string& text) {
    return text.empty() ? std::nullopt : std::optional<std::string>(text);
  };
  if (job.task == EncodeTask::kEmbed || job.task == EncodeTask::kTokenEmbed) {
    MOESERVE_RETURN_IF_ERROR(
        SetPrompt(*model.settings, given(request.prompt_name()), given(request.input_type()), job));
  }
  if (!request.has_dimensions()) return absl::OkStatus();
  job.dimensions = static_cast<int>(std::min<uint32_t>(request.dimensions(), INT32_MAX));
  if (job.task != EncodeTask::kEmbed && job.task != EncodeTask::kTokenEmbed) {
    return InvalidValue("dimensions", "'dimensions' can be given for vectors only");
  }
  return CheckDimensions(model, job);
}

absl::Status ParseMasks(const v1::EncodeRequest& request, const ModelSpec& spec, EncodeJob& job) {
  if (request.top_k() > static_cast<uint32_t>(kMaxFillTokens)) {
    return InvalidValue("top_k",
                        Concat("'top_k' is at most ", kMaxFillTokens, ", found ", request.top_k()));
  }
  if (request.top_k() > 0) job.top_k = static_cast<int>(request.top_k());
  MOESERVE_RETURN_IF_ERROR(CheckTokens("targets", request.targets(), spec.vocab_size));
  MOESERVE_RETURN_IF_ERROR(CheckTokens("targets_of", request.targets_of(), spec.vocab_size));
  if (static_cast<size_t>(request.targets_size()) > kMaxEncodeInputs) {
    return InvalidValue("targets", Concat("'targets' has at most ", kMaxEncodeInputs, " ids"));
  }
  job.targets.assign(request.targets().begin(), request.targets().end());
  job.targets_of.assign(request.targets_of().begin(), request.targets_of().end());
  job.logprobs = request.logprobs();
  if (!job.targets_of.empty() && (!job.logprobs || job.inputs.size() > 1)) {
    return InvalidValue("targets_of", "'targets_of' needs 'logprobs' and a single input");
  }
  return absl::OkStatus();
}

void FillOutput(EncodeRun& run, size_t index, v1::EncodeOutput& to) {
  const EncodeJob& job = run.job();
  const EncodeModel& model = run.model();
  const PreparedText& text = run.texts()[index];
  EncodeResult& result = run.results()[index].result;
  if (job.aggregation) {
    for (const TextEntity& found : TextEntities(job, model, job.inputs[index], text, result)) {
      v1::Entity& entity = *to.add_entities();
      entity.set_entity_group(found.entity.name);
      entity.set_score(found.entity.score);
      if (found.word) entity.set_word(*found.word);
      if (found.characters) {
        entity.set_start(static_cast<uint32_t>(found.characters->first));
        entity.set_end(static_cast<uint32_t>(found.characters->second));
      }
      entity.set_first_token(static_cast<uint32_t>(found.entity.begin));
      entity.set_end_token(static_cast<uint32_t>(found.entity.end));
    }
    return;
  }
  if (job.task != EncodeTask::kFillMask) {
    FinishValues(job, *model.spec, result);
    to.set_width(static_cast<uint32_t>(result.width));
    to.mutable_values()->Add(result.values.begin(), result.values.end());
    if (job.task == EncodeTask::kClassify) to.set_label(BestLabel(*model.spec, result));
    return;
  }
  for (size_t mask = 0; mask < text.masks.size(); ++mask) {
    v1::MaskedToken& masked = *to.add_masks();
    masked.set_position(static_cast<uint32_t>(text.masks[mask]));
    for (const MaskCandidate& candidate : MaskCandidates(job, text, result, mask)) {
      v1::Alternative& token = *masked.add_tokens();
      token.set_token_id(candidate.token);
      token.set_token(TokenText(model.tokenizer, candidate.token, false));
      token.set_logprob(candidate.logprob);
    }
  }
  if (!job.logprobs) return;
  for (const TokenLogprob& row : result.rows) to.add_logprobs(row.logprob);
}

}  // namespace

Result<EncodeJob> ParseEncode(const v1::EncodeRequest& request, const RequestRules& rules,
                              const EncodeModel& model) {
  EncodeJob job;
  const ModelSpec& spec = *model.spec;
  MOESERVE_RETURN_IF_ERROR(ParseServing(request, rules, job));
  MOESERVE_ASSIGN_OR_RETURN(job.task, TaskOf(request, spec));
  MOESERVE_RETURN_IF_ERROR(CheckTask(spec, job.task, "task"));
  MOESERVE_RETURN_IF_ERROR(ParseInputs(request, spec, job));
  MOESERVE_RETURN_IF_ERROR(ParseTexts(request, model, job));
  if (request.has_use_activation()) job.activation = request.use_activation();
  if (request.has_aggregation()) {
    if (job.task != EncodeTask::kTokenClassify ||
        spec.head.kind != HeadKind::kTokenClassification) {
      return InvalidValue("aggregation", "'aggregation' needs the task TOKEN_CLASSIFY");
    }
    const bool by_default = request.aggregation() == "default";
    MOESERVE_RETURN_IF_ERROR(SetAggregation(
        spec, by_default ? std::nullopt : std::optional<std::string>(request.aggregation()), job));
  }
  if (job.task == EncodeTask::kFillMask) MOESERVE_RETURN_IF_ERROR(ParseMasks(request, spec, job));
  return job;
}

void FillEncoded(EncodeRun& run, v1::EncodeResponse& to) {
  const EncodeJob& job = run.job();
  const ModelSpec& spec = *run.model().spec;
  to.set_id(run.IdWith("encode-"));
  to.set_model(job.model);
  if (job.task == EncodeTask::kScore) {
    std::vector<const EncodeResult*> results;
    for (EncodedText& text : run.results()) {
      FinishValues(job, spec, text.result);
      results.push_back(&text.result);
    }
    for (const float score : PairScores(job, spec, results)) to.add_outputs()->set_score(score);
  } else {
    for (size_t i = 0; i < run.results().size(); ++i) {
      FillOutput(run, i, *to.add_outputs());
      run.results()[i].result = {};
    }
  }
  if (job.task == EncodeTask::kClassify || job.task == EncodeTask::kTokenClassify) {
    for (const std::string& label : spec.head.labels) to.add_labels(label);
  }
  FillUsage(run.usage(), *to.mutable_usage());
  for (const EncodedText& text : run.results()) {
    if (text.routing) Fill(*text.routing, *job.routing.layout, *to.add_routing());
  }
}

}  // namespace moeserve::server::rpc
