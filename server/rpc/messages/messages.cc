#include "server/rpc/messages/messages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "base/kinds.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/fields/structural_tag.h"
#include "server/generation/beam_params.h"
#include "server/generation/token_text.h"
#include "server/metrics/prometheus.h"
#include "server/rpc/messages/statistic_messages.h"

namespace moeserve::server::rpc {
namespace {

absl::Status CheckRange(const std::string& name, double value, double min, double max,
                        bool min_excluded = false) {
  if (value >= min && value <= max && !(min_excluded && value == min)) return absl::OkStatus();
  return InvalidValue(name, Concat("'", name, "': expected a number ",
                                   min_excluded ? "above " : "from ", PrometheusNumber(min), " to ",
                                   PrometheusNumber(max), ", found ", PrometheusNumber(value)));
}

absl::Status CheckIds(const char* name, const google::protobuf::RepeatedField<int32_t>& ids,
                      int vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return InvalidValue(name, Concat("'", name, "': expected token ids from 0 to ",
                                       vocab_size - 1, ", found ", id));
    }
  }
  return absl::OkStatus();
}

// Returns the value of a numeric field, or the field's default if it is not set.
double Number(const v1::SamplingParams& in, const google::protobuf::FieldDescriptor& field) {
  using Field = google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& reflection = *in.GetReflection();
  switch (field.cpp_type()) {
    case Field::CPPTYPE_DOUBLE:
      return reflection.GetDouble(in, &field);
    case Field::CPPTYPE_INT32:
      return reflection.GetInt32(in, &field);
    default:
      MOESERVE_CHECK(field.cpp_type() == Field::CPPTYPE_UINT32, "a number of SamplingParams");
      return reflection.GetUInt32(in, &field);
  }
}

// Reads the numbers listed in `fields`, which have the same names in the message. A field that was
// not sent keeps its value in `out`. That value, a default of the model, is checked, too.
absl::Status ParseNumbers(const v1::SamplingParams& in, std::span<const SamplingField> fields,
                          SamplingParams& out) {
  for (const SamplingField& field : fields) {
    const auto* wire = v1::SamplingParams::descriptor()->FindFieldByName(field.name);
    MOESERVE_CHECK(wire != nullptr, "SamplingParams of the proto file has every field");
    const bool sent = !wire->has_presence() || in.GetReflection()->HasField(in, wire);
    const double value = sent ? Number(in, *wire) : field.Get(out);
    MOESERVE_RETURN_IF_ERROR(CheckRange(Concat("sampling.", field.name), value, field.min,
                                        field.max, field.min_excluded));
    field.Set(out, value);
  }
  return absl::OkStatus();
}

void ParseFlags(const v1::SamplingParams& in, SamplingParams& out) {
  for (const SamplingFlag& flag : kSamplingFlags) {
    const auto* wire = v1::SamplingParams::descriptor()->FindFieldByName(flag.name);
    MOESERVE_CHECK(wire != nullptr, "SamplingParams of the proto file has every flag");
    const google::protobuf::Reflection& reflection = *in.GetReflection();
    if (!wire->has_presence() || reflection.HasField(in, wire)) {
      out.*flag.member = reflection.GetBool(in, wire);
    }
  }
}

absl::Status ParseStop(const v1::SamplingParams& in, const RequestRules& rules,
                       SamplingParams& out) {
  if (in.stop_size() > rules.limits.max_stop) {
    return InvalidValue("sampling.stop",
                        Concat("'sampling.stop' has at most ", rules.limits.max_stop, " strings"));
  }
  for (const std::string& stop : in.stop()) {
    if (stop.empty() || stop.size() > rules.limits.max_stop_bytes) {
      return InvalidValue("sampling.stop", Concat("'sampling.stop': a string has 1 to ",
                                                  rules.limits.max_stop_bytes, " bytes"));
    }
    out.stop.push_back(stop);
  }
  if (in.stop_token_ids_size() > rules.limits.max_stop_token_ids) {
    return InvalidValue("sampling.stop_token_ids", Concat("'sampling.stop_token_ids' has at most ",
                                                          rules.limits.max_stop_token_ids, " ids"));
  }
  MOESERVE_RETURN_IF_ERROR(
      CheckIds("sampling.stop_token_ids", in.stop_token_ids(), rules.vocab_size));
  out.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  return absl::OkStatus();
}

