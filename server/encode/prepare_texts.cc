#include <algorithm>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/encode/encode_job.h"

namespace moeserve::server {
namespace {

absl::Status TooLong(const EncodeJob& job, const EncodeModel& model, size_t index, size_t found) {
  std::string where = Concat("'", job.input_field, "'");
  if (job.inputs.size() > 1) where += Concat(", text ", index);
  return MakeError(
      absl::StatusCode::kInvalidArgument, "context_length_exceeded",
      Concat(where, ": this model takes ", model.max_tokens,
             " tokens of a text, special tokens included",
             model.context_reason.empty() ? "" : Concat(" (", model.context_reason, ')'),
             ", found ", found, job.fills ? "" : "; truncate_prompt_tokens: -1 cuts longer texts"),
      job.input_field);
}

// Returns the largest number of tokens that stay.
size_t MostTokens(const EncodeJob& job, const EncodeModel& model) {
  if (!job.truncate) return SIZE_MAX;
  const int most = *job.truncate < 0 ? model.max_tokens : std::min(*job.truncate, model.max_tokens);
  return static_cast<size_t>(most);
}

bool CutsLeft(const EncodeJob& job, const EncodeModel& model) {
  return job.truncates_left.value_or(model.spec->kind == ModelKind::kDecoder);
}

// For tokenizers that know no more of a text than its ids.
Result<EncodedTexts> EncodePlain(const Tokenizer& tokenizer, const std::string& text, bool special,
                                 const TokenLimit& limit) {
  EncodedTexts out;
  MOESERVE_ASSIGN_OR_RETURN(out.ids, tokenizer.Encode(text, special));
  if (out.ids.size() > limit.most) {
    const auto keep = static_cast<std::ptrdiff_t>(limit.most);
    if (limit.cuts_begin) {
      out.ids.erase(out.ids.begin(), out.ids.end() - keep);
    } else {
      out.ids.erase(out.ids.begin() + keep, out.ids.end());
    }
  }
  return out;
}

Result<EncodedTexts> EncodeInput(const EncodeJob& job, const EncodeModel& model,
                                 const std::string& text, const std::optional<std::string>& pair) {
  const TokenLimit limit = {.most = MostTokens(job, model), .cuts_begin = CutsLeft(job, model)};
  std::optional<std::string_view> second;
  if (pair) second = *pair;
  Result<EncodedTexts> encoded =
      model.tokenizer->EncodeTexts(text, second, job.add_special_tokens, limit);
  if (absl::IsUnimplemented(encoded.status()) && !pair) {
    encoded = EncodePlain(*model.tokenizer, text, job.add_special_tokens, limit);
  }
  if (encoded.ok()) return encoded;
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_value",
                   Concat("'", job.input_field, "': ", std::string(encoded.status().message())),
                   job.input_field);
}

// Returns the beginning of a document that has at most so many tokens.
Result<std::string> CutDocument(const EncodeModel& model, const EncodeJob& job,
                                const std::string& text) {
  const auto most = static_cast<size_t>(*job.max_document_tokens);
  const auto encoded = model.tokenizer->EncodeTexts(text, std::nullopt, false, {.most = most});
  if (encoded.ok()) {
    size_t end = 0;
    for (const TextSpan& span : encoded->spans) end = std::max(end, span.end);
    return text.substr(0, end);
  }
  MOESERVE_ASSIGN_OR_RETURN(std::vector<TokenId> ids, model.tokenizer->Encode(text, false));
  if (ids.size() <= most) return text;
  ids.resize(most);
  return model.tokenizer->Decode(ids, false);
}

Result<PreparedText> PrepareText(const EncodeJob& job, const EncodeModel& model,
                                 const TextInput& input, bool is_document) {
  if (model.tokenizer == nullptr) {
    return InvalidValue(job.input_field, "this model has no tokenizer: send token ids");
  }
  std::string text = job.prompt + input.text;
  std::optional<std::string> pair = input.pair;
  if (job.max_document_tokens && pair) {
    MOESERVE_ASSIGN_OR_RETURN(pair, CutDocument(model, job, *pair));
  } else if (job.max_document_tokens && is_document) {
    MOESERVE_ASSIGN_OR_RETURN(text, CutDocument(model, job, text));
  }
  MOESERVE_ASSIGN_OR_RETURN(EncodedTexts encoded, EncodeInput(job, model, text, pair));
  PreparedText out;
  out.ids = std::move(encoded.ids);
  out.special = std::move(encoded.special);
  out.spans = std::move(encoded.spans);
  // Tokenizers give types to models that have none, too.
  const bool typed = std::ranges::any_of(encoded.types, [](uint8_t type) { return type != 0; });
  if (typed && model.spec->token_types > 1) out.types = std::move(encoded.types);
  return out;
}

PreparedText PrepareIds(const EncodeJob& job, const EncodeModel& model, const TextInput& input) {
  PreparedText out;
  out.ids = input.ids;
  out.types = input.types;
  const size_t most = MostTokens(job, model);
  const auto cut = [&](auto& values) {
    if (values.size() <= most) return;
    const auto extra = static_cast<std::ptrdiff_t>(values.size() - most);
    if (CutsLeft(job, model)) {
      values.erase(values.begin(), values.begin() + extra);
    } else {
      values.erase(values.end() - extra, values.end());
    }
  };
  cut(out.ids);
  cut(out.types);
  if (model.tokenizer != nullptr) {
    for (const TokenId id : out.ids) out.special.push_back(model.tokenizer->IsSpecial(id) ? 1 : 0);
  }
  return out;
}

absl::Status FindMasks(const EncodeJob& job, const EncodeModel& model, PreparedText& text) {
  if (model.mask) {
    for (int32_t i = 0; i < std::ssize(text.ids); ++i) {
      if (text.ids[static_cast<size_t>(i)] == *model.mask) text.masks.push_back(i);
    }
  }
  if (!job.targets_of.empty() && job.targets_of.size() != text.ids.size()) {
    return InvalidValue("targets_of",
                        Concat("'targets_of': expected an id for each of the ", text.ids.size(),
                               " tokens, found ", job.targets_of.size()));
  }
  if (!text.masks.empty() || job.logprobs) return absl::OkStatus();
  std::string mask = "a mask token, and this model's tokenizer has none";
  if (model.mask) mask = Concat("the mask token ", model.tokenizer->TokenString(*model.mask));
  return InvalidValue(job.input_field,
                      Concat("'", job.input_field, "': expected ", mask, ", found none"));
}

}  // namespace

