#include "server/commands/score/text_scorer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "engine/validate_request.h"
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

// Makes the requests for the windows of texts.
class WindowMaker {
 public:
  WindowMaker(const ModelSpec& spec, const ScoringOptions& options)
      : spec_(spec), masked_(options.mask, options.mask_token.value_or(0), spec.vocab_size) {}

  // Appends the requests for a window of tokens between special tokens.
  void Add(const SpecialTokens& special, std::span<const TokenId> ids,
           std::vector<Request>& requests) {
    if (spec_.head.kind == HeadKind::kMaskedLm) {
      masked_.Add(special, ids, requests);
      return;
    }
    Request request;
    request.prompt = special.before;
    request.prompt.insert(request.prompt.end(), ids.begin(), ids.end());
    request.prompt.insert(request.prompt.end(), special.after.begin(), special.after.end());
    if (Computes(spec_, nullptr)) {
      request.sampling.max_tokens = 0;
      request.sampling.prompt_logprobs = 0;
    } else {
      request.encode.emplace();
      if (!Computes(spec_, &request.encode->output)) {
        request.encode->output = EncodeOutput::kLogits;
      }
    }
    requests.push_back(std::move(request));
  }

 private:
  const ModelSpec& spec_;
  MaskedWindows masked_;
};

// Returns what stands around the tokens of each window of a text.
Result<SpecialTokens> AroundWindows(const Engine& engine, const std::string& text) {
  const Tokenizer& tokenizer = *engine.tokenizer();
  if (!Computes(engine.spec(), nullptr)) return FindSpecialTokens(tokenizer, text);
  MOESERVE_ASSIGN_OR_RETURN(std::vector<TokenId> prefix, WindowPrefix(engine, tokenizer));
  return SpecialTokens{.before = std::move(prefix), .after = {}};
}

absl::Status CheckScores(const ModelSpec& spec, const ScoringOptions& options) {
  if (spec.kind == ModelKind::kEncoderDecoder) {
    return absl::InvalidArgumentError(
        "--text: this model translates; expected sources and translations: `moeserve score "
        "--pairs`");
  }
  if (spec.head.kind == HeadKind::kMaskedLm && !options.mask_token) {
    return absl::InvalidArgumentError(
        "tokenizer: expected a mask token for this masked language model, found none");
  }
  return absl::OkStatus();
}

}  // namespace

double Score::perplexity() const { return std::exp(nll_per_token()); }

double Score::bits_per_byte() const {
  return -sum_logprob / std::log(2.0) / static_cast<double>(bytes);
}

Result<std::string> ReadScoredText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  if (!file || std::filesystem::is_directory(path, error)) {
    return absl::NotFoundError(Concat("cannot read ", path));
  }
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.empty()) return absl::InvalidArgumentError(Concat(path, " is empty"));
  return text;
}

absl::Status ComputeScore(std::vector<Request> requests, const ScoringOptions& options,
                          const std::shared_ptr<Engine>& engine, Score& score) {
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
          const auto add = [&](const TokenLogprob& token) {
            nan = nan || std::isnan(token.logprob);
            score.sum_logprob += token.logprob;
            ++score.scored;
          };
          for (const auto& logprob : delta.prompt_logprobs) {
            if (logprob) add(*logprob);
          }
          if (delta.encoded) {
            for (const TokenLogprob& token : delta.encoded->rows) add(token);
          }
          progress.Add(static_cast<double>(delta.encoded ? delta.usage.prompt_tokens
                                                         : delta.prompt_logprobs.size()));
        }));
  }
  progress.Finish();
  if (nan) return absl::InternalError("a log-probability is not a number");
  const HeadKind head = engine->spec().head.kind;
  const bool scores = head == HeadKind::kLanguageModel || head == HeadKind::kMaskedLm;
  if (score.windows.empty() || (scores && score.scored == 0)) {
    return absl::InvalidArgumentError("the text is too short to be scored");
  }
  return absl::OkStatus();
}

Result<Score> ScoreTexts(const std::vector<std::string>& texts, const ScoringOptions& options,
                         const std::shared_ptr<Engine>& engine) {
  const Tokenizer* tokenizer = engine->tokenizer();
  if (tokenizer == nullptr) return absl::InvalidArgumentError("this model has no tokenizer");
  MOESERVE_RETURN_IF_ERROR(CheckScores(engine->spec(), options));
  const int window = options.window > 0 ? std::min(options.window, engine->max_model_len())
                                        : engine->max_model_len();

  Score score;
  score.window = window;
  std::vector<Request> requests;
  WindowMaker maker(engine->spec(), options);
  for (const std::string& text : texts) {
    MOESERVE_ASSIGN_OR_RETURN(const SpecialTokens special, AroundWindows(*engine, text));
    score.prefix = static_cast<int>(special.before.size());
    score.suffix = static_cast<int>(special.after.size());
    const int around = score.prefix + score.suffix;
    // Without a special token, the first token of a window of a decoder has no log-probability.
    if (window <= around + (around == 0 ? 1 : 0)) {
      return absl::InvalidArgumentError(Concat("a window of ", window, " tokens is too short"));
    }
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer->Encode(text, false));
    score.tokens += static_cast<int64_t>(ids.size());
    score.bytes += text.size();
    const size_t first = requests.size();
    const auto step = static_cast<size_t>(window - around);
    for (size_t begin = 0; begin < ids.size(); begin += step) {
      const size_t count = std::min(step, ids.size() - begin);
      maker.Add(special, std::span(ids).subspan(begin, count), requests);
    }
    for (size_t i = first; i < requests.size(); ++i) {
      requests[i].id = Concat("score-", i);
      requests[i].routing_control = options.routing_control;
      const std::vector<TokenId>& prompt = requests[i].prompt;
      score.run.insert(score.run.end(), prompt.begin(), prompt.end());
      score.windows.push_back(static_cast<int>(prompt.size()));
    }
    score.text_windows.push_back(requests.size() - first);
  }

  MOESERVE_RETURN_IF_ERROR(ComputeScore(std::move(requests), options, engine, score));
  return score;
}

}  // namespace moeserve::server