// Reads the fields about single tokens and words: logit_bias, bad_words and similar.
absl::Status ParseTokenChanges(const v1::SamplingParams& in, const RequestRules& rules,
                               SamplingParams& out) {
  if (in.logit_bias().size() > rules.limits.max_logit_bias) {
    return InvalidValue("sampling.logit_bias", Concat("'sampling.logit_bias' has at most ",
                                                      rules.limits.max_logit_bias, " entries"));
  }
  for (const auto& [id, bias] : in.logit_bias()) {
    MOESERVE_RETURN_IF_ERROR(CheckRange("sampling.logit_bias", id, 0, rules.vocab_size - 1));
    MOESERVE_RETURN_IF_ERROR(
        CheckRange("sampling.logit_bias", bias, -kMaxLogitBias, kMaxLogitBias));
    out.logit_bias.emplace_back(id, bias);
  }
  MOESERVE_RETURN_IF_ERROR(
      CheckIds("sampling.allowed_token_ids", in.allowed_token_ids(), rules.vocab_size));
  if (in.allowed_token_ids_size() > rules.vocab_size) {
    return InvalidValue(
        "sampling.allowed_token_ids",
        Concat("'sampling.allowed_token_ids' has at most ", rules.vocab_size, " ids"));
  }
  out.allowed_token_ids.assign(in.allowed_token_ids().begin(), in.allowed_token_ids().end());
  if (!in.bad_words().empty()) {
    MOESERVE_ASSIGN_OR_RETURN(
        out.bad_words, EncodeBadWords({in.bad_words().begin(), in.bad_words().end()}, rules));
  }
  return absl::OkStatus();
}

absl::Status ParseSampling(const v1::SamplingParams& in, const RequestRules& rules,
                           CompletionParams& out) {
  SamplingParams& s = out.sampling;
  s = DefaultSampling(rules.defaults);
  if (in.min_tokens() == 0) SetDefaultLengths(rules.defaults, out);
  MOESERVE_RETURN_IF_ERROR(ParseNumbers(in, kDrawFields, s));
  if (in.has_seed()) s.seed = in.seed();
  if (in.has_max_tokens()) {
    MOESERVE_RETURN_IF_ERROR(
        CheckRange("sampling.max_tokens", in.max_tokens(), 0, kMaxSamplingInt));
    out.max_tokens = in.max_tokens();
  }
  ParseFlags(in, s);
  MOESERVE_RETURN_IF_ERROR(ParseStop(in, rules, s));
  MOESERVE_RETURN_IF_ERROR(ParseNumbers(in, kPenaltyFields, s));
  return ParseTokenChanges(in, rules, s);
}

// Reads the prompt. `Message` has a oneof of text and token_ids, and the fields model and
// add_special_tokens.
template <typename Message>
absl::Status ParseInput(const Message& request, const char* field, const RequestRules& rules,
                        CompletionParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(out.model, ResolveModel(request.model(), rules.served_names));
  PromptInput prompt;
  if (request.has_text()) {
    prompt.is_text = true;
    prompt.text = request.text();
    if (prompt.text.size() > rules.limits.max_prompt_bytes) {
      return InvalidValue("text", Concat("'text' has at most ", rules.limits.max_prompt_bytes,
                                         " bytes, found ", prompt.text.size()));
    }
  } else if (request.has_token_ids()) {
    const auto& ids = request.token_ids().ids();
    if (ids.empty()) return InvalidValue("token_ids", "'token_ids' must not be empty");
    MOESERVE_RETURN_IF_ERROR(CheckIds("token_ids", ids, rules.prompt_vocab_size()));
    prompt.ids.assign(ids.begin(), ids.end());
  } else {
    return MakeError(absl::StatusCode::kInvalidArgument, "missing_field",
                     Concat("the ", field, " is missing: set 'text' or 'token_ids'"), field);
  }
  out.prompts.push_back(std::move(prompt));
  out.add_special_tokens = !request.has_add_special_tokens() || request.add_special_tokens();
  return absl::OkStatus();
}

