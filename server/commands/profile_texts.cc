#include "server/commands/profile_texts.h"

#include <memory>
#include <utility>

#include "base/steady_clock.h"
#include "engine/statistics/measures/route_trace.h"
#include "server/commands/checked_options.h"
#include "server/commands/score_dump.h"
#include "server/reports/live_profile.h"

namespace moeserve::server {

void AddProfilingOptions(CLI::App& app, ProfilingOptions& options, bool text_required) {
  AddEngineOptions(app, options.engine);
  app.add_option("--text", options.text_files,
                 "File with a text; can be repeated, each file is a separate document")
      ->required(text_required);
  AddNumberOption(app, "--window", options.window,
                  "Tokens per window, run as one sequence; 0: the context length", 0, 1 << 24);
  AddNumberOption(app, "--hidden-samples", options.hidden_samples,
                  "Router input rows to keep per block for representation collapse; 0: none",
                  int64_t{0}, int64_t{1} << 24);
  AddNumberOption(app, "--token-stats-mib", options.token_stats_mib,
                  "Most memory for the table of counts by token and expert; if the table would be "
                  "larger, it is not kept",
                  0, 1 << 20);
}

Result<ProfiledTexts> ProfileTexts(const ModelOptionsText& model_options,
                                   const ProfilingOptions& options) {
  ModelOptionsText model = model_options;
  model.must_generate = true;  // texts are profiled by their tokens' log-probabilities
  std::vector<std::string> texts;
  for (const std::string& file : options.text_files) {
    MOESERVE_ASSIGN_OR_RETURN(std::string text, ReadScoredText(file));
    texts.push_back(std::move(text));
  }
  MOESERVE_ASSIGN_OR_RETURN(EngineOptions engine, ResolveEngineOptions(options.engine));
  if (!engine.expert_stats) {
    return absl::InvalidArgumentError(
        "--no-expert-stats: expert statistics are what this command reports");
  }
  engine.prefix_cache = false;
  engine.recorder.router_stats_interval = 1;
  engine.recorder.hidden_samples = options.hidden_samples;
  engine.recorder.token_counts_bytes = int64_t{options.token_stats_mib} << 20;
  engine.recorder.frequent_tokens = false;  // a profile has counts of all tokens or none

  std::unique_ptr<RouteTrace> trace;  // must outlive the engine's last step
  ScoreDump* dump = nullptr;
  const auto observe = [&](const ModelSpec& spec, EngineOptions& adjusted) -> absl::Status {
    if (!options.dump_folder.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(auto created,
                                ScoreDump::Create(options.dump_folder, spec, options.dump_hidden));
      dump = created.get();
      trace = std::move(created);
    } else if (options.routes) {
      trace = std::make_unique<RouteTrace>(RouteLayout(spec));
    }
    adjusted.recorder.observer = trace.get();
    return absl::OkStatus();
  };
  ProfiledTexts out;
  MOESERVE_ASSIGN_OR_RETURN(out.model, StartModel(model, engine, observe));
  MOESERVE_ASSIGN_OR_RETURN(out.score, ScoreTexts(texts,
                                                  {.window = options.window,
                                                   .in_order = trace != nullptr,
                                                   .progress = model.progress()},
                                                  out.model.engine));
  out.profile = LiveProfile(*out.model.engine, out.model.directory_name);
  // The engine runs no step after Drain(), so `trace`, which its steps write to, may be destroyed.
  out.model.engine->Drain(SteadyNow());
  if (dump != nullptr) {
    MOESERVE_RETURN_IF_ERROR(dump->Finish(out.model.directory_name, out.score.run));
  }
  if (options.routes) out.profile.routes = RouteSequence{out.score.run, trace->routes()};
  return out;
}

}  // namespace moeserve::server
