#include "kernels/cuda/tuning/attention_tuning.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>

#include "base/error_text.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/tuning/graph_device.h"

namespace moeserve::cuda {
namespace {

// Prompts of fewer tokens take as long as their launch, whatever the kernel.
constexpr int kFewestTokens = 16;
// Single tokens are measured up to this number, with contexts up to each of these bounds. Beyond
// the largest ones, the kernels are limited by memory in the same way.
constexpr int kMostSingles = 256;
constexpr int kContexts[] = {1024, 4096, 16384, 65536};
// The most bytes of the keys, or the values, of single tokens; more of them share pages. That is
// far more than the caches of a device.
constexpr int64_t kMostCacheBytes = int64_t{256} << 20;

// Returns the bound of kContexts that a launch with contexts of up to `context` tokens uses.
int ContextBound(int context) {
  for (const int bound : kContexts) {
    if (context <= bound) return bound;
  }
  return *std::rbegin(kContexts);
}

Result<DeviceMemory> Upload(const std::vector<int32_t>& values, cudaStream_t stream) {
  const size_t bytes = values.size() * sizeof(int32_t);
  MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(bytes));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(memory.data(), values.data(), bytes, cudaMemcpyHostToDevice, stream));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  return memory;
}

std::vector<int32_t> Ascending(int count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

}  // namespace

// Tokens of a launch like the recorded one, with keys and values: a prompt, or single tokens of
// sequences of their own.
class AttentionTuning::Operands {
 public:
  static Result<Operands> CreatePrompt(const AttentionLaunch& recorded, cudaStream_t stream) {
    const int tokens = recorded.step.tokens;
    MOESERVE_ASSIGN_OR_RETURN(Operands o, Create(recorded, tokens, 1, tokens, stream));
    o.launch_.tiled_from = 0;
    o.launch_.tile_sums = nullptr;
    if (const int64_t bytes = TileSumsBytes(o.launch_); bytes > 0) {
      MOESERVE_ASSIGN_OR_RETURN(void* const sums,
                                o.Add(DeviceMemory::Allocate(static_cast<size_t>(bytes)), stream));
      o.launch_.tile_sums = static_cast<float*>(sums);
    }
    return o;
  }
  static Result<Operands> CreateSingles(const AttentionLaunch& recorded, int tokens, int context,
                                        cudaStream_t stream) {
    MOESERVE_ASSIGN_OR_RETURN(Operands o, Create(recorded, tokens, tokens, context, stream));
    AttentionLaunch& a = o.launch_;
    const int heads = a.heads * a.rows.max_per_token;
    const int64_t floats = PartialFloats(heads, a.cache.widest_dim());
    a.tiled_from = tokens;
    const int64_t most = int64_t{tokens} * MaxSplits(context, a.seen, SplitTokensOf(a));
    const int slots = static_cast<int>(std::min<int64_t>(AttentionSlots(floats), most));
    const auto bytes = static_cast<size_t>(AttentionWorkBytes(tokens, slots, floats));
    MOESERVE_ASSIGN_OR_RETURN(void* const work, o.Add(DeviceMemory::Allocate(bytes), stream));
    a.work = LayOutAttentionWork(work, tokens, slots);
    return o;
  }

  // Returns the launch with its first `tokens` tokens, a prompt of that length.
  Result<AttentionLaunch> Prompt(int tokens, cudaStream_t stream) {
    AttentionLaunch a = launch_;
    a.step.tokens = a.step.max_context = tokens;
    MOESERVE_RETURN_IF_ERROR(Write({tokens}, a.step.lengths, stream));
    return a;
  }
  // Returns the launch with its first `tokens` tokens, all of them single; their splits are known.
  Result<AttentionLaunch> Singles(int tokens, cudaStream_t stream) {
    AttentionLaunch a = launch_;
    a.step.tokens = a.tiled_from = tokens;
    LaunchAttentionWork(a.step, tokens, a.seen, SplitTokensOf(a), a.work, stream);
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    return a;
  }

  const DeviceMemory& output() const { return output_; }

