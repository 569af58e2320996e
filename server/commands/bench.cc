#include "server/commands/bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "engine/batch.h"
#include "engine/kv_cache.h"
#include "engine/model/model.h"
#include "engine/synthetic.h"
#include "engine/weight_traffic.h"
#include "kernels/registry.h"
#include "model_loaders/loader.h"
#include "server/commands/bench_load.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

struct Options {
  ModelOptionsText model;          // folder; empty where `synthetic` is given
  std::string synthetic;           // SyntheticSpec(): random weights made in memory
  std::vector<int> batches = {1};  // sequences that decode together, one case each
  int prompt = 0;                  // tokens of a prompt case; 0: none
  int chunk = 512;                 // tokens of a prompt that are computed together
  int tokens = 64;                 // decode steps of a case
  int context = 16;                // tokens in the cache before a decode case
  int rounds = 3;                  // the median counts
  std::string json;                // file for the results; empty: none
};

constexpr int64_t kProbeBytes = int64_t{2} << 30;
constexpr int kProbeRounds = 5;
constexpr int kContextRows = 4096;  // of a step that fills the cache

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Loaded {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;
  std::string name;
};

Result<Loaded> Open(const Options& options) {
  Loaded loaded;
  if (!options.synthetic.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(loaded.spec, SyntheticSpec(options.synthetic));
    loaded.weights =
        MakeSyntheticWeights(options.model.dtype == "f32" ? DType::kF32 : DType::kBF16);
    loaded.name = "synthetic " + options.synthetic;
    return loaded;
  }
  MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint,
                            LoadCheckpoint(options.model.directory, {.require_tokenizer = false}));
  loaded.spec = checkpoint.spec;
  loaded.weights = std::move(checkpoint.weights);
  loaded.name = checkpoint.directory_name;
  return loaded;
}

// Counts the experts that the steps really touched.
class TouchedExperts : public StepHooks {
 public:
  explicit TouchedExperts(const ModelSpec& spec) : spec_(spec) {}

  void OnPlan(int layer, BlockKind block, const RoutingPlan& plan) override {
    const LayerSpec& l = spec_.layers[layer];
    for (int e = 0; e < plan.num_experts; ++e) {
      if (plan.expert_offsets[e] == plan.expert_offsets[e + 1]) continue;
      ++experts;
      if (block == BlockKind::kAttention) {
        weights += int64_t{2} * l.attention.num_kv_heads * l.attention.head_dim * spec_.hidden_size;
      } else {
        const FeedForwardSpec& f = l.feed_forward;
        const int matrices = f.expert.form == ExpertForm::kGated ? 3 : 2;
        weights +=
            int64_t{matrices} * f.routing->widths[e] * (spec_.hidden_size / f.routing->split.heads);
      }
    }
  }

  int64_t experts = 0;
  int64_t weights = 0;  // parameters of their matrices

 private:
  const ModelSpec& spec_;
};

int64_t CacheBytesPerToken(const ModelSpec& spec, int64_t element) {
  int64_t bytes = 0;
  for (const LayerSpec& l : spec.layers) {
    bytes += 2 * int64_t{l.attention.num_kv_heads} * l.attention.head_dim * element;
  }
  return bytes;
}

struct CaseResult {
  std::string name;
  double tokens_per_second = 0;
  double bytes_per_step = 0;
  double distinct_experts = 0;  // per routed block and step
  double bound = 0;             // tokens per second at the measured bandwidth; 0: not a decode case
};

class Bench {
 public:
  Bench(const Options& options, Model& model, KvCacheStorage& cache, int sequences, int length)
      : options_(options), model_(model), cache_(cache) {
    const int64_t blocks = BlocksFor(length);
    for (int s = 0; s < sequences; ++s) {
      tables_.emplace_back();
      for (int64_t b = 0; b < blocks; ++b) {
        tables_.back().push_back(static_cast<int32_t>(s * blocks + b));
      }
    }
  }

  CaseResult Prompt(int tokens) {
    CaseResult result;
    result.name = "prompt " + std::to_string(tokens);
    std::vector<double> seconds;
    for (int round = 0; round <= options_.rounds; ++round) {
      const auto start = Clock::now();
      for (int at = 0; at < tokens; at += options_.chunk) {
        Step(1, at, std::min(options_.chunk, tokens - at), nullptr);
      }
      if (round > 0) seconds.push_back(Seconds(start));  // the first one warms up
    }
    result.tokens_per_second = tokens / Median(seconds);
    return result;
  }

