#include "server/commands/score/pair_scorer.h"

#include <sstream>
#include <utility>

#include "base/error_text.h"

namespace moeserve::server {

Result<std::vector<TextPair>> ReadTextPairs(const std::string& path) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadScoredText(path));
  std::vector<TextPair> pairs;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    const size_t tab = line.find('\t');
    if (tab == std::string::npos || line.find('\t', tab + 1) != std::string::npos) {
      return absl::InvalidArgumentError(
          Concat(path, ": line ", number, ": expected a source, a tab and a translation, found ",
                 tab == std::string::npos ? "no tab" : "several tabs"));
    }
    pairs.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  if (pairs.empty()) {
    return absl::InvalidArgumentError(
        Concat(path, ": expected a source, a tab and a translation in each line"));
  }
  return pairs;
}

Result<PairScore> ScorePairs(const std::vector<TextPair>& pairs, bool of_encoder,
                             const ScoringOptions& options, const std::shared_ptr<Engine>& engine) {
  const Tokenizer* const tokenizer = engine->tokenizer();
  const ModelSpec& spec = engine->spec();
  if (tokenizer == nullptr) return absl::InvalidArgumentError("this model has no tokenizer");
  if (spec.encoder == nullptr || !spec.decoder_start_token_id) {
    return absl::InvalidArgumentError(
        "--pairs: expected a model that translates a source, found one with a single stack");
  }
  PairScore out;
  Score& score = out.score;
  score.window = engine->max_model_len();
  std::vector<Request> requests;
  for (const TextPair& pair : pairs) {
    Request& request = requests.emplace_back();
    request.id = Concat("score-", requests.size() - 1);
    MOESERVE_ASSIGN_OR_RETURN(request.source, tokenizer->source().Encode(pair.source, true));
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> target,
                              tokenizer->Encode(pair.target, true));
    request.prompt = {*spec.decoder_start_token_id};
    request.prompt.insert(request.prompt.end(), target.begin(), target.end());
    request.sampling.max_tokens = 0;
    request.sampling.prompt_logprobs = 0;
    score.tokens += std::ssize(target);
    score.bytes += pair.target.size();
    const std::vector<TokenId>& run = of_encoder ? request.source : request.prompt;
    score.run.insert(score.run.end(), run.begin(), run.end());
    score.windows.push_back(static_cast<int>(run.size()));
    score.text_windows.push_back(1);
    out.sources.push_back(static_cast<int>(request.source.size()));
  }
  if (!of_encoder) score.prefix = 1;
  MOESERVE_RETURN_IF_ERROR(ComputeScore(std::move(requests), options, engine, score));
  return out;
}

}  // namespace moeserve::server