 private:
  // Makes `tokens` tokens of `sequences` sequences, each of at most `context` tokens. With several
  // sequences, each token is the last one of its own.
  static Result<Operands> Create(const AttentionLaunch& recorded, int tokens, int sequences,
                                 int context, cudaStream_t stream) {
    Operands o;
    AttentionLaunch& a = o.launch_;
    a = recorded;
    const int per_token = recorded.rows.max_per_token;
    const int64_t rows = int64_t{tokens} * per_token;
    const int pages = (context + kPageTokens - 1) / kPageTokens;
    const int64_t page_bytes = a.cache.block_stride * ElementBytes(a.cache.type);
    const int64_t stored = std::max<int64_t>(
        pages, std::min<int64_t>(int64_t{sequences} * pages,
                                 kMostCacheBytes / std::max<int64_t>(1, page_bytes)));
    for (void** part : {&a.cache.keys, &a.cache.values}) {
      MOESERVE_ASSIGN_OR_RETURN(
          *part, o.Add(DeviceMemory::Allocate(static_cast<size_t>(stored * page_bytes)), stream));
    }
    const auto query_bytes = static_cast<size_t>(rows * a.query_stride) * sizeof(float);
    MOESERVE_ASSIGN_OR_RETURN(void* const query,
                              o.Add(DeviceMemory::Allocate(query_bytes), stream));
    a.query = static_cast<const float*>(query);
    const auto output_bytes = static_cast<size_t>(rows * a.output_stride) * sizeof(Bf16);
    MOESERVE_ASSIGN_OR_RETURN(o.output_, DeviceMemory::Allocate((output_bytes + 3) / 4 * 4));
    a.output = o.output_.data();
    // The last element of a page table is the length.
    a.step = {.tokens = tokens, .table_stride = pages + 1, .max_context = context};
    std::vector<int32_t> tables, positions = Ascending(tokens), owners(positions.size());
    for (int s = 0; s < sequences; ++s) {
      for (int64_t i = 0; i < pages; ++i) {
        tables.push_back(static_cast<int32_t>((int64_t{s} * pages + i) % stored));
      }
      tables.push_back(context);
    }
    if (sequences > 1 || tokens == 1) {
      owners = Ascending(tokens);
      std::fill(positions.begin(), positions.end(), context - 1);
    }
    MOESERVE_ASSIGN_OR_RETURN(a.step.position, o.AddNumbers(positions, stream));
    MOESERVE_ASSIGN_OR_RETURN(a.step.sequence, o.AddNumbers(owners, stream));
    MOESERVE_ASSIGN_OR_RETURN(a.step.page_tables, o.AddNumbers(tables, stream));
    a.step.lengths = a.step.page_tables + pages;
    if (recorded.rows.row_offsets != nullptr) {
      std::vector<int32_t> offsets = Ascending(tokens + 1), tokens_of_rows;
      for (int32_t& offset : offsets) offset *= per_token;
      for (int64_t r = 0; r < rows; ++r) {
        tokens_of_rows.push_back(static_cast<int32_t>(r / per_token));
      }
      MOESERVE_ASSIGN_OR_RETURN(a.rows.row_offsets, o.AddNumbers(offsets, stream));
      MOESERVE_ASSIGN_OR_RETURN(a.rows.assignments_of_row,
                                o.AddNumbers(Ascending(static_cast<int>(rows)), stream));
      MOESERVE_ASSIGN_OR_RETURN(a.rows.row_of_assignment, o.AddNumbers(tokens_of_rows, stream));
    }
    a.work = {};
    return o;
  }

  static Status Write(const std::vector<int32_t>& values, const int32_t* to, cudaStream_t stream) {
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(const_cast<int32_t*>(to), values.data(),
                                                  values.size() * sizeof(int32_t),
                                                  cudaMemcpyHostToDevice, stream));
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    return absl::OkStatus();
  }
  // Keeps the memory, filled with numbers, and returns its address.
  Result<void*> Add(Result<DeviceMemory> memory, cudaStream_t stream) {
    MOESERVE_RETURN_IF_ERROR(memory.status());
    MOESERVE_RETURN_IF_ERROR(FillWithNumbers(*memory, stream));
    memory_.push_back(std::move(*memory));
    return memory_.back().data();
  }
  Result<const int32_t*> AddNumbers(const std::vector<int32_t>& values, cudaStream_t stream) {
    MOESERVE_ASSIGN_OR_RETURN(DeviceMemory memory, Upload(values, stream));
    memory_.push_back(std::move(memory));
    return memory_.back().as<int32_t>();
  }

  AttentionLaunch launch_;
  std::vector<DeviceMemory> memory_;
  DeviceMemory output_;
};

