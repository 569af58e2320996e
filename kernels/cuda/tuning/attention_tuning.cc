#include "kernels/cuda/tuning/attention_tuning.h"

#include <memory>
#include <numeric>
#include <optional>

#include "base/error_text.h"
#include "kernels/cuda/tuning/graph_device.h"

namespace moeserve::cuda {
namespace {

// Prompts of fewer tokens take as long as their launch, whatever the kernel.
constexpr int kFewestTokens = 16;

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

// A prompt of the recorded launch's tokens, and its keys and values.
class AttentionTuning::Operands {
 public:
  static Result<Operands> Create(const AttentionLaunch& recorded, cudaStream_t stream) {
    Operands o;
    AttentionLaunch& a = o.launch_;
    a = recorded;
    const int tokens = recorded.step.tokens;
    const int per_token = recorded.rows.max_per_token;
    const int64_t rows = int64_t{tokens} * per_token;
    const int pages = (tokens + kPageTokens - 1) / kPageTokens;
    const auto cache_bytes = static_cast<size_t>(pages * a.cache.block_stride) * sizeof(Bf16);
    for (void** part : {&a.cache.keys, &a.cache.values}) {
      MOESERVE_ASSIGN_OR_RETURN(*part, o.Add(DeviceMemory::Allocate(cache_bytes), stream));
    }
    const auto query_bytes = static_cast<size_t>(rows * a.query_stride) * sizeof(float);
    MOESERVE_ASSIGN_OR_RETURN(void* const query,
                              o.Add(DeviceMemory::Allocate(query_bytes), stream));
    a.query = static_cast<const float*>(query);
    const auto output_bytes = static_cast<size_t>(rows * a.output_stride) * sizeof(Bf16);
    MOESERVE_ASSIGN_OR_RETURN(o.output_, DeviceMemory::Allocate((output_bytes + 3) / 4 * 4));
    a.output = o.output_.data();
    // One row of page tables. Its last element becomes the length.
    a.step = {.tokens = tokens, .table_stride = pages + 1, .max_context = tokens};
    MOESERVE_ASSIGN_OR_RETURN(a.step.position, o.AddNumbers(Ascending(tokens), stream));
    MOESERVE_ASSIGN_OR_RETURN(
        a.step.sequence, o.AddNumbers(std::vector<int32_t>(static_cast<size_t>(tokens)), stream));
    MOESERVE_ASSIGN_OR_RETURN(a.step.page_tables, o.AddNumbers(Ascending(pages + 1), stream));
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
    a.tiled_from = 0;
    a.work = {};
    return o;
  }

  // Returns the launch with its first `tokens` tokens, a prompt of that length.
  Result<AttentionLaunch> WithTokens(int tokens, cudaStream_t stream) {
    AttentionLaunch a = launch_;
    a.step.tokens = a.step.max_context = tokens;
    const int32_t length = tokens;
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(const_cast<int32_t*>(a.step.lengths), &length,
                                                  sizeof(length), cudaMemcpyHostToDevice, stream));
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    return a;
  }

  const DeviceMemory& output() const { return output_; }

 private:
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
          .bias = launch.bias != nullptr};
}

int AttentionTuning::SiteOf(const SiteKey& key) {
  const auto [at, added] = sites_.try_emplace(key, -1);
  if (added) {
    at->second = choices_->Site(
        Concat("attention ", key.heads, " heads ", key.kv_heads, " x ", key.head_dim, " to ",
               key.value_dim, ", rows ", key.rows, " of ", key.rows_by_shape, ", window ",
               key.window, key.chunks ? " chunks" : "", key.causal ? "" : " both ways",
               key.cap ? " capped" : "", key.sinks ? " sinks" : "", key.bias ? " biased" : ""),
        {std::begin(kAttentionTilesNames), std::end(kAttentionTilesNames)});
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

Status AttentionTuning::MeasureLaunch(const AttentionLaunch& recorded,
                                      const ProductTuningSettings& settings,
                                      const TuneDeviceFactory& devices, cudaStream_t stream) {
  const int site = SiteOf(KeyOf(recorded));
  std::optional<Operands> operands;
  std::unique_ptr<TuneDevice> device;
  for (const int64_t tokens : NumbersOfRows(recorded.step.tokens, settings.rows_factor)) {
    if (tokens < kFewestTokens || choices_->Has(site, tokens)) continue;
    if (std::chrono::steady_clock::now() - begin_ > settings.limit) {
      ++left_out_;
      continue;
    }
    if (device == nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(operands, Operands::Create(recorded, stream));
      device = devices(stream, operands->output().data(), operands->output().bytes());
    }
    MOESERVE_ASSIGN_OR_RETURN(const AttentionLaunch launch,
                              operands->WithTokens(static_cast<int>(tokens), stream));
    const std::span<const AttentionTiles> tiles = AttentionTilesThatFit(launch);
    TuneCase tune_case{.name = Concat("attention of ", tokens, " tokens"), .candidates = {}};
    for (const AttentionTiles kernel : tiles) {
      tune_case.candidates.push_back(
          {.name = std::string(kAttentionTilesNames[static_cast<int>(kernel)]),
           .enqueue = [launch, kernel, stream](int) {
             AttentionLaunch own = launch;
             own.tiles = kernel;
             LaunchAttention(own, stream);
           }});
    }
    MOESERVE_ASSIGN_OR_RETURN(const TuneResult result, Tune(tune_case, *device));
    choices_->Choose(site, tokens, static_cast<int>(tiles[static_cast<size_t>(result.chosen)]));
    ++measured_;
    for (const std::string& name : result.different) {
      messages_.push_back(Concat(tune_case.name, ": the kernel ", name,
                                 " computes other bits on this device and is not used"));
    }
  }
  return absl::OkStatus();
}

Result<std::vector<std::string>> AttentionTuning::Measure(const ProductTuningSettings& settings,
                                                          const TuneDeviceFactory& devices,
                                                          cudaStream_t stream) {
  records_ = false;
  measured_ = left_out_ = 0;
  messages_.clear();
  begin_ = std::chrono::steady_clock::now();
  Status status;
  for (const auto& [key, launch] : recorded_) {
    status.Update(MeasureLaunch(launch, settings, devices, stream));
    if (!status.ok()) break;
  }
  recorded_.clear();
  if (absl::IsResourceExhausted(status)) {
    messages_.push_back(Concat("attention was not measured for all numbers of tokens: ",
                               std::string(status.message())));
    status = absl::OkStatus();
  }
  MOESERVE_RETURN_IF_ERROR(status);
  return std::move(messages_);
}

}  // namespace moeserve::cuda
