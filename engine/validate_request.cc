#include "engine/validate_request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "base/error_text.h"
#include "base/status.h"

namespace moeserve {
namespace {

// Returns the shortest text of a number: 3002 rather than 3002.000000.
std::string ShortNumber(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

absl::Status Invalid(std::string_view field, std::string_view expected, double found) {
  return absl::InvalidArgumentError(
      Concat(field, ": expected ", expected, ", found ", ShortNumber(found)));
}

absl::Status ValidateIds(std::string_view field, std::span<const TokenId> ids, int vocab_size) {
  for (TokenId id : ids) {
    if (id < 0 || id >= vocab_size) {
      return Invalid(field, Concat("token ids below ", vocab_size), id);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateNumbers(std::span<const SamplingField> fields, const SamplingParams& p) {
  for (const SamplingField& field : fields) {
    const double value = field.Get(p);
    if (!field.Accepts(value)) return Invalid(field.name, RangeText(field), value);
  }
  return absl::OkStatus();
}

absl::Status ValidateLogitChanges(const SamplingParams& p, int vocab_size) {
  MOESERVE_RETURN_IF_ERROR(ValidateNumbers(kPenaltyFields, p));
  for (const auto& [id, bias] : p.logit_bias) {
    MOESERVE_RETURN_IF_ERROR(ValidateIds("logit_bias", {&id, 1}, vocab_size));
    if (!(std::abs(bias) <= kMaxLogitBias)) {
      return Invalid("logit_bias", Concat(-kMaxLogitBias, " to ", kMaxLogitBias), bias);
    }
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("allowed_token_ids", p.allowed_token_ids, vocab_size));
  for (const std::vector<TokenId>& word : p.bad_words) {
    if (word.empty()) return absl::InvalidArgumentError("bad_words: expected a token or more");
    MOESERVE_RETURN_IF_ERROR(ValidateIds("bad_words", word, vocab_size));
  }
  for (const auto& [name, id] : {std::pair{"forced_bos_token_id", p.forced_bos_token_id},
                                 std::pair{"forced_eos_token_id", p.forced_eos_token_id}}) {
    if (!id) continue;
    MOESERVE_RETURN_IF_ERROR(ValidateIds(name, {&*id, 1}, vocab_size));
    if (p.constraint != nullptr) {
      return absl::InvalidArgumentError(
          Concat(name, ": expected none together with structured output, found ", *id));
    }
  }
  if (p.min_tokens > p.max_tokens) return Invalid("min_tokens", "0 to max_tokens", p.min_tokens);
  return absl::OkStatus();
}

// Beam search draws nothing, so what changes draws cannot be obeyed.
absl::Status ValidateBeam(const SamplingParams& p) {
  const BeamParams& beam = *p.beam;
  if (beam.num_beams < 1 || beam.num_beams > kMaxBeams) {
    return Invalid("num_beams", Concat("1 to ", kMaxBeams), beam.num_beams);
  }
  if (!(std::abs(beam.length_penalty) <= kMaxLengthPenalty)) {
    return Invalid("length_penalty", Concat(-kMaxLengthPenalty, " to ", kMaxLengthPenalty),
                   beam.length_penalty);
  }
  if (p.max_tokens < 1) return Invalid("max_tokens", "1 or more with beam search", p.max_tokens);
  if (p.temperature != 0.0 && p.temperature != 1.0) {
    return Invalid("temperature", "1 or 0 with beam search", p.temperature);
  }
  if (p.top_p != 1.0) return Invalid("top_p", "1 with beam search", p.top_p);
  if (p.top_k > 0) return Invalid("top_k", "0 or -1 with beam search", p.top_k);
  if (p.min_p != 0.0) return Invalid("min_p", "0 with beam search", p.min_p);
  if (p.seed.has_value()) {
    return absl::InvalidArgumentError(
        Concat("seed: expected none with beam search, found ", *p.seed));
  }
  return absl::OkStatus();
}

absl::Status ValidateSampling(const SamplingParams& p, const RequestLimits& limits,
                              int vocab_size) {
  MOESERVE_RETURN_IF_ERROR(ValidateNumbers(kDrawFields, p));
  if (p.beam.has_value()) MOESERVE_RETURN_IF_ERROR(ValidateBeam(p));
  if (p.max_tokens < 0) return Invalid("max_tokens", "0 or more", p.max_tokens);
  for (const auto& top : {p.logprobs, p.prompt_logprobs}) {
    if (top.has_value() && *top < 0) return Invalid("logprobs", "0 or more", *top);
  }
  for (const std::string& s : p.stop) {
    if (s.empty()) return absl::InvalidArgumentError("stop: expected a non-empty string");
  }
  if (!p.stop.empty() && !limits.has_tokenizer) {
    return absl::InvalidArgumentError("stop: this model was loaded without a tokenizer");
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("stop_token_ids", p.stop_token_ids, vocab_size));
  return ValidateLogitChanges(p, vocab_size);
}

absl::Status ValidateText(const Request& request, const ModelSpec& spec) {
  MOESERVE_RETURN_IF_ERROR(ValidateIds("prompt", request.prompt, spec.vocab_size));
  if (!spec.position.count_padding &&
      std::ranges::find(request.prompt, *spec.pad_token_id) != request.prompt.end()) {
    return absl::InvalidArgumentError(
        Concat("prompt: expected a text without padding tokens, found ", *spec.pad_token_id));
  }
  const std::vector<uint8_t>& types = request.token_types;
  if (!types.empty() && types.size() != request.prompt.size()) {
    return Invalid("token_types", "one for each token", static_cast<double>(types.size()));
  }
  for (const uint8_t type : types) {
    if (type >= std::max(spec.token_types, 1)) {
      return Invalid("token_types", Concat("types below ", std::max(spec.token_types, 1)), type);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateSource(const Request& request, const RequestLimits& limits,
                            const ModelSpec& spec) {
  const auto tokens = std::ssize(request.source);
  if (spec.encoder == nullptr) {
    return tokens == 0 ? absl::OkStatus()
                       : Invalid("source", "none with this model", static_cast<double>(tokens));
  }
  const int most = std::min(limits.max_model_len, spec.encoder->max_position_embeddings);
  if (tokens < 1 || tokens > most) {
    return Invalid("source", Concat("1 to ", most, " tokens"), static_cast<double>(tokens));
  }
  if (!spec.encoder->position.count_padding &&
      std::ranges::find(request.source, *spec.pad_token_id) != request.source.end()) {
    return absl::InvalidArgumentError("source: expected a text without padding tokens");
  }
  return ValidateIds("source", request.source, spec.encoder->vocab_size);
}

absl::Status ValidateEncode(const Request& request, const ModelSpec& spec) {
  const EncodeParams& encode = *request.encode;
  const std::span<const int32_t> rows = encode.rows;
  const bool tokens = encode.output == EncodeOutput::kTokens;
  if (rows.empty() == tokens) {
    return Invalid("rows", tokens ? "a position or more" : "none",
                   static_cast<double>(rows.size()));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= std::ssize(request.prompt)) {
      return Invalid("rows", Concat("positions below ", request.prompt.size()), rows[i]);
    }
    if (i > 0 && rows[i] <= rows[i - 1]) return Invalid("rows", "ascending positions", rows[i]);
  }
  if (!encode.own.empty() && encode.own.size() != rows.size()) {
    return Invalid("own", "one token for each of rows", static_cast<double>(encode.own.size()));
  }
  if (encode.top < 0 || encode.top > spec.vocab_size) {
    return Invalid("top", Concat("0 to ", spec.vocab_size), encode.top);
  }
  MOESERVE_RETURN_IF_ERROR(ValidateIds("own", encode.own, spec.vocab_size));
  return ValidateIds("targets", encode.targets, spec.vocab_size);
}

}  // namespace

bool Computes(const ModelSpec& spec, const EncodeOutput* output) {
  const HeadKind head = spec.head.kind;
  if (output == nullptr) return head == HeadKind::kLanguageModel;
  switch (*output) {
    case EncodeOutput::kText:
      return spec.pooling.has_value();
    case EncodeOutput::kVectors:
      return spec.pooling.has_value() && head != HeadKind::kSequenceClassification;
    case EncodeOutput::kLogits:
      return head == HeadKind::kTokenClassification || head == HeadKind::kSpans;
    case EncodeOutput::kTokens:
      return head == HeadKind::kMaskedLm;
  }
  return false;
}

std::vector<std::string_view> TaskNames(const ModelSpec& spec) {
  const bool classifies = spec.head.kind == HeadKind::kSequenceClassification;
  const bool embeds = spec.pooling.has_value() && !classifies;
  std::vector<std::string_view> names;
  const auto add = [&](bool has, std::string_view name) {
    if (has) names.push_back(name);
  };
  add(spec.head.kind == HeadKind::kLanguageModel, "generate");
  add(embeds, "embed");
  add(embeds, "token_embed");
  add(classifies, "classify");
  const EncodeOutput logits = EncodeOutput::kLogits;
  add(Computes(spec, &logits), "token_classify");
  // Two labels say how much two texts have to do with each other, or whether the second follows.
  add(embeds || (classifies && spec.head.labels.size() <= 2), "score");
  add(spec.head.kind == HeadKind::kMaskedLm, "fill_mask");
  return names;
}

std::string TasksOf(const ModelSpec& spec) {
  std::string tasks;
  for (const std::string_view name : TaskNames(spec)) {
    tasks.append(Concat(tasks.empty() ? "" : ", ", name));
  }
  return tasks;
}

bool ComputesWhole(const Request& request, const ModelSpec& spec) {
  if (spec.kind == ModelKind::kEncoder) return true;
  return request.encode.has_value() && request.encode->output == EncodeOutput::kText &&
         spec.pooling.has_value() && PoolsAll(spec.pooling->kind);
}

absl::Status ValidateRequest(const Request& request, const RequestLimits& limits,
                             const ModelSpec& spec) {
  if (request.prompt.empty()) return absl::InvalidArgumentError("prompt: expected a token or more");
  if (!Computes(spec, request.encode.has_value() ? &request.encode->output : nullptr)) {
    return absl::InvalidArgumentError(
        Concat("task: expected one that this model computes (", TasksOf(spec), "), found another"));
  }
  MOESERVE_RETURN_IF_ERROR(ValidateText(request, spec));
  if (request.encode.has_value()) MOESERVE_RETURN_IF_ERROR(ValidateEncode(request, spec));
  MOESERVE_RETURN_IF_ERROR(ValidateSource(request, limits, spec));
  MOESERVE_RETURN_IF_ERROR(ValidateIds("prediction", request.prediction, spec.vocab_size));
  // Each step searches in it.
  if (std::ssize(request.prediction) > limits.max_model_len) {
    return absl::InvalidArgumentError(Concat("prediction: expected at most ", limits.max_model_len,
                                             " tokens, found ", request.prediction.size()));
  }
  if (std::abs(request.priority) > kMaxPriority) {
    return Invalid("priority", Concat(-kMaxPriority, " to ", kMaxPriority), request.priority);
  }
  if ((request.expert_counts || request.routing_record) && !limits.routing_records) {
    return absl::InvalidArgumentError("routing: this server keeps no routing records");
  }
  if (request.routing_control != nullptr && !limits.routing_control) {
    return absl::InvalidArgumentError("routing_control: not allowed on this server");
  }
  MOESERVE_RETURN_IF_ERROR(ValidateSampling(request.sampling, limits, spec.vocab_size));
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const std::string why =
      limits.context_reason.empty() ? "" : Concat(" (", limits.context_reason, ')');
  if (request.encode.has_value() && prompt > limits.max_model_len) {
    return absl::InvalidArgumentError(Concat("context length: the limit is ", limits.max_model_len,
                                             " tokens", why, ", found ", prompt));
  }
  const int64_t total = prompt + (request.encode.has_value() ? 0 : request.sampling.max_tokens);
  if (total > limits.max_model_len) {
    return absl::InvalidArgumentError(
        Concat("context length: the limit is ", limits.max_model_len, " tokens", why, ", found ",
               prompt, " in the prompt and max_tokens ", request.sampling.max_tokens));
  }
  return absl::OkStatus();
}

}  // namespace moeserve