absl::Status ParseDecoder(const v1::GenerateRequest& request, const RequestRules& rules,
                          CompletionParams& out) {
  if (request.has_forced_bos_token_id()) {
    const TokenId id = request.forced_bos_token_id();
    if (id < 0 || id >= rules.vocab_size) {
      return InvalidValue("forced_bos_token_id",
                          Concat("'forced_bos_token_id': expected a token id from 0 to ",
                                 rules.vocab_size - 1, ", found ", id));
    }
    out.forced_bos_token_id = id;
  }
  out.target_language = request.target_language();
  if (request.decoder_case() == v1::GenerateRequest::DECODER_NOT_SET) return absl::OkStatus();
  PromptInput prompt;
  prompt.is_text = request.has_decoder_prompt();
  if (prompt.is_text) {
    prompt.text = request.decoder_prompt();
    if (prompt.text.size() > rules.limits.max_prompt_bytes) {
      return InvalidValue("decoder_prompt",
                          Concat("'decoder_prompt' has at most ", rules.limits.max_prompt_bytes,
                                 " bytes, found ", prompt.text.size()));
    }
  } else {
    const auto& ids = request.decoder_prompt_token_ids().ids();
    MOESERVE_RETURN_IF_ERROR(CheckIds("decoder_prompt_token_ids", ids, rules.vocab_size));
    prompt.ids.assign(ids.begin(), ids.end());
  }
  out.decoder_prompt = std::move(prompt);
  return absl::OkStatus();
}

Result<std::optional<ConstraintField>> ParseConstraint(const v1::StructuredOutput& in) {
  ConstraintField out;
  out.spec.strict = in.strict();
  out.param = "structured_output.";
  switch (in.constraint_case()) {
    case v1::StructuredOutput::CONSTRAINT_NOT_SET:
      return std::optional<ConstraintField>();
    case v1::StructuredOutput::kJsonObject:
      if (!in.json_object()) return std::optional<ConstraintField>();
      out.spec.kind = ConstraintSpec::Kind::kJsonObject;
      out.param += "json_object";
      break;
    case v1::StructuredOutput::kJsonSchema:
      out.spec.kind = ConstraintSpec::Kind::kJsonSchema;
      out.spec.text = in.json_schema();
      out.spec.closed_objects = true;
      out.param += "json_schema";
      break;
    case v1::StructuredOutput::kRegex:
      out.spec.kind = ConstraintSpec::Kind::kRegex;
      out.spec.text = in.regex();
      out.param += "regex";
      break;
    case v1::StructuredOutput::kChoice:
      out.spec.kind = ConstraintSpec::Kind::kChoice;
      out.spec.choices.assign(in.choice().texts().begin(), in.choice().texts().end());
      out.param += "choice";
      break;
    case v1::StructuredOutput::kGrammar:
      out.spec.kind = ConstraintSpec::Kind::kGrammar;
      out.spec.text = in.grammar();
      out.param += "grammar";
      break;
    case v1::StructuredOutput::kStructuralTag: {
      out.param += "structural_tag";
      const Json value = in.structural_tag();
      MOESERVE_ASSIGN_OR_RETURN(out.spec, StructuralTagSpec(value, out.param));
      break;
    }
  }
  return std::optional<ConstraintField>(std::move(out));
}

