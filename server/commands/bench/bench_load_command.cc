#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/bench/bench_plan.h"
#include "server/bench/load_test/driver.h"
#include "server/bench/load_test/engine_target.h"
#include "server/bench/load_test/http_target.h"
#include "server/bench/load_test/load_report.h"
#include "server/bench/load_test/workload.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/weight_traffic.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/run_with_ranks.h"
#include "server/commands/start_model.h"
#include "server/keys/key_file.h"
#include "server/process/signals.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxPromptFileBytes = size_t{256} << 20;
// The vocabulary size assumed for servers, which do not report theirs. Every model is expected to
// have at least this many token ids.
constexpr int kDefaultVocabulary = 1000;
constexpr int64_t kProbeBytes = int64_t{2} << 30;
constexpr int kProbeRounds = 5;
constexpr double kHoldSlice = 0.25;  // seconds between two looks at whether idle streams are held

struct LoadArguments {
  // Exactly one of url, model and synthetic is set; it selects the target of the load.
  std::string url;
  ModelOptionsText model;
  std::string synthetic;

  EngineOptionsText engine;
  HttpTargetOptions http;
  std::string api_key_file;

  LoadOptions load;
  int64_t warmup = 0;
  IdleStreamOptions idle;

  WorkloadOptions workload;
  std::string prompt_tokens = "32:256";  // N or MIN:MAX, as on the command line
  std::string output_tokens = "32:128";
  std::string long_prompt_tokens = "2048:4096";
  std::string lengths = "uniform";
  std::string prompts_file;

  bool bandwidth = false;
  std::string json;

  Interruption* interruption = nullptr;  // of the process
  bool interrupted() const { return interruption->signal() != 0; }

  bool has_load() const { return load.clients > 0 || load.rate > 0.0; }
};

Result<std::vector<std::string>> ReadPrompts(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> prompts;
  size_t bytes = 0;
  for (std::string line; std::getline(file, line);) {
    bytes += line.size();
    if (bytes > kMaxPromptFileBytes) {
      return absl::InvalidArgumentError(Concat(path, ": larger than ", kMaxPromptFileBytes));
    }
    if (!line.empty()) prompts.push_back(std::move(line));
  }
  if (prompts.empty()) {
    return absl::InvalidArgumentError(Concat(path, ": cannot be read or holds no line of text"));
  }
  return prompts;
}

Result<LengthRange> ParseRange(const char* option, const std::string& text) {
  auto range = ParseLengthRange(text);
  if (!range.ok()) return Prefixed(Concat(option, ": "), range.status());
  return range;
}

Result<Workload> MakeWorkload(const LoadArguments& options, int vocab_size) {
  WorkloadOptions workload = options.workload;
  MOESERVE_ASSIGN_OR_RETURN(workload.prompt, ParseRange("--prompt-tokens", options.prompt_tokens));
  MOESERVE_ASSIGN_OR_RETURN(workload.output, ParseRange("--output-tokens", options.output_tokens));
  MOESERVE_ASSIGN_OR_RETURN(workload.long_prompt,
                            ParseRange("--long-prompt-tokens", options.long_prompt_tokens));
  workload.lengths =
      options.lengths == "uniform" ? LengthDistribution::kUniform : LengthDistribution::kLogUniform;
  if (workload.vocab_size == 0) workload.vocab_size = vocab_size;
  if (!options.prompts_file.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(workload.texts, ReadPrompts(options.prompts_file));
  }
  return Workload::Create(std::move(workload));
}

// If the JSON report goes to standard output, everything else goes to standard error.
std::FILE* TextFile(const LoadArguments& options) { return options.json == "-" ? stderr : stdout; }

void PrintLoadText(const LoadArguments& options, const std::string& text) {
  std::fputs(text.c_str(), TextFile(options));
  std::fflush(TextFile(options));
}

