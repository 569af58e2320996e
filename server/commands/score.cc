#include "server/commands/score.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "model_loaders/message.h"
#include "server/commands/model_options.h"
#include "server/commands/run_to_end.h"
#include "server/expert_report.h"

namespace moeserve::server {
namespace {

struct Options {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string text_file;
  int window = 0;
  double threshold = 0.0;
  bool json = false;
};

struct Score {
  int64_t tokens = 0;  // of the text
  int64_t scored = 0;
  double sum_logprob = 0.0;
  size_t bytes = 0;
};

Result<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(Concat("cannot read ", path));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.empty()) return absl::InvalidArgumentError(Concat(path, " is empty"));
  return text;
}

// Cuts the text's tokens into windows that do not overlap. Where the tokenizer starts a text with
// special tokens every window starts with them, so that its first token is scored as well.
Result<Score> ScoreText(const Options& options, const std::string& text,
                        const RunningModel& model) {
  EngineApi& engine = *model.engine;
  const Tokenizer* tokenizer = engine.tokenizer();
  if (tokenizer == nullptr) return absl::InvalidArgumentError("this model has no tokenizer");
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer->Encode(text, false));
  MOESERVE_ASSIGN_OR_RETURN(std::vector<TokenId> prefix, tokenizer->Encode("", true));
  // Special tokens at the end of a text (rare) do not belong in front of one.
  if (const auto bos = engine.spec().bos_token_id;
      prefix.size() > 1 || (bos && prefix != std::vector<TokenId>{*bos})) {
    prefix.clear();
    if (bos) prefix.push_back(*bos);
  }
  const int window = options.window > 0 ? std::min(options.window, engine.max_model_len())
                                        : engine.max_model_len();
  const size_t step = static_cast<size_t>(window) - prefix.size();
  if (window <= static_cast<int>(prefix.size()) + (prefix.empty() ? 1 : 0)) {
    return absl::InvalidArgumentError(Concat("a window of ", window, " tokens is too short"));
  }

  std::vector<Request> requests;
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

  Score score;
  score.tokens = static_cast<int64_t>(ids.size());
  score.bytes = text.size();
  bool nan = false;
  // A few at a time, so that a long text does not meet the limits of the queue.
  constexpr size_t kBatch = 16;
  for (size_t begin = 0; begin < requests.size(); begin += kBatch) {
    std::vector<Request> batch(
        std::make_move_iterator(requests.begin() + static_cast<std::ptrdiff_t>(begin)),
        std::make_move_iterator(requests.begin() + static_cast<std::ptrdiff_t>(
                                                       std::min(requests.size(), begin + kBatch))));
    MOESERVE_RETURN_IF_ERROR(
        RunToEnd(model.engine, std::move(batch), [&](size_t, const OutputDelta& delta) {
          for (const auto& logprob : delta.prompt_logprobs) {
            if (!logprob) continue;
            nan = nan || std::isnan(logprob->logprob);
            score.sum_logprob += logprob->logprob;
            ++score.scored;
          }
        }));
  }
  if (nan) return absl::InternalError("a log-probability is not a number");
  if (score.scored == 0) return absl::InvalidArgumentError("the text is too short to be scored");
  return score;
}

void Print(const Options& options, const Score& score, const ExpertStats& stats,
           const std::string& model) {
  const double nll = -score.sum_logprob / static_cast<double>(score.scored);
  const double bits_per_byte =
      -score.sum_logprob / std::log(2.0) / static_cast<double>(score.bytes);
  if (options.json) {
    nlohmann::ordered_json out;
    out["model"] = model;
    out["tokens"] = score.tokens;
    out["scored_tokens"] = score.scored;
    out["nll_per_token"] = nll;
    out["perplexity"] = std::exp(nll);
    out["bits_per_byte"] = bits_per_byte;
    out["experts"] = ExpertStatsJson(stats, model, std::nullopt, options.threshold);
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  std::printf("tokens %lld, scored %lld, nll/token %.6f, perplexity %.4f, bits/byte %.4f\n\n",
              static_cast<long long>(score.tokens), static_cast<long long>(score.scored), nll,
              std::exp(nll), bits_per_byte);
  std::fputs(ExpertStatsTable(stats, options.threshold).c_str(), stdout);
}

absl::Status ScoreFile(const Options& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadText(options.text_file));
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(options.engine));
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, StartModel(options.model, engine));
  MOESERVE_ASSIGN_OR_RETURN(const Score score, ScoreText(options, text, model));
  Print(options, score, model.engine->ExpertSnapshot(), model.directory_name);
  return absl::OkStatus();
}

int Run(const Options& options) {
  const absl::Status status = ScoreFile(options);
  return status.ok() ? 0 : Fail(status);
}

}  // namespace

void AddScoreCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "score", "Perplexity of a text in windows, and what the experts did with it");
  auto options = std::make_shared<Options>();
  AddModelOptions(*command, options->model);
  AddEngineOptions(*command, options->engine);
  command->add_option("--text", options->text_file, "File with the text")->required();
  command->add_option("--window", options->window, "Tokens of a window; 0: the context length")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--threshold", options->threshold,
                   "An expert is active if chosen by more than this share of the tokens")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_flag("--json", options->json, "As JSON");
  command->callback([options, &selected] { selected = [options] { return Run(*options); }; });
}

}  // namespace moeserve::server
