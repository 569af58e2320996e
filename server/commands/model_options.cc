#include "server/commands/model_options.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/control_group.h"
#include "base/error_text.h"
#include "base/kinds.h"
#include "engine/model/model.h"
#include "engine/validate_request.h"
#include "kernels/registry.h"
#include "server/base/text_values.h"
#include "server/commands/checked_options.h"
#include "server/logging/logging.h"
#include "server/process/packed_folder.h"

namespace moeserve::server {
namespace {

std::vector<std::string> DTypeNames() {
  std::vector<std::string> names = {"auto", "f32", "bf16"};
  for (std::string& name : KindNames(Quantization::kInt8)) names.push_back(std::move(name));
  return names;
}

// Files of `--packed-cache auto` that nobody has used for so long are removed.
constexpr std::chrono::hours kUnusedPacked{30 * 24};

// Returns the bytes of the disk that `--packed-cache auto` leaves free: a tenth of it, or 8 GiB.
uint64_t LeastFree(const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  return std::min(error ? 0 : space.capacity / 10, uint64_t{8} << 30);
}

}  // namespace

void AddIgnoreConfig(CLI::App& app, std::vector<std::string>& keys) {
  app.add_option("--ignore-config", keys,
                 "Key of config.json, or PATH.OF.KEYS, that is read as if it were not there, which "
                 "may change answers; can be repeated")
      ->allow_extra_args(false);
}

void AddModelDirectory(CLI::App& app, ModelOptionsText& options) {
  app.add_option(
         "-m,--model,MODEL", options.directory,
         "Checkpoint folder, also of Hugging Face's cache, or file (.gguf, model.safetensors)")
      ->required();
}

void AddModelOptions(CLI::App& app, ModelOptionsText& options) {
  AddModelDirectory(app, options);
  AddComputeOptions(app, options);
  AddQuietOption(app, options.quiet);
}

void AddQuietOption(CLI::App& app, bool& quiet) {
  app.add_flag("--quiet", quiet, "Do not report progress on standard error");
}

void AddDTypeOption(CLI::App& app, ModelOptionsText& options) {
  AddChoiceOption(app, "--dtype", options.dtype,
                  "Compute and weight type; auto: as stored; int8, int8-channel, int4, int4-k: "
                  "integer weights, bf16 activations",
                  DTypeNames());
}

void AddComputeOptions(CLI::App& app, ModelOptionsText& options) {
  AddChoiceOption(app, "--device", options.device, "Device that runs the model", {"cpu", "cuda"});
  AddDTypeOption(app, options);
  AddChoiceOption(
      app, "--kv-cache-dtype", options.kv_cache_dtype,
      "Type of the KV cache; auto: the compute type; int8: about half of bf16, but with "
      "--device cuda not for latent attention",
      {"auto", "f32", "bf16", "int8"});
  AddNumberOption(app, "--threads", options.threads,
                  "CPU threads; 0: one for each core that the process, or its container, may use",
                  0, 1024);
  AddChoiceOption(app, "--cpu-isa", options.cpu_isa, "Instruction set of the CPU backend",
                  {"auto", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_bf16",
                   "neon_i8mm", "neon_dot", "neon", "plain"});
  AddChoiceOption(
      app, "--cuda-dense", options.cuda_dense,
      "What computes the dense bf16 layers with --device cuda: this program's kernels, or "
      "NVIDIA's library cuBLASLt, which must be installed",
      {"own", "cublaslt"});
  AddChoiceOption(app, "--cuda-tune", options.cuda_tune,
                  "With --device cuda, which kernels are measured at the start, to choose among "
                  "those with equal results: none, for some seconds, or for up to a minute",
                  {"off", "quick", "full"});
  app.add_option("--cuda-tune-file", options.cuda_tune_file,
                 "File that keeps what --cuda-tune chose, for the next start, or a folder for such "
                 "files; auto: moeserve/kernels in the user's cache folder; off: none")
      ->envname("MOESERVE_CUDA_TUNE_FILE")
      ->capture_default_str();
  app.add_option("--packed-cache", options.packed_cache,
                 "Folder that keeps weights in the CPU backend's layout, for quicker starts, and "
                 "is created "
                 "if missing; auto: moeserve/packed in the user's cache folder, for models of 64 "
                 "MiB or more; "
                 "off: none")
      ->envname("MOESERVE_PACKED_CACHE")
      ->capture_default_str();
  app.add_option("--memory", options.memory,
                 "Memory for experts, such as 40GiB. CPU: for those in the files of "
                 "--packed-cache; default: the control group's limit or the memory of the machine, "
                 "less the other weights and the KV cache. CUDA: of the device, if not all experts "
                 "fit; the others lie in the memory of the machine; default: 0.9 of what is free, "
                 "less the other weights and --kv-cache-memory")
      ->envname("MOESERVE_MEMORY");
  app.add_option("--tier-policy", options.tier_policy,
                 "How experts beyond --memory are read: map: when a product touches them; ahead: "
                 "all that a block has chosen at once; auto: tries both and keeps the faster one")
      ->check(CLI::IsMember({"auto", "map", "ahead"}))
      ->envname("MOESERVE_TIER_POLICY")
      ->capture_default_str();
  AddNumberOption(app, "--read-ahead-mib", options.read_ahead_mib,
                  "With the policy ahead: MiB of the next block's experts that a block requests "
                  "because the step before has chosen them",
                  0, 1 << 20)
      ->envname("MOESERVE_READ_AHEAD_MIB");
  AddIgnoreConfig(app, options.ignored_keys);
}

BackendOptions ModelOptionsText::backend() const {
  BackendOptions backend{
      .device = device, .threads = threads, .cpu_isa = cpu_isa, .cuda_dense = cuda_dense};
  if (device != "cuda") return backend;
  backend.cuda_tune = cuda_tune;
  if (cuda_tune_file == "auto") {
    if (const auto folder = DefaultKernelFolder(); folder && cuda_tune != "off") {
      backend.cuda_tune_file = folder->string();
    }
  } else if (cuda_tune_file != "off") {
    backend.cuda_tune_file = cuda_tune_file;
  }
  return backend;
}

void AddPoolingOption(CLI::App& app, ModelOptionsText& options) {
  AddChoiceOption(app, "--pooling", options.pooling,
                  "How the rows of a text become its vector, whatever the model's files say",
                  KindNames(PoolingKind::kMean));
}

absl::Status ApplyPooling(const ModelOptionsText& options, ModelSpec& spec) {
  if (options.pooling.empty()) return absl::OkStatus();
  const auto kind = KindNamed<PoolingKind>(options.pooling);
  if (!kind) return absl::InvalidArgumentError(Concat("--pooling: unknown ", options.pooling));
  if (!spec.pooling.has_value()) spec.pooling.emplace();
  spec.pooling->kind = *kind;
  if (const absl::Status status = Validate(spec); !status.ok()) {
    return Prefixed("--pooling: ", status);
  }
  return absl::OkStatus();
}

absl::Status CheckGenerating(const ModelSpec& spec) {
  if (Computes(spec, nullptr)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("this command needs a model that generates text; the tasks of this model are ",
             TasksOf(spec), " (moeserve serve, embed, classify, score)"));
}

void AddDraftModel(CLI::App& app, ModelOptionsText& options) {
  app.add_option("--draft-model", options.draft_model,
                 "Smaller model with the same tokenizer that drafts tokens (--draft-tokens) where "
                 "earlier text gives none; it is loaded as --dtype says, for each model served; "
                 "CPU only");
  app.add_flag("--draft-mtp", options.draft_mtp,
               "Draft tokens by the checkpoint's own prediction layers (MTP), which are loaded for "
               "it; outputs do not change");
}

void AddEngineOptions(CLI::App& app, EngineOptionsText& options) {
  EngineOptions& engine = options.engine;
  AddNumberOption(app, "--max-model-len", engine.max_model_len, "Context length; 0: the model's", 0,
                  1 << 24);
  AddNumberOption(app, "--max-num-seqs", engine.max_num_seqs,
                  "Most sequences that run at the same time", 1, 1 << 16);
  AddNumberOption(app, "--max-step-tokens", engine.max_step_tokens,
                  "Most rows of one step; 0: the device's default", 0, 1 << 20);
  AddNumberOption(app, "--max-prompt-rows", engine.max_prompt_rows,
                  "Most prompt rows in a step that also decodes; 0: as many as make the step take "
                  "twice as long",
                  0, 1 << 20);
  AddNumberOption(
      app, "--draft-tokens", engine.draft.max_tokens,
      "Most tokens that are drafted for a sequence in a step, from what followed its last "
      "tokens before or by --draft-model or --draft-mtp; outputs do not change; 0: none; -1: the "
      "device's default",
      kDefaultDraftTokens, kMostDraftTokens);
  AddNumberOption(app, "--max-queue", engine.max_queued_seqs,
                  "Most sequences that wait in the queue", 1, 1 << 20);
  AddNumberOption(app, "--max-queued-tokens", engine.max_queued_tokens,
                  "Most prompt tokens that wait in the queue", int64_t{1}, int64_t{1} << 40);
  AddNumberOption(app, "--max-queue-wait", options.queue_wait_seconds,
                  "Seconds after which a waiting request is refused", 0.001, 86400.0);
  app.add_flag("!--no-prefix-cache", engine.prefix_cache,
               "Do not reuse cached prefixes: run every prompt in full");
  app.add_flag("!--no-window-pages", engine.window_pages,
               "Keep all positions in the KV cache of layers whose attention sees a window only: "
               "more memory, and prompts can continue any cached prefix");
  AddNumberOption(
      app, "--snapshots", engine.snapshots,
      "Most states of sequences that the prefix cache keeps, for models whose layers have "
      "states (convolutions, recurrences); -1: as many as --max-num-seqs",
      -1, kMostSnapshots);
  AddNumberOption(app, "--snapshot-interval", engine.snapshot_interval,
                  "Tokens between two such states in a long text, a multiple of 16", kPageTokens,
                  1 << 24);
  app.add_flag("!--no-expert-stats", engine.expert_stats,
               "Do not collect expert statistics; implies --moe-metrics off");
  app.add_option("--kv-cache-memory", options.kv_cache_memory,
                 "Size of the KV cache, such as 512MiB; default: computed from --max-num-seqs");
}

Result<EngineOptions> ResolveEngineOptions(const EngineOptionsText& options) {
  EngineOptions engine = options.engine;
  engine.max_queue_wait = absl::Seconds(options.queue_wait_seconds);
  if (!options.kv_cache_memory.empty()) {
    auto bytes = ParseBytes(options.kv_cache_memory);
    if (!bytes.ok()) return Prefixed("--kv-cache-memory: ", bytes.status());
    engine.kv_cache_bytes = *bytes;
  }
  return engine;
}

Result<std::unique_ptr<PackedCache>> OpenPackedCache(const ModelOptionsText& options,
                                                     const CheckpointIdentity& identity,
                                                     int64_t weight_bytes, Backend& backend,
                                                     ProgressOutput output) {
  PackedCacheOptions packed;
  packed.folder = options.packed_cache;
  if (options.packed_cache.empty() || options.packed_cache == "off") {
    return std::unique_ptr<PackedCache>();
  }
  if (options.packed_cache == "auto") {
    if (backend.packed_layout().empty() || weight_bytes < kLeastPackedBytes) {
      return std::unique_ptr<PackedCache>();
    }
    const auto folder = DefaultPackedFolder();
    if (!folder.has_value()) return std::unique_ptr<PackedCache>();
    packed.folder = *folder;
    PackedCache::RemoveUnused(*folder, kUnusedPacked);
    packed.defer = true;
    packed.least_free = LeastFree(*folder);
  }
  packed.place = identity.place;
  packed.state = identity.state;
  packed.warn = [output](const std::string& message) { PrintWarnings({message}, output); };
  auto cache = PackedCache::Open(std::move(packed), backend);
  if (!cache.ok()) return Prefixed("--packed-cache: ", cache.status());
  return cache;
}

Result<TierOptions> ResolveTiers(const ModelOptionsText& options, int64_t cache_bytes) {
  TierOptions tiers;
  if (options.tier_policy == "map") tiers.policy = TierPolicy::kMap;
  if (options.tier_policy == "ahead") tiers.policy = TierPolicy::kAhead;
  tiers.read_ahead = int64_t{options.read_ahead_mib} << 20;
  tiers.cache = cache_bytes;
  if (!options.memory.empty()) {
    auto bytes = ParseBytes(options.memory);
    if (!bytes.ok()) return Prefixed("--memory: ", bytes.status());
    tiers.memory = *bytes;
    return tiers;
  }
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const std::optional<uint64_t> group = ReadControlGroupLimits().memory_bytes;
  const int64_t usable =
      group.has_value() ? static_cast<int64_t>(std::min<uint64_t>(*group, INT64_MAX)) : machine;
  // A tenth is left for activations, requests and the system.
  tiers.total = std::max<int64_t>(std::min(machine, usable) / 10 * 9 - cache_bytes, 0);
  return tiers;
}

absl::Status CheckSyntheticOptions(const ModelOptionsText& options) {
  const std::string& cache = options.packed_cache;
  if (cache.empty() || cache == "off" || cache == "auto") return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--packed-cache: expected weights of a checkpoint, found synthetic ones");
}

Result<ModelOptions> ResolveDType(const ModelOptionsText& options, const WeightSource& source) {
  const std::string& text = options.dtype;
  if (text == "auto") {
    const Quantization stored = source.StoredQuantization();
    const bool bf16 = stored != Quantization::kNone || source.DominantDType() == DType::kBF16;
    // On other devices than the CPU, integers with several scales per row are widened to bf16:
    // whether products with them are faster has not been measured.
    const bool computed = options.device == "cpu" || QuantGroup(stored) == kWholeRow;
    return ModelOptions{.compute = bf16 ? DType::kBF16 : DType::kF32,
                        .quantization = computed ? stored : Quantization::kNone,
                        .keep_fp8 = true};
  }
  if (text == "f32") return ModelOptions{DType::kF32};
  if (text == "bf16") return ModelOptions{DType::kBF16};
  if (const auto type = KindNamed(text, Quantization::kInt8)) {
    return ModelOptions{DType::kBF16, *type};
  }
  return absl::InvalidArgumentError(Concat("unknown dtype ", Quoted(text)));
}

Result<KvCacheType> ResolveKvCacheType(const std::string& text, DType compute) {
  if (text == "auto") return KvCacheTypeOf(compute);
  for (const KvCacheType type : {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8}) {
    if (text == Name(type)) return type;
  }
  return absl::InvalidArgumentError(Concat("unknown KV cache dtype ", Quoted(text)));
}

void PrintNotes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::printf("note: %s\n", Printable(note, 2000).c_str());
}

void PrintWarnings(const std::vector<std::string>& warnings, ProgressOutput output) {
  for (const std::string& warning : warnings) {
    const std::string text = Printable(warning, 2000);
    if (output == ProgressOutput::kLog) {
      LogWarning("load", text);
    } else {
      std::fprintf(stderr, "warning: %s\n", text.c_str());
    }
  }
}

int Fail(const absl::Status& status) {
  const std::string message(status.message());
  std::fprintf(stderr, "error: %s\n", message.c_str());
  return 1;
}

}  // namespace moeserve::server
