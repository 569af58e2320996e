#include "server/completions/completion_response.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "server/base/utf8.h"
#include "server/generation/token_text.h"
#include "server/reports/word_report.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kObject = "text_completion";

// Sets object[key] to `value`, unless it has a larger value already. Several token ids can have the
// same text, and the text is the key.
void PutLarger(OrderedJson& object, const std::string& key, double value) {
  const auto it = object.find(key);
  if (it == object.end()) {
    object[key] = value;
  } else if (it->get<double>() < value) {
    *it = value;
  }
}

}  // namespace

void LogprobArrays::AddToken(const std::string& text) {
  tokens_.push_back(text);
  text_offset_.push_back(offset_);
  offset_ += CountCodePoints(text);
}

void LogprobArrays::AddUnscored(TokenId token) {
  AddToken(TokenText(tokenizer_, token, tokens_as_ids_));
  token_logprobs_.push_back(nullptr);
  top_logprobs_.push_back(nullptr);
}

absl::Status LogprobArrays::Add(const TokenLogprob& logprob) {
  MOESERVE_RETURN_IF_ERROR(CheckLogprob(logprob));
  const std::string text = TokenText(tokenizer_, logprob.token, tokens_as_ids_);
  const double value = LogprobValue(logprob.logprob);
  AddToken(text);
  token_logprobs_.push_back(value);
  OrderedJson top = OrderedJson::object();
  for (const auto& [token, other] : logprob.top) {
    PutLarger(top, TokenText(tokenizer_, token, tokens_as_ids_), LogprobValue(other));
  }
  PutLarger(top, text, value);
  top_logprobs_.push_back(std::move(top));
  return absl::OkStatus();
}

OrderedJson LogprobArrays::Take() {
  OrderedJson out;
  out["tokens"] = std::exchange(tokens_, OrderedJson::array());
  out["token_logprobs"] = std::exchange(token_logprobs_, OrderedJson::array());
  out["top_logprobs"] = std::exchange(top_logprobs_, OrderedJson::array());
  out["text_offset"] = std::exchange(text_offset_, OrderedJson::array());
  return out;
}

OrderedJson ChoiceJson(const ChoicePart& part, const RoutingParams& routing) {
  OrderedJson choice;
  choice["index"] = part.index;
  choice["text"] = part.text;
  choice["logprobs"] = part.logprobs;
  choice["finish_reason"] = FinishReasonJson(part);
  choice["stop_reason"] = StopReasonJson(part);
  if (!part.prompt_logprobs.is_null()) choice["prompt_logprobs"] = part.prompt_logprobs;
  if (part.prompt_token_ids) choice["prompt_token_ids"] = *part.prompt_token_ids;
  if (part.token_ids) choice["token_ids"] = *part.token_ids;
  PutBeam(part, choice);
  PutRouting(part, routing, choice);
  return choice;
}

CompletionWriter::CompletionWriter(AnswerIdentity identity, const AnswerOptions& options,
                                   const Tokenizer* tokenizer, int choices)
    : ChunkWriter(options), identity_(std::move(identity)), tokenizer_(tokenizer) {
  choices_.reserve(choices);
  for (int i = 0; i < choices; ++i) {
    choices_.emplace_back(LogprobArrays(tokenizer, options.tokens_as_ids));
    choices_.back().part.index = i;
  }
}

absl::Status CompletionWriter::Add(int index, const PreparedPrompt& prompt, OutputDelta delta) {
  Choice& choice = choices_[index];
  if (!choice.started) {
    choice.started = true;
    MOESERVE_RETURN_IF_ERROR(AddPrompt(choice, prompt, delta));
  }
  if (options_.best > 0) {
    for (const TokenLogprob& logprob : delta.logprobs) {
      MOESERVE_RETURN_IF_ERROR(CheckLogprob(logprob));
      choice.logprob_sum += static_cast<double>(logprob.logprob);
      ++choice.tokens;
    }
  }
  if (options_.logprobs) {
    for (const TokenLogprob& logprob : delta.logprobs) {
      MOESERVE_RETURN_IF_ERROR(choice.logprobs.Add(logprob));
    }
  }
  if (!options_.routing.words.empty()) {
    choice.ids.insert(choice.ids.end(), delta.tokens.begin(), delta.tokens.end());
  }
  choice.part.Add(std::move(delta), options_.return_token_ids);
  return absl::OkStatus();
}