// Reads `beam`, after the fields about sampling.
absl::Status ParseBeam(const v1::GenerateRequest& request, const RequestRules& rules,
                       CompletionParams& out) {
  const v1::BeamSearch& in = request.beam();
  BeamParams beam;
  beam.num_beams = request.n() > 0 ? out.n : kDefaultBeams;
  if (in.num_beams() > 0) {
    MOESERVE_RETURN_IF_ERROR(CheckRange("beam.num_beams", in.num_beams(), 1, kMaxBeams));
    beam.num_beams = static_cast<int>(in.num_beams());
  }
  if (in.has_length_penalty()) beam.length_penalty = in.length_penalty();
  MOESERVE_RETURN_IF_ERROR(CheckRange("beam.length_penalty", beam.length_penalty,
                                      -kMaxLengthPenalty, kMaxLengthPenalty));
  switch (in.early_stopping()) {
    case v1::EARLY_STOPPING_FALSE:
      break;
    case v1::EARLY_STOPPING_TRUE:
      beam.early_stopping = EarlyStopping::kTrue;
      break;
    case v1::EARLY_STOPPING_NEVER:
      beam.early_stopping = EarlyStopping::kNever;
      break;
    default:
      return InvalidValue("beam.early_stopping",
                          Concat("'beam.early_stopping': expected a value of EarlyStopping, found ",
                                 static_cast<int>(in.early_stopping())));
  }
  out.sampling.beam = beam;
  const v1::SamplingParams& sampling = request.sampling();
  return ResolveBeams(
      {.asked = "beam", .beams = "beam.num_beams", .sampling = "sampling."},
      [&](const char* name) {
        return sampling.GetReflection()->HasField(
            sampling, v1::SamplingParams::descriptor()->FindFieldByName(name));
      },
      rules, out);
}

Result<int> CheckLogprobs(const char* name, uint32_t value, const RequestLimits& limits) {
  if (value > static_cast<uint32_t>(limits.max_logprobs)) {
    return InvalidValue(name,
                        Concat("'", name, "' is at most ", limits.max_logprobs, ", found ", value));
  }
  return static_cast<int>(value);
}

void FillToken(TokenId token, const Tokenizer* tokenizer, v1::TokenLogprob& to) {
  to.set_token_id(token);
  to.set_token(TokenText(tokenizer, token, false));
  if (tokenizer != nullptr) to.set_token_bytes(tokenizer->TokenBytes(token));
}

}  // namespace

Result<std::shared_ptr<const RoutingControl>> ParseControl(const v1::RoutingControl& in,
                                                           const RoutingRules& rules) {
  constexpr char kField[] = "routing_control";
  RoutingChange change;
  const uint32_t most = std::numeric_limits<int32_t>::max();
  if (in.has_top_k()) change.top_k = static_cast<int>(std::min(in.top_k(), most));
  if (in.has_top_p()) change.top_p = in.top_p();
  for (const v1::RoutingControl::Expert& e : in.experts()) {
    RoutingChange::Expert expert;
    expert.layer = static_cast<int>(std::min(e.layer(), most));
    expert.expert = static_cast<int>(std::min(e.expert(), most));
    if (e.has_bias()) expert.bias = e.bias();
    if (e.block() == "attention") {
      expert.block = BlockKind::kAttention;
    } else if (e.block() == "cross_attention") {
      expert.block = BlockKind::kCrossAttention;
    } else if (!e.block().empty() && e.block() != "feed_forward") {
      return InvalidValue(
          kField,
          "'routing_control': 'block' must be \"attention\", \"cross_attention\" or "
          "\"feed_forward\"");
    }
    change.experts.push_back(expert);
  }
  if (change.empty()) return std::shared_ptr<const RoutingControl>();
  return MakeRoutingControl(change, rules, kField);
}

