#include "server/commands/score/profile_texts.h"

#include <algorithm>
#include <climits>
#include <filesystem>
#include <memory>
#include <span>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "engine/statistics/measures/route_trace.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/commands/checked_options.h"
#include "server/commands/score/pair_scorer.h"
#include "server/commands/score/score_dump.h"
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

namespace {

// Returns whether MacsOf() needs the routes, because routed attention selects a varying number of
// experts.
bool VariesKeys(const ModelSpec& spec) {
  return std::any_of(spec.blocks.begin(), spec.blocks.end(), [](const BlockSpec& block) {
    return block.kind() != BlockKind::kFeedForward && block.routing() != nullptr &&
           block.routing()->select.MinSelected() != block.routing()->select.MaxSelected();
  });
}

// Returns the lines of a file without white space at their ends, without empty lines and repeated
// words.
Result<std::vector<std::string>> ReadWords(const std::string& file) {
  std::vector<std::string> words;
  if (file.empty()) return words;
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadScoredText(file));
  std::istringstream lines(text);
  for (std::string word; std::getline(lines, word);) {
    absl::StripAsciiWhitespace(&word);
    if (!word.empty() && std::find(words.begin(), words.end(), word) == words.end()) {
      words.push_back(word);
    }
  }
  if (words.empty()) return absl::InvalidArgumentError(Concat(file, ": expected a word per line"));
  return words;
}

absl::Status CheckInputs(const ProfilingOptions& options) {
  if (options.text_files.empty() == options.pair_files.empty()) {
    return absl::InvalidArgumentError(Concat("expected either --text or --pairs, found ",
                                             options.text_files.empty() ? "neither" : "both"));
  }
  if (options.of_encoder && options.pair_files.empty()) {
    return absl::InvalidArgumentError("--stack encoder: expected --pairs, found --text");
  }
  if (options.capacity && !options.pair_files.empty()) {
    return absl::InvalidArgumentError("--capacity: expected --text, found --pairs");
  }
  return absl::OkStatus();
}

WordStatistics WordsOf(const ProfiledTexts& result, const RouteTrace& trace,
                       const Tokenizer& tokenizer) {
  const Score& score = result.score;
  const auto prefix = static_cast<size_t>(score.prefix);
  const auto suffix = static_cast<size_t>(score.suffix);
  WordTokens tokens;
  tokens.occurrences.assign(result.words.size(), 0);
  size_t window = 0, begin = 0;  // the next window, and where it begins in the run
  for (const size_t count : score.text_windows) {
    // The text without the special tokens around each window, and where its tokens are.
    std::vector<TokenId> ids;
    std::vector<size_t> places;
    for (const size_t end = window + count; window < end; ++window) {
      const auto length = static_cast<size_t>(score.windows[window]);
      for (size_t i = begin + prefix; i < begin + length - suffix; ++i) {
        ids.push_back(score.run[i]);
        places.push_back(i);
      }
      begin += length;
    }
    const WordTokens found = FindWords(tokenizer, ids, result.words);
    tokens.word.resize(begin, kNoWord);
    for (size_t i = 0; i < places.size(); ++i) tokens.word[places[i]] = found.word[i];
    for (size_t w = 0; w < found.occurrences.size(); ++w) {
      tokens.occurrences[w] += found.occurrences[w];
    }
  }
  return SummarizeWords(tokens, trace.layout(), trace.routes());
}

// What observes the steps of a run. Must outlive the engine's last step.
struct Observers {
  std::unique_ptr<RouteTrace> trace;
  ScoreDump* dump = nullptr;  // `trace`, if that is a dump
  std::unique_ptr<InitialBalanceObserver> balance;
  StepObservers all;

  absl::Status Create(const ProfilingOptions& options, const ModelSpec& spec,
                      const std::vector<std::optional<double>>& temperatures) {
    if (!options.dump_folder.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(auto created,
                                ScoreDump::Create(options.dump_folder, spec, options.dump_hidden));
      dump = created.get();
      trace = std::move(created);
    } else if (options.routes || !options.words_file.empty() || options.capacity ||
               VariesKeys(spec)) {
      trace = std::make_unique<RouteTrace>(RouteLayout(spec));
    }
    if (trace != nullptr) all.Add(*trace);
    const bool learned = std::any_of(temperatures.begin(), temperatures.end(),
                                     [](const auto& t) { return t.has_value(); });
    if (learned) {
      balance =
          std::make_unique<InitialBalanceObserver>(spec, temperatures, options.initial_temperature);
      all.Add(*balance);
    }
    return absl::OkStatus();
  }
};

}  // namespace

Result<ExpertProfile> ReadProfile(const std::string& file) {
  auto profile = LoadProfile(file);
  if (profile.ok()) return profile;
  const std::string folder = std::filesystem::path(file).parent_path().string();
  return Prefixed(folder.empty() ? "" : Printable(folder, PATH_MAX) + "/", profile.status());
}

