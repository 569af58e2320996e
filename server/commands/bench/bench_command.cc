#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>

#include "base/error_text.h"
#include "engine/memory/paged_pool.h"
#include "engine/model/model.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/bench/bench_cases.h"
#include "server/bench/bench_plan.h"
#include "server/bench/bench_report.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/synthetic_options.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/process/signals.h"

namespace moeserve::server {
namespace {

struct BenchArguments {
  ModelOptionsText model;      // its folder is empty for a synthetic model
  SyntheticOptions synthetic;  // the shape of a model with random weights
  CaseSettings cases;
  std::string json;  // path of the results file; empty writes none
};

// The effort of measuring the machine's rates.
struct ProbeSize {
  int64_t bytes;  // far more than the caches hold
  int bandwidth_rounds;
  int arithmetic_rounds;
};
constexpr ProbeSize kLongProbe = {int64_t{2} << 30, 5, 10};

// The probe between two measurements. On a machine whose speed changes within seconds, it has to be
// short.
ProbeSize ShortProbe(int threads) {
  return {std::max(int64_t{512} << 20, threads * (int64_t{64} << 20)), 3, 2};
}

struct Loaded {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;
  std::string name;
  std::optional<CheckpointIdentity> identity;  // nullopt for a synthetic model
  int64_t weight_bytes = 0;                    // of all tensors as they are stored
};

// Opens the checkpoint, or makes the weights that are asked for.
Result<Loaded> Open(const BenchArguments& options) {
  Loaded loaded;
  if (!options.synthetic.name.empty()) {
    MOESERVE_RETURN_IF_ERROR(CheckSyntheticOptions(options.model));
    MOESERVE_ASSIGN_OR_RETURN(loaded.spec, BuildSyntheticSpec(options.synthetic));
    loaded.weights =
        MakeSyntheticWeights(options.model.dtype == "f32" ? DType::kF32 : DType::kBF16);
    loaded.name = "synthetic " + Describe(options.synthetic);
    for (const TensorRequirement& tensor : RequiredTensors(loaded.spec)) {
      int64_t bytes = options.model.dtype == "f32" ? 4 : 2;
      for (const int64_t dim : tensor.shape) bytes *= dim;
      loaded.weight_bytes += bytes;
    }
    return loaded;
  }
  MOESERVE_ASSIGN_OR_RETURN(
      Checkpoint checkpoint,
      LoadCheckpoint(options.model.directory,
                     {.require_tokenizer = false, .ignored_keys = options.model.ignored_keys}));
  MOESERVE_RETURN_IF_ERROR(CheckGenerating(checkpoint.spec));
  loaded.spec = checkpoint.spec;
  loaded.weights = std::move(checkpoint.weights);
  loaded.name = checkpoint.directory_name;
  loaded.identity = std::move(checkpoint.identity);
  loaded.weight_bytes = checkpoint.weight_bytes;
  return loaded;
}

Result<MachineRates> MeasureRates(Backend& backend, const ProbeSize& size) {
  MachineRates rates;
  MOESERVE_ASSIGN_OR_RETURN(rates.read_bandwidth,
                            backend.MeasureReadBandwidth(size.bytes, size.bandwidth_rounds));
  rates.f32 = backend.MeasureArithmetic(ArithmeticKind::kF32, size.arithmetic_rounds);
  rates.bf16 = backend.MeasureArithmetic(ArithmeticKind::kBF16, size.arithmetic_rounds);
  rates.int8 = backend.MeasureArithmetic(ArithmeticKind::kInt8, size.arithmetic_rounds);
  return rates;
}

absl::Status WriteJson(const std::string& path, const Json& json) {
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError(Concat("cannot write ", path));
}

// Measures all cases, and the machine after them unless that was interrupted.
absl::Status MeasureCases(const BenchArguments& options, Backend& backend, Model& model,
                          KvCacheStorage& cache, Interruption& interruption, BenchReport& report) {
  Progress progress("measuring", kMeasurementUnit,
                    static_cast<double>(CountMeasurements(options.cases)),
                    options.model.progress());
  const ProbeSize probe = ShortProbe(backend.threads());
  const auto stop = [&] { return interruption.signal() != 0; };
  interruption.Begin();
  MOESERVE_ASSIGN_OR_RETURN(
      report.cases, MeasureCases(
                        options.cases, model, cache, [&] { return MeasureRates(backend, probe); },
                        [&] { progress.Add(1.0); }, stop));
  report.interrupted = stop();
  if (!report.interrupted) progress.Finish();
  if (!report.interrupted) {
    MOESERVE_ASSIGN_OR_RETURN(report.after, MeasureRates(backend, kLongProbe));
  } else if (report.cases.empty()) {
    report.after = report.before;
  } else {
    report.after = report.cases.back().rounds.back().after;
  }
  return absl::OkStatus();
}

absl::Status RunBench(const BenchArguments& options, Interruption& interruption) {
  if (options.synthetic.name.empty() && options.model.directory.empty()) {
    return absl::InvalidArgumentError("bench: expected --model or --synthetic, found neither");
  }
  MOESERVE_ASSIGN_OR_RETURN(Loaded loaded, Open(options));
  const CaseSettings& cases = options.cases;
  const int sequences = *std::max_element(cases.batches.begin(), cases.batches.end());
  const int length = std::max(cases.prompt, cases.context + cases.tokens);
  if (length > loaded.spec.max_position_embeddings) {
    return absl::InvalidArgumentError(
        Concat("bench: expected at most ", loaded.spec.max_position_embeddings,
               " positions (max_position_embeddings), found ", length));
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                            CreateBackend(options.model.backend()));
  MOESERVE_ASSIGN_OR_RETURN(ModelOptions types, ResolveDType(options.model, *loaded.weights));
  MOESERVE_ASSIGN_OR_RETURN(types.tiers, ResolveTiers(options.model));
  MOESERVE_ASSIGN_OR_RETURN(const KvCacheType cache_type,
                            ResolveKvCacheType(options.model.kv_cache_dtype, types.compute));
  std::unique_ptr<PackedCache> packed_cache;
  if (loaded.identity.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(packed_cache, OpenPackedCache(options.model, *loaded.identity,
                                                            loaded.weight_bytes, *backend));
  }
  const int64_t blocks = sequences * PagesFor(length);
  const std::string plan =
      ModelPlan(loaded.name, loaded.spec) +
      MemoryPlan(loaded.spec, types,
                 blocks * backend->PageBytes(CacheShapes(loaded.spec), cache_type),
                 Concat(" of ", sequences, " x ", length, " tokens"), kLongProbe.bytes) +
      CasesPlan(cases);
  std::fputs(plan.c_str(), stdout);
  std::fflush(stdout);
  BenchReport report;
  MOESERVE_ASSIGN_OR_RETURN(report.before, MeasureRates(*backend, kLongProbe));
  const auto start = std::chrono::steady_clock::now();
  ReportedWeights weights(*loaded.weights, loaded.spec, loaded.weight_bytes,
                          options.model.progress());
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<Model> model,
      Model::Create(loaded.spec, types, weights, *backend, packed_cache.get()));
  weights.Finish();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s, %s, %s, weights %.2f GB, loaded in %.1f s\n", loaded.name.c_str(),
              std::string(types.quantization == Quantization::kNone ? Name(types.compute)
                                                                    : Name(types.quantization))
                  .c_str(),
              std::string(backend->description()).c_str(),
              static_cast<double>(model->weight_bytes()) / 1e9, seconds.count());
  std::fflush(stdout);
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<KvCacheStorage> cache,
                            backend->NewKvCache(CacheShapes(loaded.spec), cache_type, {blocks}));
  report.model = loaded.name;
  report.device = backend->description();
  report.instruction_set = backend->instruction_set();
  report.threads = backend->threads();
  report.types = types;
  report.kv_cache = cache_type;
  report.weight_bytes = model->weight_bytes();
  report.settings = cases;
  MOESERVE_RETURN_IF_ERROR(MeasureCases(options, *backend, *model, *cache, interruption, report));
  if (report.interrupted) {
    if (report.cases.empty()) {
      return absl::CancelledError("interrupted before a measurement was finished");
    }
    size_t measured = 0;
    for (const CaseResult& result : report.cases) measured += result.rounds.size();
    std::printf("interrupted: these are the results of %zu measurements until then\n", measured);
  }
  std::fputs(BenchTable(report).c_str(), stdout);
  if (options.json.empty()) return absl::OkStatus();
  return WriteJson(options.json, BenchJson(report, loaded.spec));
}

}  // namespace

void AddBenchCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure tokens per second, also as a share of what the machine allows");
  auto options = std::make_shared<BenchArguments>();
  CLI::Option* model = command->add_option("-m,--model", options->model.directory,
                                           "Checkpoint folder or .gguf file");
  AddSyntheticOptions(*command, options->synthetic)->excludes(model);
  AddComputeOptions(*command, options->model);
  AddQuietOption(*command, options->model.quiet);
  command
      ->add_option("--batch", options->cases.batches,
                   "Batch sizes to measure: sequences that decode together")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  AddNumberOption(*command, "--prompt", options->cases.prompt,
                  "Tokens of the prompt to measure; 0: measure no prompt", 0, 1 << 20);
  AddNumberOption(*command, "--chunk", options->cases.chunk, "Prompt tokens per step", 1, 1 << 16);
  AddNumberOption(*command, "--tokens", options->cases.tokens, "Decode steps per measurement", 1,
                  1 << 20);
  AddNumberOption(*command, "--context", options->cases.context,
                  "Tokens in the KV cache before decoding", 1, 1 << 20);
  AddNumberOption(*command, "--rounds", options->cases.rounds,
                  "Repetitions; the result is their median", 1, 1000);
  command->add_option("--json", options->json, "File for the results");
  AddBenchLoadCommand(*command, selected);
  command->callback([options, command, &selected] {
    // With a subcommand such as "bench load", this command itself does not run.
    if (!command->get_subcommands().empty()) return;
    selected = [options] {
      Interruption interruption("interrupted before anything was measured");
      const absl::Status status = RunBench(*options, interruption);
      if (status.ok()) return interruption.exit_status();
      const int failed = Fail(status);
      return absl::IsCancelled(status) ? interruption.exit_status() : failed;
    };
  });
}

}  // namespace moeserve::server
