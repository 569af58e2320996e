#include "server/commands/text_scorer.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/error_text.h"
#include "server/commands/run_to_end.h"

namespace moeserve::server {
namespace {

// Returns the special tokens that every window starts with.
Result<std::vector<TokenId>> WindowPrefix(const Engine& engine, const Tokenizer& tokenizer) {
  MOESERVE_ASSIGN_OR_RETURN(std::vector<TokenId> prefix, tokenizer.Encode("", true));
  // A tokenizer that appends special tokens (rare) returns them here, too; they do not belong in
  // front of a text, so only the BOS token is used.
  if (const auto bos = engine.spec().bos_token_id;
      prefix.size() > 1 || (bos && prefix != std::vector<TokenId>{*bos})) {
    prefix.clear();
    if (bos) prefix.push_back(*bos);
  }
  return prefix;
}

void AddWindows(const std::vector<TokenId>& ids, const std::vector<TokenId>& prefix, size_t step,
                std::vector<Request>& requests) {
  for (size_t begin = 0; begin < ids.size(); begin += step) {
    Request request;
    request.id = Concat("score-", requests.size());
    request.prompt = prefix;
    request.prompt.insert(
        request.prompt.end(), ids.begin() + static_cast<std::ptrdiff_t>(begin),
        ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), begin + step)));
    request.sampling.max_tokens = 0;
    request.sampling.prompt_logprobs = 0;
    requests.push_back(std::move(request));
  }
}

}  // namespace

double Score::perplexity() const { return std::exp(nll_per_token()); }

double Score::bits_per_byte() const {
  return -sum_logprob / std::log(2.0) / static_cast<double>(bytes);
}

Result<std::string> ReadScoredText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(Concat("cannot read ", path));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.empty()) return absl::InvalidArgumentError(Concat(path, " is empty"));
  return text;
}

Result<Score> ScoreTexts(const std::vector<std::string>& texts, const ScoringOptions& options,
                         const std::shared_ptr<Engine>& engine) {
  const Tokenizer* tokenizer = engine->tokenizer();
  if (tokenizer == nullptr) return absl::InvalidArgumentError("this model has no tokenizer");
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> prefix, WindowPrefix(*engine, *tokenizer));
  const int window = options.window > 0 ? std::min(options.window, engine->max_model_len())
                                        : engine->max_model_len();
  if (window <= static_cast<int>(prefix.size()) + (prefix.empty() ? 1 : 0)) {
    return absl::InvalidArgumentError(Concat("a window of ", window, " tokens is too short"));
  }

  Score score;
  score.window = window;
  score.prefix = static_cast<int>(prefix.size());
  std::vector<Request> requests;
  for (const std::string& text : texts) {
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer->Encode(text, false));
    score.tokens += static_cast<int64_t>(ids.size());
    score.bytes += text.size();
    const size_t first = requests.size();
    AddWindows(ids, prefix, static_cast<size_t>(window) - prefix.size(), requests);
    for (size_t i = first; i < requests.size(); ++i) {
      requests[i].routing_control = options.routing_control;
      const std::vector<TokenId>& prompt = requests[i].prompt;
      score.run.insert(score.run.end(), prompt.begin(), prompt.end());
      score.windows.push_back(static_cast<int>(prompt.size()));
    }
    score.text_windows.push_back(requests.size() - first);
  }

  bool nan = false;
  Progress progress("scoring", kTokenUnit, static_cast<double>(score.run.size()), options.progress);
  // Submit few requests at a time, so that a long text does not exceed the limits of the queue.
  const size_t at_once = options.in_order ? 1 : 16;
  for (size_t begin = 0; begin < requests.size(); begin += at_once) {
    std::vector<Request> batch(
        std::make_move_iterator(requests.begin() + static_cast<std::ptrdiff_t>(begin)),
        std::make_move_iterator(requests.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                       requests.size(), begin + at_once))));
    MOESERVE_RETURN_IF_ERROR(
        RunToEnd(engine, std::move(batch), [&](size_t, const OutputDelta& delta) {
          progress.Add(static_cast<double>(delta.prompt_logprobs.size()));
          for (const auto& logprob : delta.prompt_logprobs) {
            if (!logprob) continue;
            nan = nan || std::isnan(logprob->logprob);
            score.sum_logprob += logprob->logprob;
            ++score.scored;
          }
        }));
  }
  progress.Finish();
  if (nan) return absl::InternalError("a log-probability is not a number");
  if (score.scored == 0) return absl::InvalidArgumentError("the text is too short to be scored");
  return score;
}

}  // namespace moeserve::server