std::string AttentionTuning::Describe(const SiteKey& key) {
  return Concat(key.heads, " heads ", key.kv_heads, " x ", key.head_dim, " to ", key.value_dim,
                ", rows ", key.rows, " of ", key.rows_by_shape, ", window ", key.window,
                key.chunks ? " chunks" : "", key.causal ? "" : " both ways",
                key.cap ? " capped" : "", key.sinks ? " sinks" : "", key.bias ? " biased" : "",
                key.int8 ? " int8" : "", key.latent ? " latent" : "");
}

AttentionTuning::SiteKey AttentionTuning::KeyOf(const AttentionLaunch& launch) {
  return {.heads = launch.heads,
          .kv_heads = launch.cache.num_kv_heads,
          .head_dim = launch.cache.head_dim,
          .value_dim = launch.cache.value_dim(),
          .rows = launch.rows.max_per_token,
          .rows_by_shape = launch.rows.by_shape,
          .window = launch.seen.window,
          .chunks = launch.seen.chunks,
          .causal = launch.seen.causal,
          .cap = launch.soft_cap > 0.0f,
          .sinks = launch.sinks != nullptr,
          .bias = launch.bias != nullptr,
          .int8 = launch.cache.type == KvCacheType::kInt8,
          .latent = launch.cache.latent_dim > 0};
}

int AttentionTuning::SiteOf(const SiteKey& key) {
  const auto [at, added] = sites_.try_emplace(key, -1);
  if (added) {
    at->second = choices_->Site(Concat("attention ", Describe(key)),
                                {std::begin(kAttentionTilesNames), std::end(kAttentionTilesNames)});
  }
  return at->second;
}

int AttentionTuning::SinglesSiteOf(const SinglesKey& key) {
  const auto [at, added] = singles_sites_.try_emplace(key, -1);
  if (added) {
    at->second = choices_->Site(
        Concat("attention of single tokens ", Describe(key.key), ", contexts to ", key.context),
        {std::begin(kAttentionSplitsNames), std::end(kAttentionSplitsNames)});
  }
  return at->second;
}

AttentionTiles AttentionTuning::Tiles(const AttentionLaunch& launch) {
  if (AttentionTilesThatFit(launch).size() < 2) return AttentionTiles::kAuto;
  const SiteKey key = KeyOf(launch);
  const int site = SiteOf(key);
  if (records_) {
    const auto [at, added] = recorded_.try_emplace(key, launch);
    if (launch.step.tokens > at->second.step.tokens) at->second = launch;
  }
  const int tokens = launch.step.tokens - launch.tiled_from;
  if (tokens == 0) return AttentionTiles::kAuto;
  const std::optional<int> chosen = choices_->Find(site, tokens);
  return chosen ? static_cast<AttentionTiles>(*chosen) : AttentionTiles::kAuto;
}

AttentionSplits AttentionTuning::Splits(const AttentionLaunch& launch) {
  if (!launch.seen.causal || !CanUseSplits(launch, AttentionSplits::kCluster8)) {
    return AttentionSplits::kAuto;
  }
  const SiteKey key = KeyOf(launch);
  if (records_) {
    const auto [at, added] = recorded_singles_.try_emplace(key, launch);
    if (launch.step.tokens > at->second.step.tokens) at->second = launch;
  }
  if (launch.tiled_from == 0) return AttentionSplits::kAuto;
  const int site = SinglesSiteOf({key, ContextBound(launch.step.max_context)});
  const std::optional<int> chosen = choices_->Find(site, launch.tiled_from);
  return chosen ? static_cast<AttentionSplits>(*chosen) : AttentionSplits::kAuto;
}