Result<std::vector<PreparedText>> PrepareTexts(const EncodeJob& job, const EncodeModel& model,
                                               size_t max_bytes) {
  std::vector<PreparedText> out;
  out.reserve(job.inputs.size());
  std::vector<bool> is_document(job.inputs.size());
  for (const auto& [query, document] : job.pairs) is_document[static_cast<size_t>(document)] = true;
  for (size_t i = 0; i < job.inputs.size(); ++i) {
    const TextInput& input = job.inputs[i];
    const size_t bytes = input.text.size() + (input.pair ? input.pair->size() : 0);
    if (bytes > max_bytes) {
      return InvalidValue(job.input_field, Concat("'", job.input_field, "': at most ", max_bytes,
                                                  " bytes of text are accepted, found ", bytes));
    }
    if (input.is_text) {
      MOESERVE_ASSIGN_OR_RETURN(out.emplace_back(), PrepareText(job, model, input, is_document[i]));
    } else {
      out.push_back(PrepareIds(job, model, input));
    }
    PreparedText& text = out.back();
    if (text.ids.empty()) {
      return InvalidValue(
          job.input_field,
          Concat("'", job.input_field, "' must not be empty: the tokenizer adds no token to it"));
    }
    if (std::ssize(text.ids) > model.max_tokens) return TooLong(job, model, i, text.ids.size());
    if (job.task == EncodeTask::kFillMask) MOESERVE_RETURN_IF_ERROR(FindMasks(job, model, text));
  }
  return out;
}

}  // namespace moeserve::server