// Says how large the model in this process is, before it is loaded.
absl::Status PrintModelPlan(const LoadArguments& options, const std::string& name,
                            const EngineOptions& engine, const ModelSpec& spec,
                            const WeightSource& weights) {
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                            CreateBackend(options.model.backend()));
  MOESERVE_ASSIGN_OR_RETURN(const ModelOptions types, ResolveDType(options.model, weights));
  MOESERVE_ASSIGN_OR_RETURN(const KvCacheType cache,
                            ResolveKvCacheType(options.model.kv_cache_dtype, types.compute));
  const int64_t bytes = PlannedCacheBytes(engine, spec, *backend, cache).value_or(0);
  PrintLoadText(options, ModelPlan(name, spec) +
                             MemoryPlan(spec, types, bytes,
                                        Concat(" of --max-num-seqs ", engine.max_num_seqs),
                                        options.bandwidth ? kProbeBytes : 0));
  return absl::OkStatus();
}

absl::Status PrintCheckpointPlan(const LoadArguments& options, const EngineOptions& engine) {
  MOESERVE_ASSIGN_OR_RETURN(
      const Checkpoint checkpoint,
      LoadCheckpoint(options.model.directory, {.ignored_keys = options.model.ignored_keys}));
  return PrintModelPlan(options, checkpoint.directory_name, engine, checkpoint.spec,
                        *checkpoint.weights);
}

Result<RunningModel> StartSynthetic(const LoadArguments& options, const EngineOptions& engine) {
  MOESERVE_RETURN_IF_ERROR(CheckSyntheticOptions(options.model));
  RunningModel out;
  MOESERVE_ASSIGN_OR_RETURN(const ModelSpec spec, SyntheticSpec(options.synthetic));
  const auto weights =
      MakeSyntheticWeights(options.model.dtype == "f32" ? DType::kF32 : DType::kBF16);
  MOESERVE_RETURN_IF_ERROR(
      PrintModelPlan(options, "synthetic " + options.synthetic, engine, spec, *weights));
  MOESERVE_ASSIGN_OR_RETURN(out.backend, CreateBackend(options.model.backend()));
  MOESERVE_ASSIGN_OR_RETURN(const ModelOptions types, ResolveDType(options.model, *weights));
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Model> model,
                            Model::Create(spec, types, *weights, *out.backend));
  EngineOptions adjusted = engine;
  MOESERVE_ASSIGN_OR_RETURN(adjusted.kv_cache_type,
                            ResolveKvCacheType(options.model.kv_cache_dtype, types.compute));
  MOESERVE_ASSIGN_OR_RETURN(out.engine, Engine::Create(adjusted, std::move(model), nullptr, {}));
  out.types = types;
  return out;
}

double ThreadCpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Runs the warm-up and then the measured load. `weight_bytes` returns the bytes of weights that the
// engine's steps have read since the engine started; it may be empty.
Result<LoadReport> MeasureLoad(const LoadArguments& options, const Workload& workload,
                               LoadTarget& target,
                               const std::function<double()>& weight_bytes = nullptr) {
  const int warmup_clients = options.load.clients > 0 ? options.load.clients : 8;
  MOESERVE_RETURN_IF_ERROR(WarmUp(options.warmup, warmup_clients, workload, target));
  const Result<ServerCounters> before = target.Counters();
  const double bytes_before = weight_bytes ? weight_bytes() : 0.0;
  const double cpu_before = ThreadCpuSeconds();
  // If both ends are given, either may come first; the time is certain to pass.
  const bool timed = options.load.seconds > 0.0;
  Progress progress("load", timed ? kSecondUnit : kRequestUnit,
                    timed ? options.load.seconds : static_cast<double>(options.load.requests),
                    options.model.progress());
  const auto tell = [&](double seconds, int64_t ended) {
    progress.Set(timed ? seconds : static_cast<double>(ended));
  };
  options.interruption->Begin();
  const LoadRun run =
      RunLoad(options.load, workload, target, tell, [&] { return options.interrupted(); });
  if (!run.interrupted) progress.Finish();
  const double cpu = ThreadCpuSeconds() - cpu_before;
  const Result<ServerCounters> after = target.Counters();
  LoadReport report = MakeReport(run);
  report.sender_cpu_seconds = cpu;
  if (weight_bytes) report.weight_bytes = weight_bytes() - bytes_before;
  if (before.ok() && after.ok()) report.server = Difference(*after, *before);
  return report;
}

