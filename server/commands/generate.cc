#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/run_to_end.h"
#include "server/openai/completion_request.h"
#include "server/reports/expert_report.h"

namespace moeserve::server {
namespace {

struct Options {
  ModelOptionsText model;
  EngineOptionsText engine;
  std::string prompt;
  int max_tokens = 128;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int> top_k;
  std::optional<double> min_p;
  std::optional<int64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool echo = false;
  bool stats = false;
};

absl::Status Generate(const Options& options) {
  EngineOptionsText engine_text = options.engine;
  engine_text.engine.max_num_seqs = 1;
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(engine_text));
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, StartModel(options.model, engine));

  CompletionParams params;
  PromptInput prompt;
  prompt.is_text = true;
  prompt.text = options.prompt;
  params.prompts.push_back(std::move(prompt));
  const GenerationDefaults& defaults = model.defaults;
  SamplingParams& sampling = params.sampling;
  sampling.temperature = options.temperature.value_or(defaults.temperature.value_or(1.0));
  sampling.top_p = options.top_p.value_or(defaults.top_p.value_or(1.0));
  sampling.top_k = options.top_k.value_or(defaults.top_k.value_or(0));
  sampling.min_p = options.min_p.value_or(defaults.min_p.value_or(0.0));
  sampling.seed = options.seed;
  sampling.stop = options.stop;
  sampling.ignore_eos = options.ignore_eos;
  MOESERVE_ASSIGN_OR_RETURN(
      std::vector<PreparedPrompt> prompts,
      PreparePrompts(params, model.engine->tokenizer(), model.engine->max_model_len()));
  // A limit beyond the context is only a limit here, not a mistake.
  const int room = model.engine->max_model_len() - static_cast<int>(prompts.front().ids.size());
  prompts.front().max_tokens = std::min(options.max_tokens, room);

  if (options.echo) std::fputs(options.prompt.c_str(), stdout);
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

int Run(const Options& options) {
  const absl::Status status = Generate(options);
  return status.ok() ? 0 : Fail(status);
}

}  // namespace

void AddGenerateCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt on standard output");
  auto options = std::make_shared<Options>();
  AddModelOptions(*command, options->model);
  command->add_option("--prompt", options->prompt, "The text to continue")->required();
  command->add_option("--max-tokens", options->max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0: the most probable token")
      ->check(CLI::Range(0.0, 2.0));
  command->add_option("--top-p", options->top_p, "Share of probability to draw from")
      ->check(CLI::Range(1e-9, 1.0));
  command->add_option("--top-k", options->top_k, "Number of tokens to draw from; 0: all")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--min-p", options->min_p, "Least probability relative to the best token")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", options->seed, "Makes draws repeatable");
  command->add_option("--stop", options->stop, "Text that ends the answer; can be repeated");
  command->add_flag("--ignore-eos", options->ignore_eos, "Go on after an end-of-text token");
  command->add_flag("--echo", options->echo, "Print the prompt as well");
  command->add_flag("--stats", options->stats, "Print what the experts did, on standard error");
  command
      ->add_option("--max-model-len", options->engine.engine.max_model_len,
                   "Context length; 0: that of the model")
      ->check(CLI::Range(0, 1 << 24));
  command->callback([options, &selected] { selected = [options] { return Run(*options); }; });
}

}  // namespace moeserve::server
