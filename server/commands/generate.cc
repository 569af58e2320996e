#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/run_to_end.h"
#include "server/commands/run_with_ranks.h"
#include "server/commands/sampling_options.h"
#include "server/commands/start_model.h"
#include "server/generation/beam_params.h"
#include "server/generation/generation_request.h"
#include "server/reports/expert_report.h"

namespace moeserve::server {
namespace {

struct GenerateArguments {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string prompt;
  std::string decoder_prompt;   // empty: none
  std::string target_language;  // empty: the model's
  int max_tokens = 128;
  SamplingOptions sampling;
  int num_beams = 0;  // 0: tokens are drawn
  double length_penalty = BeamParams().length_penalty;
  std::string early_stopping = "false";
  bool echo = false;
  bool stats = false;
};

// Sets how tokens are chosen. The sampling defaults of the model are not meant for beam search.
absl::Status SetSampling(const GenerateArguments& options, const GenerationDefaults& defaults,
                         CompletionParams& params) {
  const bool beams = options.num_beams > 0;
  params.sampling = DefaultSampling(defaults);
  if (beams) {
    for (const SamplingField& field : kDrawFields) {
      field.Set(params.sampling, field.Get(SamplingParams()));
    }
  }
  options.sampling.Apply(params.sampling);
  if (params.sampling.min_tokens == 0) SetDefaultLengths(defaults, params);
  if (!beams) return absl::OkStatus();
  params.sampling.beam = {.num_beams = options.num_beams,
                          .length_penalty = options.length_penalty,
                          .early_stopping = options.early_stopping == "true" ? EarlyStopping::kTrue
                                            : options.early_stopping == "never"
                                                ? EarlyStopping::kNever
                                                : EarlyStopping::kFalse};
  return ResolveBeams(
      {.asked = "--num-beams", .beams = "--num-beams", .sampling = ""},
      [](const char*) { return true; }, {}, params);
}

absl::Status Generate(const GenerateArguments& options) {
  EngineOptionsText engine_text = options.engine;
  engine_text.engine.max_num_seqs = std::max(1, options.num_beams);
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(engine_text));
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, StartModel(options.model, engine));

  CompletionParams params;
  PromptInput prompt;
  prompt.is_text = true;
  prompt.text = options.prompt;
  params.prompts.push_back(std::move(prompt));
  if (!options.decoder_prompt.empty()) {
    params.decoder_prompt = {.is_text = true, .text = options.decoder_prompt, .ids = {}};
  }
  params.echo = options.echo;
  params.target_language = options.target_language;
  MOESERVE_RETURN_IF_ERROR(SetSampling(options, model.defaults, params));
  MOESERVE_ASSIGN_OR_RETURN(std::vector<PreparedPrompt> prompts,
                            PreparePrompts(params, PromptRulesOf(*model.engine)));
  // The APIs refuse a max_tokens that does not fit into the context; this command reduces it.
  const int room = model.engine->max_model_len() - static_cast<int>(prompts.front().ids.size());
  prompts.front().max_tokens = std::min(options.max_tokens, room);

  if (options.echo) std::fputs(prompts.front().echo_text.c_str(), stdout);
  MOESERVE_RETURN_IF_ERROR(RunToEnd(
      model.engine, MakeEngineRequests(params, prompts, "generate", absl::InfiniteFuture()),
      [](size_t, const OutputDelta& delta) {
        std::fwrite(delta.text.data(), 1, delta.text.size(), stdout);
        std::fflush(stdout);
      }));
  std::fputc('\n', stdout);
  if (options.stats) {
    std::fputs(ExpertStatsTable(model.engine->ExpertSnapshot(), 0.0).c_str(), stderr);
  }
  return absl::OkStatus();
}

}  // namespace

void AddGenerateCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt on standard output");
  auto options = std::make_shared<GenerateArguments>();
  options->model.must_generate = true;
  AddModelOptions(*command, options->model);
  AddDraftModel(*command, options->model);
  AddRankOptions(*command, options->model.ranks);
  AddNumberOption(*command, "--draft-tokens", options->engine.engine.draft.max_tokens,
                  "Most tokens that are drafted in a step; 0: none; -1: the device's default",
                  kDefaultDraftTokens, kMostDraftTokens);
  command
      ->add_option("--prompt", options->prompt,
                   "The text to continue, or an encoder-decoder's source")
      ->required();
  command->add_option("--decoder-prompt", options->decoder_prompt,
                      "How the text of an encoder-decoder begins");
  command->add_option("--target-language", options->target_language,
                      "The text of the special token that an encoder-decoder generates first");
  AddNumberOption(*command, "--max-tokens", options->max_tokens, "Most tokens to generate", 1,
                  1 << 24);
  AddSamplingOptions(*command, options->sampling);
  CLI::Option* const beams = AddNumberOption(
      *command, "--num-beams", options->num_beams,
      "Beam search with so many beams; prints the best text, at the end. 0: draw tokens", 0,
      kMaxBeams);
  constexpr double kPenalty = kMaxLengthPenalty;
  AddNumberOption(*command, "--length-penalty", options->length_penalty,
                  "Power of the number of tokens by which the log-probability of a text is divided",
                  -kPenalty, kPenalty)
      ->needs(beams);
  AddChoiceOption(*command, "--early-stopping", options->early_stopping,
                  "Whether the search ends once num-beams texts are finished; never: only when no "
                  "better one is possible",
                  {"false", "true", "never"})
      ->needs(beams);
  command->add_flag("--echo", options->echo, "Print the prompt as well");
  command->add_flag("--stats", options->stats, "Print expert statistics on standard error");
  command
      ->add_option("--max-model-len", options->engine.engine.max_model_len,
                   "Context length; 0: the model's")
      ->check(CLI::Range(0, 1 << 24));
  command->callback([options, &selected] {
    selected = [options] {
      return RunWithRanks(options->model, [&] { return StatusToExit(Generate(*options)); });
    };
  });
}

}  // namespace moeserve::server