absl::Status WriteLoadReport(const LoadArguments& options, const LoadReport& report,
                             const std::string& target) {
  PrintLoadText(options, ReportTable(report));
  if (!options.json.empty()) {
    const std::string json = ReportJson(report, target) + "\n";
    if (options.json == "-") {
      std::fputs(json.c_str(), stdout);
    } else {
      std::ofstream file(options.json);
      file << json;
      file.close();
      if (!file) return absl::UnavailableError("cannot write " + options.json);
    }
  }
  if (report.unanswered > 0 || report.answered_twice > 0) {
    return absl::DataLossError(Concat(report.unanswered, " requests were not answered and ",
                                      report.answered_twice, " were answered more than once"));
  }
  return absl::OkStatus();
}

std::string ServerPlan(const LoadArguments& options, const Workload& workload) {
  const std::string& model = options.http.served_model;
  std::string text =
      Concat("server: ", options.url, ", ",
             model.empty() ? "the model that it lists first" : "model " + model, "\n");
  if (options.idle.count > 0) {
    text += Concat("idle streams: ", options.idle.count, " of ", options.idle.output_tokens,
                   " tokens\n");
  }
  if (options.has_load()) text += LoadPlan(options.load, workload, options.warmup);
  return text;
}

absl::Status RunAgainstServer(LoadArguments options) {
  MOESERVE_ASSIGN_OR_RETURN(options.http.url, ParseBaseUrl(options.url));
  if (!options.api_key_file.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(options.http.api_key, ReadFirstKey(options.api_key_file));
  }
  MOESERVE_ASSIGN_OR_RETURN(const Workload workload, MakeWorkload(options, kDefaultVocabulary));
  MOESERVE_ASSIGN_OR_RETURN(const auto target, HttpTarget::Create(options.http));
  LoadReport report;
  // Idle streams that were opened are released in order.
  if (options.idle.count > 0) options.interruption->Begin();
  PrintLoadText(options, ServerPlan(options, workload));
  if (options.idle.count > 0) target->OpenIdleStreams(options.idle, workload);
  if (options.has_load()) {
    MOESERVE_ASSIGN_OR_RETURN(report, MeasureLoad(options, workload, *target));
  } else {
    for (double left = options.load.seconds; left > 0.0 && !options.interrupted();
         left -= kHoldSlice) {
      target->HoldIdleStreams(std::min(left, kHoldSlice));
    }
    report.interrupted = options.interrupted();
  }
  if (options.idle.count > 0) {
    report.idle_streams =
        target->ReleaseIdleStreams(options.interrupted() ? 0.0 : options.load.drain_seconds);
  }
  return WriteLoadReport(options, report, options.url);
}