Status AttentionTuning::MeasureTiles(const AttentionLaunch& recorded,
                                     const TuningSettings& settings,
                                     const TuneDeviceFactory& devices, cudaStream_t stream) {
  const int site = SiteOf(KeyOf(recorded));
  std::optional<Operands> operands;
  std::unique_ptr<TuneDevice> device;
  for (const int64_t tokens : NumbersOfRows(recorded.step.tokens, settings.rows_factor)) {
    if (tokens < kFewestTokens || !IsWanted(site, tokens, settings)) continue;
    if (device == nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(operands, Operands::CreatePrompt(recorded, stream));
      device = devices(stream, operands->output().data(), operands->output().bytes());
    }
    MOESERVE_ASSIGN_OR_RETURN(const AttentionLaunch launch,
                              operands->Prompt(static_cast<int>(tokens), stream));
    TuneCase tune_case{.name = Concat("attention of ", tokens, " tokens"), .candidates = {}};
    std::vector<int> ids;
    for (const AttentionTiles kernel : AttentionTilesThatFit(launch)) {
      ids.push_back(static_cast<int>(kernel));
      tune_case.candidates.push_back({.name = std::string(kAttentionTilesNames[ids.back()]),
                                      .enqueue = [launch, kernel, stream](int) {
                                        AttentionLaunch own = launch;
                                        own.tiles = kernel;
                                        LaunchAttention(own, stream);
                                      }});
    }
    MOESERVE_RETURN_IF_ERROR(MeasureCase(site, tokens, tune_case, ids, *device));
  }
  return absl::OkStatus();
}

Status AttentionTuning::MeasureSingles(const AttentionLaunch& recorded,
                                       const TuningSettings& settings,
                                       const TuneDeviceFactory& devices, cudaStream_t stream) {
  const int most = std::min(recorded.step.tokens, kMostSingles);
  for (const int bound : kContexts) {
    const int context = std::min(bound, recorded.step.max_context);
    // With one split per token, there is nothing to merge.
    const bool splits = MaxSplits(context, recorded.seen, SplitTokensOf(recorded)) > 1;
    const int site = SinglesSiteOf({KeyOf(recorded), bound});
    std::optional<Operands> operands;
    std::unique_ptr<TuneDevice> device;
    for (const int64_t tokens : NumbersOfRows(most, settings.rows_factor)) {
      if (!splits || !IsWanted(site, tokens, settings)) continue;
      if (device == nullptr) {
        MOESERVE_ASSIGN_OR_RETURN(operands,
                                  Operands::CreateSingles(recorded, most, context, stream));
        device = devices(stream, operands->output().data(), operands->output().bytes());
      }
      MOESERVE_ASSIGN_OR_RETURN(const AttentionLaunch launch,
                                operands->Singles(static_cast<int>(tokens), stream));
      TuneCase tune_case{
          .name = Concat("attention of ", tokens, " single tokens, contexts of ", context),
          .candidates = {}};
      std::vector<int> ids;
      for (const AttentionSplits kernel :
           {AttentionSplits::kMerged, AttentionSplits::kCluster4, AttentionSplits::kCluster8,
            AttentionSplits::kCluster16}) {
        if (!CanUseSplits(launch, kernel)) continue;
        ids.push_back(static_cast<int>(kernel));
        tune_case.candidates.push_back({.name = std::string(kAttentionSplitsNames[ids.back()]),
                                        .enqueue = [launch, kernel, stream](int) {
                                          AttentionLaunch own = launch;
                                          own.splits = kernel;
                                          LaunchAttention(own, stream);
                                        }});
      }
      MOESERVE_RETURN_IF_ERROR(MeasureCase(site, tokens, tune_case, ids, *device));
    }
    if (context < bound) break;
  }
  return absl::OkStatus();
}

Status AttentionTuning::MeasureRecorded(const TuningSettings& settings,
                                        const TuneDeviceFactory& devices, cudaStream_t stream) {
  for (const auto& [key, launch] : recorded_) {
    MOESERVE_RETURN_IF_ERROR(MeasureTiles(launch, settings, devices, stream));
  }
  for (const auto& [key, launch] : recorded_singles_) {
    MOESERVE_RETURN_IF_ERROR(MeasureSingles(launch, settings, devices, stream));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