Result<ProfiledTexts> ProfileTexts(const ModelOptionsText& model_options,
                                   const ProfilingOptions& options) {
  const ModelOptionsText& model = model_options;
  MOESERVE_RETURN_IF_ERROR(CheckInputs(options));
  std::vector<TextPair> pairs;
  for (const std::string& file : options.pair_files) {
    MOESERVE_ASSIGN_OR_RETURN(const auto read, ReadTextPairs(file));
    pairs.insert(pairs.end(), read.begin(), read.end());
  }
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

  engine.recorder.observes_encoder = options.of_encoder;
  std::shared_ptr<RowLimit> limit;
  if (options.capacity) {
    if (model.device != "cpu") {
      return absl::InvalidArgumentError("--capacity: expected --device cpu, found " + model.device);
    }
    engine.routing_control.enabled = true;
  }

  Observers observers;
  const auto observe = [&](const LoadedWeights& loaded, EngineOptions& adjusted) -> absl::Status {
    if (options.capacity) {
      limit = std::make_shared<RowLimit>(*options.capacity, loaded.spec);
      // A step computes a whole window, because the limit follows from its rows.
      const int context = loaded.spec.max_position_embeddings;
      adjusted.max_step_tokens =
          std::max(adjusted.max_step_tokens,
                   options.window > 0 ? std::min(options.window, context) : context);
    }
    if (options.of_encoder && loaded.spec.encoder == nullptr) {
      return absl::InvalidArgumentError(
          "--stack encoder: expected a model that translates, found one with a single stack");
    }
    if (options.mask.rule != MaskRule::kAll && loaded.spec.head.kind != HeadKind::kMaskedLm) {
      return absl::InvalidArgumentError(Concat("--mask ", KindName(options.mask.rule),
                                               ": expected a masked language model, found another "
                                               "kind"));
    }
    MOESERVE_RETURN_IF_ERROR(
        observers.Create(options, options.of_encoder ? *loaded.spec.encoder : loaded.spec,
                         options.of_encoder ? loaded.source_temperatures : loaded.temperatures));
    if (!observers.all.empty()) adjusted.recorder.observer = &observers.all;
    return absl::OkStatus();
  };
  ProfiledTexts out;
  MOESERVE_ASSIGN_OR_RETURN(out.words, ReadWords(options.words_file));
  MOESERVE_ASSIGN_OR_RETURN(out.model, StartModel(model, engine, observe));
  ScoringOptions scoring{.window = options.window,
                         .in_order = observers.trace != nullptr || limit != nullptr,
                         .mask = options.mask,
                         .progress = model.progress()};
  if (const Tokenizer* tokenizer = out.model.engine->tokenizer(); tokenizer != nullptr) {
    scoring.mask_token = MaskToken(out.model.tokenizer_config, *tokenizer);
  }
  if (limit != nullptr) {
    scoring.routing_control =
        std::make_shared<const RoutingControl>(RoutingControl::Limited(limit));
  }
  const Engine& running = *out.model.engine;
  std::vector<int> sources;
  if (pairs.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(out.score, ScoreTexts(texts, scoring, out.model.engine));
  } else {
    MOESERVE_ASSIGN_OR_RETURN(PairScore scored,
                              ScorePairs(pairs, options.of_encoder, scoring, out.model.engine));
    out.score = std::move(scored.score);
    sources = std::move(scored.sources);
  }
  StackExperts experts(running);
  if (options.of_encoder) {
    MOESERVE_ASSIGN_OR_RETURN(experts, StackExperts::Named(running, KindName(Stack::kEncoder)));
  }
  if (limit != nullptr && out.model.engine->ExpertSnapshot().steps != out.score.windows.size()) {
    return absl::InvalidArgumentError(
        Concat("--capacity: a step computes at most ", out.model.engine->options().max_step_tokens,
               " tokens here, so that windows of --window ", out.score.window, " are too long"));
  }
  out.profile = LiveProfile(experts, out.model.directory_name);
  // The engine runs no step after Drain(), so `observers`, which its steps write to, may be
  // destroyed.
  out.model.engine->Drain(SteadyNow());
  if (observers.dump != nullptr) {
    MOESERVE_RETURN_IF_ERROR(observers.dump->Finish(out.model.directory_name, out.score.run));
  }
  const RouteTrace* trace = observers.trace.get();
  out.macs = MacsOf(experts.spec(), out.profile.stats, out.score.windows,
                    trace != nullptr ? std::span<const BlockRoutes>(trace->routes())
                                     : std::span<const BlockRoutes>(),
                    options.of_encoder ? std::span<const int>() : std::span<const int>(sources));
  if (options.of_encoder) out.macs.matrices += static_cast<double>(SourceMacs(running.spec()));
  if (limit != nullptr) {
    for (const RoutedBlock& block : out.model.engine->route_layout().blocks) {
      out.dropped.push_back(limit->dropped()[static_cast<size_t>(block.slot)]);
    }
  }
  for (size_t i = 0; i < out.profile.stats.blocks.size(); ++i) {
    out.initial_balance.push_back(observers.balance != nullptr ? observers.balance->Of(i)
                                                               : std::nullopt);
  }
  if (!out.words.empty()) {
    const Tokenizer& tokenizer = *running.tokenizer();
    out.word_experts = WordsOf(out, *trace, options.of_encoder ? tokenizer.source() : tokenizer);
  }
  if (options.routes) out.profile.routes = RouteSequence{out.score.run, trace->routes()};
  return out;
}

}  // namespace moeserve::server