absl::Status CompletionWriter::AddPrompt(Choice& choice, const PreparedPrompt& prompt,
                                         const OutputDelta& delta) {
  if (options_.return_token_ids) {
    choice.part.prompt_token_ids = prompt.source.empty() ? prompt.ids : prompt.source;
  }
  if (!options_.routing.words.empty()) choice.ids = prompt.ids;
  const bool echo_logprobs = options_.echo && options_.logprobs;
  if (echo_logprobs || options_.prompt_logprobs) {
    MOESERVE_RETURN_IF_ERROR(CheckPromptLogprobs(prompt, delta));
  }
  if (options_.prompt_logprobs) {
    choice.part.prompt_logprobs = PromptLogprobsJson(
        tokenizer_, std::span(delta.prompt_logprobs).subspan(prompt.start_tokens()),
        *options_.prompt_logprobs);
  }
  if (options_.echo) choice.part.text = prompt.echo_text;
  if (!echo_logprobs) return absl::OkStatus();
  for (size_t i = prompt.start_tokens(); i < prompt.ids.size(); ++i) {
    std::optional<TokenLogprob> logprob = delta.prompt_logprobs[i];
    if (!logprob) {
      choice.logprobs.AddUnscored(prompt.ids[i]);
      continue;
    }
    // The list has more alternatives than `logprobs` requested if `prompt_logprobs` requested more.
    if (logprob->top.size() > static_cast<size_t>(options_.echo_logprobs)) {
      logprob->top.resize(options_.echo_logprobs);
    }
    MOESERVE_RETURN_IF_ERROR(choice.logprobs.Add(*logprob));
  }
  return absl::OkStatus();
}

std::vector<OrderedJson> CompletionWriter::TakeChunks(int index) {
  Choice& choice = choices_[index];
  ChoicePart& part = choice.part;
  if (part.absent) return {};
  const bool has_logprobs = options_.logprobs && !choice.logprobs.empty();
  if (part.text.empty() && !has_logprobs && !part.HasIds() && !part.HasRoutes() &&
      !part.finish_reason) {
    return {};
  }
  if (has_logprobs) part.logprobs = choice.logprobs.Take();
  std::vector<OrderedJson> chunks{
      EnvelopeJson(identity_, kObject, OrderedJson::array({ChoiceJson(part, options_.routing)}))};
  part = ChoicePart();
  part.index = index;
  return chunks;
}

OrderedJson CompletionWriter::EmptyChunk() const {
  return EnvelopeJson(identity_, kObject, OrderedJson::array());
}

std::vector<size_t> CompletionWriter::BestChoices() const {
  std::vector<size_t> all(choices_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  if (options_.best == 0) return all;
  const auto mean = [&](size_t index) {
    const Choice& choice = choices_[index];
    return choice.tokens == 0 ? 0.0 : choice.logprob_sum / choice.tokens;
  };
  std::vector<size_t> best;
  for (auto first = all.begin(); first != all.end(); first += options_.samples) {
    std::stable_sort(first, first + options_.samples,
                     [&](size_t a, size_t b) { return mean(a) > mean(b); });
    best.insert(best.end(), first, first + options_.best);
  }
  return best;
}

OrderedJson CompletionWriter::TakeWhole() {
  OrderedJson list = OrderedJson::array();
  for (const size_t index : BestChoices()) {
    Choice& choice = choices_[index];
    if (choice.part.absent) continue;
    if (options_.logprobs) choice.part.logprobs = choice.logprobs.Take();
    if (options_.best > 0) choice.part.index = static_cast<int>(list.size());
    list.push_back(ChoiceJson(choice.part, options_.routing));
    const RoutingParams& routing = options_.routing;
    if (routing.words.empty() || !choice.part.HasRoutes() || tokenizer_ == nullptr) continue;
    const RoutingRecord& record = *choice.part.routing;
    // The last token of the output was not computed.
    choice.ids.resize(static_cast<size_t>(record.tokens));
    list.back()["word_experts"] =
        WordsJson(routing.words,
                  SummarizeWords(FindWords(*tokenizer_, choice.ids, routing.words), *routing.layout,
                                 RoutesOf(record, *routing.layout)),
                  *routing.layout);
  }
  return EnvelopeJson(identity_, kObject, std::move(list));
}

}  // namespace moeserve::server