Result<CompletionParams> ParseGenerate(const v1::GenerateRequest& request,
                                       const RequestRules& rules) {
  CompletionParams c;
  c.stream = true;
  MOESERVE_RETURN_IF_ERROR(ParseInput(request, "prompt", rules, c));
  MOESERVE_RETURN_IF_ERROR(ParseDecoder(request, rules, c));
  MOESERVE_RETURN_IF_ERROR(ParseSampling(request.sampling(), rules, c));
  c.n = static_cast<int>(std::clamp<uint32_t>(request.n(), 1, 1'000'000));
  if (c.n > rules.limits.max_n) {
    return InvalidValue("n", Concat("'n' is at most ", rules.limits.max_n, ", found ", c.n));
  }
  if (request.has_beam()) MOESERVE_RETURN_IF_ERROR(ParseBeam(request, rules, c));
  if (request.has_logprobs()) {
    MOESERVE_ASSIGN_OR_RETURN(c.logprobs,
                              CheckLogprobs("logprobs", request.logprobs(), rules.limits));
  }
  if (request.has_prompt_logprobs()) {
    MOESERVE_ASSIGN_OR_RETURN(
        c.prompt_logprobs,
        CheckLogprobs("prompt_logprobs", request.prompt_logprobs(), rules.limits));
  }
  if (!request.request_id().empty() && !IsValidRequestId(request.request_id())) {
    return InvalidValue("request_id",
                        "'request_id' must be 1 to 128 letters, digits, '.', '_', '-'");
  }
  c.request_id = request.request_id();
  // The protocol does not tell a priority of 0 from none.
  c.priority = request.priority() == 0 ? DefaultPriority(rules) : request.priority();
  MOESERVE_RETURN_IF_ERROR(CheckRange("priority", c.priority, rules.min_priority, kMaxPriority));
  if (request.cache_salt().size() > 128) {
    return InvalidValue("cache_salt", "'cache_salt' has at most 128 bytes");
  }
  c.cache_salt = request.cache_salt();
  MOESERVE_ASSIGN_OR_RETURN(c.constraint, ParseConstraint(request.structured_output()));
  MOESERVE_RETURN_IF_ERROR(CheckConstraint(c));
  c.routing.layout = rules.routing.layout;
  c.routing.source_layout = rules.routing.source_layout;
  c.routing.record = request.return_routing();
  if (c.routing.record) MOESERVE_RETURN_IF_ERROR(CheckRecords(rules.routing, "return_routing"));
  MOESERVE_ASSIGN_OR_RETURN(c.routing.control,
                            ParseControl(request.routing_control(), rules.routing));
  return c;
}

Result<CompletionParams> ParseScore(const v1::ScoreRequest& request, const RequestRules& rules) {
  CompletionParams out;
  MOESERVE_RETURN_IF_ERROR(ParseInput(request, "input", rules, out));
  out.max_tokens = 0;
  out.priority = DefaultPriority(rules);
  MOESERVE_ASSIGN_OR_RETURN(out.prompt_logprobs,
                            CheckLogprobs("top_logprobs", request.top_logprobs(), rules.limits));
  return out;
}

absl::Status Fill(const TokenLogprob& from, const Tokenizer* tokenizer, v1::TokenLogprob& to) {
  FillToken(from.token, tokenizer, to);
  to.set_logprob(from.logprob);
  to.set_rank(from.rank);
  bool nan = std::isnan(from.logprob);
  for (const auto& [token, logprob] : from.top) {
    nan = nan || std::isnan(logprob);
    v1::Alternative* alternative = to.add_top();
    alternative->set_token_id(token);
    alternative->set_token(TokenText(tokenizer, token, false));
    alternative->set_logprob(logprob);
  }
  return nan ? absl::InternalError("a log-probability is not a number") : absl::OkStatus();
}

void FillUnscored(TokenId token, const Tokenizer* tokenizer, v1::TokenLogprob& to) {
  FillToken(token, tokenizer, to);
}