absl::Status RunInProcess(const LoadArguments& options) {
  if (options.idle.count > 0) {
    return absl::InvalidArgumentError("--idle-streams needs a server: give --url");
  }
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(options.engine));
  if (options.synthetic.empty()) {
    MOESERVE_RETURN_IF_ERROR(PrintCheckpointPlan(options, engine));
  }
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, options.synthetic.empty()
                                                          ? StartModel(options.model, engine)
                                                          : StartSynthetic(options, engine));
  MOESERVE_RETURN_IF_ERROR(CheckGenerating(model.engine->spec()));
  MOESERVE_ASSIGN_OR_RETURN(const Workload workload,
                            MakeWorkload(options, model.engine->spec().vocab_size));
  if (workload.max_total_tokens() > model.engine->max_model_len()) {
    return absl::InvalidArgumentError(
        Concat("the longest request has ", workload.max_total_tokens(),
               " tokens, prefix, prompt and output together; the context has ",
               model.engine->max_model_len()));
  }
  PrintLoadText(options, LoadPlan(options.load, workload, options.warmup));
  EngineTarget target(model.engine, options.http.timeout_seconds);
  double bandwidth = 0.0;
  const auto probe = [&]() -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(const double found,
                              model.backend->MeasureReadBandwidth(kProbeBytes, kProbeRounds));
    bandwidth = std::max(bandwidth, found);
    return absl::OkStatus();
  };
  std::function<double()> weight_bytes;
  if (options.bandwidth) {
    weight_bytes = [&] {
      return WeightBytesRead(model.engine->ExpertSnapshot(), model.engine->spec(), model.types);
    };
    MOESERVE_RETURN_IF_ERROR(probe());
  }
  MOESERVE_ASSIGN_OR_RETURN(LoadReport report,
                            MeasureLoad(options, workload, target, weight_bytes));
  if (options.bandwidth && !report.interrupted) {
    // The bandwidth is measured before and after the load, because the speed of a machine can
    // drift.
    MOESERVE_RETURN_IF_ERROR(probe());
  }
  if (options.bandwidth) report.read_bandwidth = bandwidth;
  return WriteLoadReport(
      options, report,
      options.synthetic.empty() ? options.model.directory : "synthetic " + options.synthetic);
}

absl::Status RunLoad(const LoadArguments& options) {
  const int targets =
      !options.url.empty() + !options.model.directory.empty() + !options.synthetic.empty();
  if (targets != 1) {
    return absl::InvalidArgumentError(
        Concat("bench load: expected one of --url, --model and --synthetic, found ", targets));
  }
  if (options.has_load() || options.idle.count == 0) {
    MOESERVE_RETURN_IF_ERROR(CheckLoadOptions(options.load));
  } else if (!(options.load.seconds > 0.0)) {
    return absl::InvalidArgumentError("--idle-streams alone needs --seconds to hold them");
  }
  if (options.bandwidth && !options.url.empty()) {
    return absl::InvalidArgumentError("--bandwidth needs the model in this process: no --url");
  }
  return options.url.empty() ? RunInProcess(options) : RunAgainstServer(options);
}

void AddTargetOptions(CLI::App& command, LoadArguments& options) {
  command.add_option("--url", options.url,
                     "Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8080/v1");
  command.add_option("--served-model", options.http.served_model,
                     "Model name for --url; default: the first that the server lists");
  command.add_option("--api-key-file", options.api_key_file,
                     "File whose first key is sent to --url");
  command.add_flag("--token-ids", options.http.token_ids,
                   "Ask --url for token ids too (an extension), so that every token is counted");
  AddNumberOption(command, "--timeout", options.http.timeout_seconds, "Seconds for one request",
                  0.01, 86400.0);
  command.add_option("-m,--model", options.model.directory,
                     "Checkpoint folder, run in this process without sockets");
  const std::vector<std::string> names(std::begin(kSyntheticNames), std::end(kSyntheticNames));
  command
      .add_option("--synthetic", options.synthetic,
                  "Run a model of this shape with random weights, in this process")
      ->check(CLI::IsMember(names));
  AddComputeOptions(command, options.model);
  AddRankOptions(command, options.model.ranks);
  AddQuietOption(command, options.model.quiet);
  AddEngineOptions(command, options.engine);
}