  CaseResult Decode(int batch) {
    CaseResult result;
    result.name = "decode " + std::to_string(batch);
    TouchedExperts touched(model_.spec());
    std::vector<double> seconds;
    for (int round = 0; round <= options_.rounds; ++round) {
      const int piece = std::max(1, kContextRows / batch);
      for (int at = 0; at < options_.context; at += piece) {
        Step(batch, at, std::min(piece, options_.context - at), nullptr);
      }
      const auto start = Clock::now();
      for (int i = 0; i < options_.tokens; ++i) {
        // Where plans have to be fetched from a device, counting takes time: the first round, which
        // warms up, counts for all.
        Step(batch, options_.context + i, 1, round == 0 ? &touched : nullptr);
      }
      if (round > 0) seconds.push_back(Seconds(start));
    }
    const double steps = options_.tokens;
    const int64_t size = model_.options().compute == DType::kBF16 ? 2 : 4;
    const double context = options_.context + 0.5 * (options_.tokens + 1);
    result.bytes_per_step =
        static_cast<double>(FixedWeightBytes(model_.spec(), model_.options().compute)) +
        static_cast<double>(touched.weights * size) / steps +
        context * batch *
            static_cast<double>(CacheBytesPerToken(model_.spec(), ElementBytes(cache_.type())));
    int blocks = 0;
    for (const LayerSpec& l : model_.spec().layers) {
      blocks += l.attention.routed() + l.feed_forward.routed();
    }
    if (blocks > 0) {
      result.distinct_experts = static_cast<double>(touched.experts) / steps / blocks;
    }
    result.tokens_per_second = static_cast<double>(options_.tokens) * batch / Median(seconds);
    return result;
  }

 private:
  static double Median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }

  // `count` random tokens of each of `sequences` sequences from position `begin` on; logits of
  // every sequence's last one.
  void Step(int sequences, int begin, int count, StepHooks* hooks) {
    Batch batch;
    for (int s = 0; s < sequences; ++s) {
      batch.block_tables.emplace_back(tables_[s]);
      for (int i = 0; i < count; ++i) {
        random_ ^= random_ << 13;
        random_ ^= random_ >> 7;
        random_ ^= random_ << 17;
        batch.tokens.push_back(
            static_cast<int32_t>(random_ % static_cast<uint64_t>(model_.spec().vocab_size)));
        batch.positions.push_back(begin + i);
        batch.sequence.push_back(s);
        batch.phase.push_back(Phase::kDecode);
      }
      batch.logit_rows.push_back(batch.num_tokens() - 1);
    }
    logits_.resize(batch.logit_rows.size() * static_cast<size_t>(model_.spec().vocab_size));
    model_.Forward(batch, cache_, hooks, logits_);
  }

  const Options& options_;
  Model& model_;
  KvCacheStorage& cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<float> logits_;
  uint64_t random_ = 88172645463325252ULL;
};

absl::Status WriteJson(const std::string& path, const std::string& model, double bandwidth,
                       const std::vector<CaseResult>& results) {
  nlohmann::json cases = nlohmann::json::array();
  for (const CaseResult& r : results) {
    nlohmann::json c = {{"name", r.name}, {"tokens_per_second", r.tokens_per_second}};
    if (r.bound > 0) {
      c["bound_tokens_per_second"] = r.bound;
      c["share"] = r.tokens_per_second / r.bound;
      c["bytes_per_step"] = r.bytes_per_step;
      c["distinct_experts"] = r.distinct_experts;
    }
    cases.push_back(std::move(c));
  }
  std::ofstream file(path);
  file << nlohmann::json{{"model", model}, {"read_bandwidth", bandwidth}, {"cases", cases}}.dump(2)
       << "\n";
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path);
}