absl::Status Fill(const OutputDelta& delta, const PreparedPrompt& prompt,
                  const Tokenizer* tokenizer, v1::GenerateResponse& to) {
  to.set_text(delta.text);
  to.mutable_token_ids()->Add(delta.tokens.begin(), delta.tokens.end());
  for (const TokenLogprob& logprob : delta.logprobs) {
    MOESERVE_RETURN_IF_ERROR(Fill(logprob, tokenizer, *to.add_logprobs()));
  }
  const size_t scored = std::min(delta.prompt_logprobs.size(), prompt.ids.size());
  for (size_t i = prompt.start_tokens(); i < scored; ++i) {
    if (delta.prompt_logprobs[i]) {
      MOESERVE_RETURN_IF_ERROR(
          Fill(*delta.prompt_logprobs[i], tokenizer, *to.add_prompt_logprobs()));
    } else {
      FillUnscored(prompt.ids[i], tokenizer, *to.add_prompt_logprobs());
    }
  }
  if (delta.finished) {
    to.set_finish_reason(delta.finish_reason == FinishReason::kStop ? v1::FINISH_REASON_STOP
                                                                    : v1::FINISH_REASON_LENGTH);
    if (delta.stop_string) {
      to.set_stop_string(*delta.stop_string);
    } else if (delta.stop_token) {
      to.set_stop_token_id(*delta.stop_token);
    }
  }
  if (delta.beam) {
    to.set_beam_score(delta.beam->score);
    to.set_cumulative_logprob(delta.beam->cumulative_logprob);
  }
  FillUsage(delta.usage, *to.mutable_usage());
  return absl::OkStatus();
}

void FillUsage(const Usage& usage, v1::Usage& to) {
  to.set_prompt_tokens(usage.prompt_tokens);
  to.set_completion_tokens(usage.completion_tokens);
  to.set_cached_tokens(usage.cached_tokens);
  if (usage.routed_tokens == 0) return;
  const double tokens = usage.routed_tokens;
  to.set_experts_per_token(static_cast<double>(usage.expert_routes) / tokens);
  to.set_activated_parameters_per_token(static_cast<double>(usage.activated_parameters) / tokens);
  if (usage.macs) to.set_macs_per_token(*usage.macs / tokens);
}

void Fill(const RoutingRecord& record, const RouteLayout& layout, v1::RoutingRecord& to) {
  to.set_first_position(record.first_position);
  to.set_tokens(record.tokens);
  for (const auto& [begin, end] : record.reused) {
    v1::RoutingRecord::Range& range = *to.add_reused();
    range.set_begin(begin);
    range.set_end(end);
  }
  to.mutable_offsets()->Add(record.offsets.begin(), record.offsets.end());
  to.mutable_experts()->Add(record.experts.begin(), record.experts.end());
  to.mutable_weights()->Add(record.weights.begin(), record.weights.end());
  if (record.first_position > 0) return;
  to.mutable_layout()->set_rows_per_token(layout.rows_per_token);
  for (const RoutedBlock& from : layout.blocks) {
    v1::RouteLayout::Block& block = *to.mutable_layout()->add_blocks();
    block.set_layer(from.layer);
    block.set_block(Name(from.block));
    block.set_num_experts(from.num_experts);
    block.set_sub_tokens(from.sub_tokens);
    block.set_first_row(from.first_row);
  }
}

void Fill(const RoutingChange& change, v1::RoutingControl& to) {
  if (change.top_k) to.set_top_k(*change.top_k);
  if (change.top_p) to.set_top_p(*change.top_p);
  for (const RoutingChange::Expert& from : change.experts) {
    v1::RoutingControl::Expert& expert = *to.add_experts();
    expert.set_layer(from.layer);
    expert.set_block(Name(from.block));
    expert.set_expert(from.expert);
    if (from.bias) expert.set_bias(*from.bias);
  }
}

void Fill(const ExpertStats& stats, double threshold, v1::GetExpertStatsResponse& to) {
  const StatisticOptions options{.threshold = threshold};
  SetStatistics(to, ModelStatistics(), stats, options);
  for (const BlockExpertStats& block : stats.blocks) {
    v1::BlockExpertStats& out = *to.add_blocks();
    SetStatistics(out, BlockStatistics(), block, options);
    if (block.stack != Stack::kOnly) out.set_stack(std::string(KindName(block.stack)));
  }
}

}  // namespace moeserve::server::rpc