void AddLoopOptions(CLI::App& command, LoadArguments& options) {
  LoadOptions& load = options.load;
  CLI::Option* clients = command.add_option(
      "--clients", load.clients, "Closed loop: clients, each with one request at a time");
  clients->check(CLI::Range(1, 100'000));
  command.add_option("--rate", load.rate, "Open loop: requests per second, Poisson arrivals")
      ->check(NumberRange(1e-3, 1e6))
      ->excludes(clients);
  command.add_option("--seconds", load.seconds, "Seconds during which requests are started")
      ->check(NumberRange(0.001, 1e6));
  command.add_option("--requests", load.requests, "Number of requests to start")
      ->check(CLI::Range(1, 100'000'000));
  AddNumberOption(command, "--drain", load.drain_seconds,
                  "Seconds after the last start for running requests to end; then they are cut off",
                  0.0, 86400.0);
  AddNumberOption(command, "--error-pause", load.error_pause,
                  "Seconds that a client of the closed loop waits after an error", 0.0, 3600.0);
  AddNumberOption(command, "--warmup", options.warmup, "Requests before the measurement", 0,
                  1'000'000);
  command
      .add_option("--idle-streams", options.idle.count,
                  "Streams to open and not read during the load; without a load, for --seconds")
      ->check(CLI::Range(1, 100'000));
  AddNumberOption(command, "--idle-tokens", options.idle.output_tokens,
                  "Output tokens per idle stream", 1, 1 << 24);
  AddNumberOption(command, "--idle-read-bytes", options.idle.read_bytes_per_second,
                  "Bytes read per second from each idle stream", 0, 1 << 24);
  AddNumberOption(command, "--idle-open-seconds", options.idle.open_seconds,
                  "Seconds for all idle streams to begin", 0.001, 86400.0);
}

void AddWorkloadOptions(CLI::App& command, LoadArguments& options) {
  WorkloadOptions& workload = options.workload;
  command.add_option("--seed", workload.seed, "Seed of lengths, tokens and arrivals")
      ->capture_default_str();
  command.add_option("--prompt-tokens", options.prompt_tokens, "Length of prompts: N or MIN:MAX")
      ->capture_default_str();
  command.add_option("--output-tokens", options.output_tokens, "Tokens to generate: N or MIN:MAX")
      ->capture_default_str();
  AddChoiceOption(command, "--lengths", options.lengths, "How lengths are drawn from their ranges",
                  {"uniform", "log-uniform"});
  AddNumberOption(command, "--long-share", workload.long_share,
                  "Share of requests with a long prompt", 0.0, 1.0);
  command
      .add_option("--long-prompt-tokens", options.long_prompt_tokens,
                  "Length of long prompts: N or MIN:MAX")
      ->capture_default_str();
  AddNumberOption(command, "--prefix-tokens", workload.prefix_tokens,
                  "Length of a shared prefix that is put before prompts", 0, 1 << 24);
  AddNumberOption(command, "--prefix-share", workload.prefix_share,
                  "Share of requests with the shared prefix", 0.0, 1.0);
  command
      .add_option("--vocab-size", workload.vocab_size,
                  "Prompts are random token ids below this; default: the model's, 1000 for --url")
      ->check(CLI::Range(1, 1 << 24));
  command.add_option("--prompts", options.prompts_file,
                     "File with one text prompt per line, instead of random ids");
}

}  // namespace

void AddBenchLoadCommand(CLI::App& bench, Command& selected) {
  CLI::App* command = bench.add_subcommand(
      "load", "Measure latencies and throughput under a reproducible load of requests");
  auto options = std::make_shared<LoadArguments>();
  AddTargetOptions(*command, *options);
  AddLoopOptions(*command, *options);
  AddWorkloadOptions(*command, *options);
  command->add_flag(
      "--bandwidth", options->bandwidth,
      "Also measure the memory's read bandwidth, and the share of it used to read weights");
  command->add_option("--json", options->json, "File for the results; - for standard output");
  command->callback([options, &selected] {
    selected = [options] {
      options->load.seed = options->workload.seed;
      Interruption interruption("interrupted before the load began");
      options->interruption = &interruption;
      const auto run = [&] {
        const absl::Status status = RunLoad(*options);
        return status.ok() ? interruption.exit_status() : Fail(status);
      };
      if (!options->model.directory.empty()) return RunWithRanks(options->model, run);
      if (options->model.ranks.transport == "off") return run();
      return Fail(absl::InvalidArgumentError("--ranks: expected --model, found none"));
    };
  });
}

}  // namespace moeserve::server
