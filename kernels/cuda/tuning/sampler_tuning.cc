#include "kernels/cuda/tuning/sampler_tuning.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "kernels/base/sampling.h"
#include "kernels/cuda/tuning/graph_device.h"

namespace moeserve::cuda {
namespace {

// The candidate i is kBlockCounts[i] blocks per row.
constexpr int kBlockCounts[] = {1, 4, 8, 16};
// More rows than these occupy the device in the same way.
constexpr int kMostSampledRows = 256;
// The most bytes of logits; more rows share them. That is far more than the caches of a device.
constexpr int64_t kMostLogitBytes = int64_t{128} << 20;

}  // namespace

int SamplerTuning::SiteOf(int vocabulary) {
  const auto [at, added] = sites_.try_emplace(vocabulary, -1);
  if (added) {
    Choices::Names names;
    for (const int blocks : kBlockCounts) names.push_back(Concat(blocks, " blocks"));
    at->second = choices_->Site(Concat("sampling from ", vocabulary, " tokens"), names);
  }
  return at->second;
}

int SamplerTuning::Blocks(const SampleLaunch& launch) {
  if (launch.count == 0) return 0;
  const int site = SiteOf(launch.vocabulary);
  if (records_) {
    int& most = recorded_[launch.vocabulary];
    most = std::max(most, launch.count);
  }
  const std::optional<int> chosen = choices_->Find(site, launch.count);
  return chosen ? kBlockCounts[*chosen] : 0;
}

Status SamplerTuning::MeasureVocabulary(int vocabulary, int most_rows,
                                        const TuningSettings& settings,
                                        const TuneDeviceFactory& devices, cudaStream_t stream) {
  const std::vector<int> counts = SampleBlockCounts(vocabulary);
  if (counts.size() < 2) return absl::OkStatus();
  const int site = SiteOf(vocabulary);
  const int most = std::min(most_rows, kMostSampledRows);
  DeviceMemory logits, rows, results;
  std::unique_ptr<TuneDevice> device;
  for (const int64_t count : NumbersOfRows(most, settings.rows_factor)) {
    if (!IsWanted(site, count, settings)) continue;
    if (device == nullptr) {
      const auto row_bytes = int64_t{vocabulary} * static_cast<int64_t>(sizeof(float));
      const int64_t stored = std::clamp<int64_t>(kMostLogitBytes / row_bytes, 1, most);
      MOESERVE_ASSIGN_OR_RETURN(logits,
                                DeviceMemory::Allocate(static_cast<size_t>(stored * row_bytes)));
      MOESERVE_RETURN_IF_ERROR(FillWithNumbers(logits, stream));
      std::vector<SampleRow> host(static_cast<size_t>(most));
      for (int i = 0; i < most; ++i) {
        host[static_cast<size_t>(i)] = {.scale = SamplingScale(0.1),  // of logits from -1 to 1
                                        .top_k = 0,
                                        .top_p = 0.95,
                                        .min_p = 0.0f,
                                        .row = static_cast<int32_t>(i % stored),
                                        .uniform = (i + 0.5) / most,
                                        .logprobs = -1,
                                        .drawable = 0};
      }
      const size_t bytes = host.size() * sizeof(SampleRow);
      MOESERVE_ASSIGN_OR_RETURN(rows, DeviceMemory::Allocate(bytes));
      MOESERVE_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(rows.data(), host.data(), bytes, cudaMemcpyHostToDevice, stream));
      MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
      MOESERVE_ASSIGN_OR_RETURN(results,
                                DeviceMemory::Allocate(host.size() * sizeof(SampleResult)));
      device = devices(stream, results.data(), results.bytes());
    }
    SampleLaunch launch{.rows = rows.as<SampleRow>(),
                        .results = results.as<SampleResult>(),
                        .count = static_cast<int>(count),
                        .logits = logits.as<float>(),
                        .stride = vocabulary,
                        .vocabulary = vocabulary};
    TuneCase tune_case{.name = Concat("sampling of ", count, " rows from ", vocabulary, " tokens"),
                       .candidates = {}};
    std::vector<int> ids, blocks = counts;
    // The default is the first one.
    std::iter_swap(blocks.begin(), std::find(blocks.begin(), blocks.end(),
                                             ChooseSampleBlocks(launch.count, vocabulary)));
    for (const int of_row : blocks) {
      const auto* const at = std::find(std::begin(kBlockCounts), std::end(kBlockCounts), of_row);
      ids.push_back(static_cast<int>(at - std::begin(kBlockCounts)));
      launch.blocks = of_row;
      tune_case.candidates.push_back(
          {.name = Concat(of_row, " blocks"),
           .enqueue = [launch, stream](int) { LaunchSample(launch, stream); }});
    }
    MOESERVE_RETURN_IF_ERROR(MeasureCase(site, count, tune_case, ids, *device));
  }
  return absl::OkStatus();
}

Status SamplerTuning::MeasureRecorded(const TuningSettings& settings,
                                      const TuneDeviceFactory& devices, cudaStream_t stream) {
  for (const auto& [vocabulary, most_rows] : recorded_) {
    MOESERVE_RETURN_IF_ERROR(MeasureVocabulary(vocabulary, most_rows, settings, devices, stream));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
