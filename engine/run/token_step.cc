#include "engine/run/token_step.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "engine/beam/log_softmax.h"
#include "kernels/base/sampling.h"

namespace moeserve {

namespace {

TokenLogprob DrawnLogprob(const SampleResult& drawn, int alternatives) {
  TokenLogprob result{drawn.token, drawn.logprob, drawn.rank, {}};
  for (int i = 0; i < alternatives; ++i) {
    result.top.emplace_back(drawn.top_token[i], drawn.top_logprob[i]);
  }
  return result;
}

// Returns whether the device's sampler applies this field of kDrawFields (see SampleRow).
constexpr bool IsDrawnOnDevice(const SamplingField& field) {
  const std::string_view name = field.name;
  return name == "temperature" || name == "top_k" || name == "top_p" || name == "min_p";
}

// Returns whether the request sets a field of kDrawFields that only the host's sampler applies.
bool NeedsHostDraw(const SamplingParams& params) {
  static const SamplingParams defaults;
  return std::any_of(std::begin(kDrawFields), std::end(kDrawFields), [&](const auto& field) {
    return !IsDrawnOnDevice(field) && field.Get(params) != field.Get(defaults);
  });
}

}  // namespace

absl::Status NoTokenError() {
  return absl::InvalidArgumentError(
      "no token with a text is left that allowed_token_ids, bad_words, logit_bias and the "
      "structured output together allow");
}

std::optional<SampleRow> DeviceSample(const Sequence& s, int row, int ahead,
                                      const TextlessIds& textless) {
  const SamplingParams& params = s.request.sampling;
  // Samples that fork from one prompt draw several tokens from one row; the device draws only one.
  if (!textless.drawable().has_value() && !textless.empty()) return std::nullopt;
  if (params.beam.has_value() || s.sampling.changes_logits() || s.wants_prompt_logprobs() ||
      !s.samples.empty() || params.logprobs.value_or(0) > kMaxAlternatives ||
      NeedsHostDraw(params)) {
    return std::nullopt;
  }
  SampleRow sample{};
  sample.scale = SamplingScale(params.temperature);
  sample.top_k = params.top_k;
  sample.top_p = params.top_p;
  sample.min_p = static_cast<float>(params.min_p);
  sample.row = row;
  sample.uniform = UniformDraw(s.seed, params.sample_index, s.generated() + ahead);
  sample.logprobs = params.logprobs.value_or(-1);
  sample.drawable = textless.drawable().value_or(0);
  return sample;
}

Usage TokenStep::UsageOf(const Sequence& s) {
  Usage usage;
  // The start token of a decoder beside an encoder is not the request's.
  usage.prompt_tokens =
      s.source_length() == 0 ? s.prompt_length() : s.source_length() + s.prompt_length() - 1;
  usage.completion_tokens = s.generated();
  usage.cached_tokens = s.cached_tokens;
  usage.queue_seconds = std::chrono::duration<double>(s.admitted_at - s.submitted_at).count();
  return usage;
}

bool TokenStep::IsEos(const SamplingParams& params, TokenId token) const {
  return !params.ignore_eos && absl::c_linear_search(eos_, token);
}

std::vector<TokenId> TokenStep::EndIds(const SamplingParams& params) const {
  std::vector<TokenId> ids = params.stop_token_ids;
  if (!params.ignore_eos) ids.insert(ids.end(), eos_.begin(), eos_.end());
  return ids;
}

bool TokenStep::Logprobs(Sequence& s, std::span<const float> logits, std::span<float> out) const {
  while (true) {
    LogSoftmax(logits, out);
    for (const TokenId id : textless_.ids()) out[id] = -std::numeric_limits<float>::infinity();
    if (!s.sampling.changes_logits() || s.sampling.Apply(s.tokens, out)) return true;
    if (s.sampling.overworked() || !s.sampling.IgnoreLimit()) return false;
  }
}

TokenLogprob TokenStep::LogprobOf(std::span<const float> logits, TokenId token, int top) {
  return Logprob(logits, token, top, Drawable(logits, drawable_));
}

void TokenStep::CollectPromptLogprobs(Sequence& s, const RowLogits& logits) const {
  if (!s.wants_prompt_logprobs()) return;
  if (s.prompt_logprobs.empty()) s.prompt_logprobs.emplace_back(std::nullopt);
  for (size_t r = 0; r < logits.positions.size(); ++r) {
    const int next = logits.positions[r] + 1;
    if (next != static_cast<int>(s.prompt_logprobs.size()) || next >= s.prompt_length()) continue;
    const auto row = logits.values.subspan(r * static_cast<size_t>(vocab_size_),
                                           static_cast<size_t>(vocab_size_));
    s.prompt_logprobs.push_back(Logprob(row, s.tokens[next], *s.request.sampling.prompt_logprobs));
  }
}

std::span<const float> TokenStep::Drawable(std::span<const float> row,
                                           std::vector<float>& scratch) const {
  if (textless_.empty()) return row;
  if (const auto count = textless_.drawable()) return row.first(static_cast<size_t>(*count));
  scratch.assign(row.begin(), row.end());
  for (const TokenId id : textless_.ids()) scratch[id] = -std::numeric_limits<float>::infinity();
  return scratch;
}

std::optional<OutputDelta> TokenStep::NextWithoutChoice(Sequence& s) {
  const SamplingParams& params = s.request.sampling;
  // A stop string could match.
  if (params.logprobs.has_value() || !params.stop.empty()) return std::nullopt;
  if (s.generated() + 1 >= params.max_tokens || s.length() + 1 >= max_model_len_) {
    return std::nullopt;
  }
  const std::optional<TokenId> token = s.sampling.OnlyToken(s.tokens, vocab_size_, textless_.ids());
  if (!token.has_value() || absl::c_linear_search(params.stop_token_ids, *token) ||
      IsEos(params, *token) || !s.sampling.AcceptUnlessLast(*token)) {
    return std::nullopt;
  }
  s.tokens.push_back(*token);
  OutputDelta delta;
  delta.tokens.push_back(*token);
  delta.text = s.text.Push(*token);
  delta.usage = UsageOf(s);
  return delta;
}

bool TokenStep::ChangeLogits(Sequence& s, std::span<const float> row) {
  while (true) {
    changed_.assign(row.begin(), row.end());
    for (const TokenId id : textless_.ids()) changed_[id] = -std::numeric_limits<float>::infinity();
    if (s.sampling.Apply(s.tokens, changed_)) return true;
    // Other masks may forbid all tokens that keep the limit.
    if (!s.sampling.IgnoreLimit()) return false;
  }
}

OutputDelta TokenStep::CutOff(Sequence& s) {
  OutputDelta delta;
  delta.finished = true;
  delta.text = s.text.Finish();
  // The text may complete a stop string.
  delta.stop_string = s.text.matched_stop();
  delta.finish_reason = delta.stop_string ? FinishReason::kStop : FinishReason::kLength;
  delta.timed_out = !delta.stop_string;
  delta.usage = UsageOf(s);
  return delta;
}

Result<OutputDelta> TokenStep::Next(Sequence& s, const RowLogits& logits, size_t index) {
  const SamplingParams& params = s.request.sampling;
  OutputDelta delta;
  if (!s.prompt_delivered) {
    delta.prompt_logprobs = std::move(s.prompt_logprobs);
    s.prompt_logprobs.assign(delta.prompt_logprobs.size(), std::nullopt);  // all were collected
    s.prompt_delivered = true;
  }
  if (params.max_tokens == 0) {
    delta.finished = true;
    delta.finish_reason = FinishReason::kLength;
    delta.usage = UsageOf(s);
    return delta;
  }
  std::span<const float> row, drawable;
  TokenId token = 0;
  const SampleResult* const drawn = logits.drawn == nullptr ? nullptr : logits.drawn + index;
  if (drawn != nullptr) {
    token = drawn->token;
  } else {
    row = logits.values.subspan(index * static_cast<size_t>(vocab_size_),
                                static_cast<size_t>(vocab_size_));
    drawable = Drawable(row, drawable_);
    std::span<const float> chosen_from = drawable;
    if (s.sampling.changes_logits()) {
      const bool any = ChangeLogits(s, row);
      if (s.sampling.overworked()) return OverworkedError();
      if (!any) {
        return NoTokenError();
      }
      chosen_from = changed_;
    }
    token = sampler_.Sample(chosen_from, params, s.seed, s.generated());
  }
  if (!s.sampling.AcceptInTime(token)) {
    const bool any = !s.sampling.overworked() && ChangeLogits(s, row);
    if (s.sampling.overworked()) return OverworkedError();
    if (any) {
      token = sampler_.SampleAgain(changed_, params, s.seed, s.generated());
    }
    s.sampling.Accept(token);
  }
  s.tokens.push_back(token);
  delta.tokens.push_back(token);
  if (params.logprobs.has_value()) {
    delta.logprobs.push_back(
        drawn != nullptr
            ? DrawnLogprob(*drawn,
                           std::min(*params.logprobs, textless_.drawable().value_or(vocab_size_)))
            : Logprob(row, token, *params.logprobs, drawable));
  }

  const bool eos = IsEos(params, token);
  const bool stop_token = absl::c_linear_search(params.stop_token_ids, token);
  if (!eos && (!stop_token || params.include_stop)) delta.text = s.text.Push(token);
  if (stop_token && !eos) delta.stop_token = token;
  const bool stop =
      eos || stop_token || s.text.matched_stop().has_value() || s.sampling.constraint_ended();
  if (stop || s.generated() >= params.max_tokens || s.length() >= max_model_len_) {
    delta.finished = true;
    if (!s.text.matched_stop().has_value()) delta.text += s.text.Finish();
    // Finish() may return text that completes a stop string.
    delta.finish_reason =
        stop || s.text.matched_stop().has_value() ? FinishReason::kStop : FinishReason::kLength;
    delta.stop_string = s.text.matched_stop();
  }
  delta.usage = UsageOf(s);
  return delta;
}

}  // namespace moeserve