absl::Status Run(const Options& options) {
  if (options.synthetic.empty() && options.model.directory.empty()) {
    return absl::InvalidArgumentError("bench: expected --model or --synthetic, found neither");
  }
  MOESERVE_ASSIGN_OR_RETURN(Loaded loaded, Open(options));
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                            CreateBackend({.device = options.model.device,
                                           .threads = options.model.threads,
                                           .cpu_isa = options.model.cpu_isa}));
  // Twice, before and after: a machine's speed can drift in between.
  MOESERVE_ASSIGN_OR_RETURN(double bandwidth,
                            backend->MeasureReadBandwidth(kProbeBytes, kProbeRounds));
  MOESERVE_ASSIGN_OR_RETURN(const DType compute,
                            ResolveDType(options.model.dtype, loaded.weights->DominantDType()));
  const auto start = Clock::now();
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<Model> model,
      Model::Create(loaded.spec, {.compute = compute}, *loaded.weights, *backend));
  std::printf("%s, %s, %s, weights %.2f GB, loaded in %.1f s\n", loaded.name.c_str(),
              std::string(Name(compute)).c_str(), std::string(backend->description()).c_str(),
              static_cast<double>(model->weight_bytes()) / 1e9, Seconds(start));
  MOESERVE_ASSIGN_OR_RETURN(const KvCacheType cache_type,
                            ResolveKvCacheType(options.model.kv_cache_dtype, compute));
  const int sequences = *std::max_element(options.batches.begin(), options.batches.end());
  const int length = std::max(options.prompt, options.context + options.tokens);
  if (length > loaded.spec.max_position_embeddings) {
    return absl::InvalidArgumentError("bench: longer than max_position_embeddings");
  }
  std::vector<KvLayerShape> shapes;
  for (const LayerSpec& l : loaded.spec.layers) {
    shapes.push_back({l.attention.num_kv_heads, l.attention.head_dim});
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<KvCacheStorage> cache,
                            backend->NewKvCache(shapes, cache_type, sequences * BlocksFor(length)));
  Bench bench(options, *model, *cache, sequences, length);
  std::vector<CaseResult> results;
  if (options.prompt > 0) results.push_back(bench.Prompt(options.prompt));
  for (int batch : options.batches) results.push_back(bench.Decode(batch));
  MOESERVE_ASSIGN_OR_RETURN(double again, backend->MeasureReadBandwidth(kProbeBytes, kProbeRounds));
  std::printf("read bandwidth %.1f GB/s before, %.1f GB/s after (2 GiB, best of 5)\n",
              bandwidth / 1e9, again / 1e9);
  bandwidth = std::max(bandwidth, again);

  std::printf("%-14s %12s %12s %12s %10s %8s\n", "case", "tokens/s", "MB/step", "experts/blk",
              "bound", "share");
  for (CaseResult& r : results) {
    if (r.bytes_per_step == 0) {
      std::printf("%-14s %12.1f\n", r.name.c_str(), r.tokens_per_second);
      continue;
    }
    const double batch = std::stod(r.name.substr(7));
    r.bound = batch * bandwidth / r.bytes_per_step;
    std::printf("%-14s %12.1f %12.1f %12.1f %10.1f %7.1f%%\n", r.name.c_str(), r.tokens_per_second,
                r.bytes_per_step / 1e6, r.distinct_experts, r.bound,
                100.0 * r.tokens_per_second / r.bound);
  }
  if (options.json.empty()) return absl::OkStatus();
  return WriteJson(options.json, loaded.name, bandwidth, results);
}

}  // namespace

void AddBenchCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("bench", "Measure speed as a share of the memory's bandwidth");
  auto options = std::make_shared<Options>();
  CLI::Option* model =
      command->add_option("--model", options->model.directory, "Checkpoint folder");
  command->add_option("--synthetic", options->synthetic, "Random weights of this shape instead")
      ->check(CLI::IsMember({"small", "medium", "mixtral"}))
      ->excludes(model);
  AddComputeOptions(*command, options->model);
  command->add_option("--batch", options->batches, "Sequences that decode together; a list")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--prompt", options->prompt, "Tokens of a prompt case; 0: none")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--chunk", options->chunk, "Tokens of the prompt that are computed together")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Decode steps of a case")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--context", options->context, "Tokens in the cache before decoding")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Repetitions; the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--json", options->json, "File for the results");
  AddBenchLoadCommand(*command, selected);
  command->callback([options, command, &selected] {
    // A command of its own has been chosen.
    if (!command->get_subcommands().empty()) return;
    selected = [options] {
      const absl::Status status = Run(*options);
      return status.ok() ? 0 : Fail(status);
    };
  });
}

}  // namespace moeserve::server
