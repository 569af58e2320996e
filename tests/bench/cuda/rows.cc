// Measures norms, sums of expert results, and sampling.

#include "kernels/cuda/rows/rows.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/sampling.h"
#include "kernels/cuda/rows/sampler.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

constexpr uint64_t kRowSeed = 515;

int SetsFor(const Bench& bench, double bytes) {
  if (bench.tiny()) return 2;
  return static_cast<int>(
      std::clamp(std::ceil(4.0 * static_cast<double>(bench.rates().l2_bytes) / bytes), 2.0, 64.0));
}

Result<Measured> NormCase(Bench& bench, int rows, int width) {
  Measured m;
  m.work.bytes = 6.0 * rows * width + 4.0 * width;  // f32 input, bf16 output
  m.work.written = 2.0 * rows * width;
  const int sets = SetsFor(bench, m.work.bytes);
  const int64_t count = int64_t{rows} * width;
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory input,
                            bench.Random(DType::kF32, sets * count, kRowSeed, 1.0f));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory output,
                            bench.Poisoned(static_cast<size_t>(sets * count) * 2));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory scales,
                            bench.Random(DType::kF32, width, kRowSeed + 1, 1.0f));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory groups,
                            bench.Upload(std::vector<int32_t>{0, width}));
  const auto enqueue = [&](int i) {
    cuda::LaunchNorm({.shape = {.layer = false, .eps = 1e-5f},
                      .scales = scales.as<float>(),
                      .group_begin = groups.as<int32_t>(),
                      .width = width,
                      .input = {input.as<float>() + i * count, DType::kF32, rows, width, width},
                      .output = {output.as<Bf16>() + i * count, DType::kBF16, rows, width, width}},
                     bench.stream());
  };
  for (int i = 0; i < sets; ++i) enqueue(i);
  const int64_t row = rows - 1;
  double squares = 0;
  std::vector<double> expected;
  for (int c = 0; c < width; ++c) {
    const double x = RandomElement(kRowSeed, row * width + c, 1.0f);
    squares += x * x;
    expected.push_back(x * RandomElement(kRowSeed + 1, c, 1.0f));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> actual,
                            bench.DownloadRow(output.data(), DType::kBF16, row * width, width));
  for (int c = 0; c < width; ++c) {
    MOESERVE_RETURN_IF_ERROR(CheckValue(actual[c], expected[c] / std::sqrt(squares / width + 1e-5),
                                        1.0, "normalised column " + std::to_string(c)));
  }
  MOESERVE_ASSIGN_OR_RETURN(m.timing, bench.Time(sets, enqueue));
  m.rotated_bytes = m.work.bytes * sets;
  return m;
}

// Measures the weighted sum of k expert results per row. The routing plan has k experts, and every
// row selects all of them.
Result<Measured> CombineCase(Bench& bench, int rows, int width, int k) {
  Measured m;
  m.work.bytes = 2.0 * rows * k * width + 4.0 * rows * width + 8.0 * rows * k;
  m.work.written = 4.0 * rows * width;
  const int sets = SetsFor(bench, m.work.bytes);
  const int64_t count = int64_t{rows} * k * width;
  std::vector<int32_t> row_offsets, assignments;
  std::vector<float> weights(static_cast<size_t>(rows) * k);
  for (int r = 0; r < rows; ++r) {
    row_offsets.push_back(r * k);
    for (int j = 0; j < k; ++j) {
      assignments.push_back(j * rows + r);
      weights[static_cast<size_t>(j) * rows + r] = 0.1f + 0.5f * static_cast<float>(j) / k;
    }
  }
  row_offsets.push_back(rows * k);
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory d_offsets, bench.Upload(row_offsets));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory d_assignments, bench.Upload(assignments));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory d_weights, bench.Upload(weights));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory results,
                            bench.Random(DType::kBF16, sets * count, kRowSeed + 2, 1.0f));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory output,
                            bench.Poisoned(static_cast<size_t>(rows) * width * 4));
  RoutingPlan plan;
  plan.rows = rows;
  plan.num_experts = k;
  plan.num_assignments = -1;
  plan.capacity = rows * k;
  plan.row_offsets = d_offsets.as<int32_t>();
  plan.assignments_of_row = d_assignments.as<int32_t>();
  plan.weight_of_assignment = d_weights.as<float>();
  const auto enqueue = [&](int i) {
    cuda::LaunchCombine(
        {.plan = &plan,
         .results = {results.as<Bf16>() + i * count, DType::kBF16, int64_t{rows} * k, width, width},
         .output = {output.data(), DType::kF32, rows, width, width}},
        bench.stream());
  };
  for (int i = 0; i < sets; ++i) enqueue(i);
  enqueue(0);
  const int64_t row = rows / 2;
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> actual,
                            bench.DownloadRow(output.data(), DType::kF32, row * width, width));
  for (int c = 0; c < width; ++c) {
    double expected = 0;
    for (int j = 0; j < k; ++j) {
      const int64_t a = int64_t{j} * rows + row;
      expected += static_cast<double>(weights[a]) *
                  RandomRounded(kRowSeed + 2, a * width + c, 1.0f, DType::kBF16);
    }
    MOESERVE_RETURN_IF_ERROR(
        CheckValue(actual[c], expected, 1.0, "combined column " + std::to_string(c)));
  }
  MOESERVE_ASSIGN_OR_RETURN(m.timing, bench.Time(sets, enqueue));
  m.rotated_bytes = m.work.bytes * sets;
  return m;
}

struct SampleKind {
  const char* name;
  double temperature;
  int top_k;
  double top_p;
  float min_p;
};

// `blocks`: of a row; ChooseSampleBlocks() if it is 0 or the device does not have such clusters.
Result<Measured> SampleCase(Bench& bench, int rows, int vocabulary, const SampleKind& kind,
                            int blocks = 0) {
  const std::vector<int> counts = cuda::SampleBlockCounts(vocabulary);
  if (std::find(counts.begin(), counts.end(), blocks) == counts.end()) blocks = 0;
  Measured m;
  m.work.bytes = 4.0 * rows * vocabulary;
  const int sets = SetsFor(bench, m.work.bytes);
  const int64_t count = int64_t{rows} * vocabulary;
  constexpr float kScale = 2.5f;
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory logits,
                            bench.Random(DType::kF32, sets * count, kRowSeed + 3, kScale));
  std::vector<SampleRow> settings;
  for (int r = 0; r < rows; ++r) {
    settings.push_back({SamplingScale(kind.temperature), kind.top_k, kind.top_p, kind.min_p, r,
                        (r + 0.5) / rows, -1, 0});
  }
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory device_rows, bench.Upload(settings));
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory results,
                            bench.Poisoned(static_cast<size_t>(rows) * sizeof(SampleResult)));
  const auto enqueue = [&](int i) {
    cuda::LaunchSample({.rows = device_rows.as<SampleRow>(),
                        .results = results.as<SampleResult>(),
                        .count = rows,
                        .logits = logits.as<float>() + i * count,
                        .stride = vocabulary,
                        .vocabulary = vocabulary,
                        .blocks = blocks},
                       bench.stream());
  };
  for (int i = 0; i < sets; ++i) enqueue(i);
  enqueue(0);
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<SampleResult> drawn,
                            bench.Download<SampleResult>(results.data(), rows));
  for (const int r : {0, rows / 2, rows - 1}) {
    std::vector<std::pair<float, int>> ranked;
    for (int v = 0; v < vocabulary; ++v) {
      ranked.emplace_back(-RandomElement(kRowSeed + 3, int64_t{r} * vocabulary + v, kScale), v);
    }
    std::sort(ranked.begin(), ranked.end());
    const int token = drawn[r].token;
    if (token < 0 || token >= vocabulary) {
      return absl::InternalError("token " + std::to_string(token));
    }
    // The sampled token must be one of those that the filters keep.
    size_t kept = kind.temperature == 0 ? 1 : ranked.size();
    if (kind.top_k > 0) kept = std::min(kept, static_cast<size_t>(kind.top_k));
    if (kind.top_p < 1) {
      double total = 0, sum = 0;
      size_t n = 0;
      const auto weight = [&](size_t i) {
        return std::exp((ranked[0].first - ranked[i].first) / kind.temperature);
      };
      for (size_t i = 0; i < kept; ++i) total += weight(i);
      while (n < kept && sum < kind.top_p * total) sum += weight(n++);
      // The kernel's sums are rounded differently, so it may keep one more token.
      kept = std::min(kept, n + 1);
    }
    const auto end = ranked.begin() + static_cast<int64_t>(kept);
    if (std::none_of(ranked.begin(), end, [&](const auto& t) { return t.second == token; })) {
      return absl::InternalError("token " + std::to_string(token) + " is not among the " +
                                 std::to_string(kept) + " that may be drawn");
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(m.timing, bench.Time(sets, enqueue));
  m.rotated_bytes = m.work.bytes * sets;
  m.more = {{"blocks", blocks == 0 ? cuda::ChooseSampleBlocks(rows, vocabulary) : blocks}};
  return m;
}

}  // namespace

void AddRowCases(bool tiny, std::vector<Case>& cases) {
  const auto size = [](int n) { return std::to_string(n); };
  for (const int rows : tiny ? std::vector<int>{3} : std::vector<int>{1, 16, 64, 256, 4096}) {
    for (const int width : tiny ? std::vector<int>{48} : std::vector<int>{768, 2048, 4096}) {
      cases.push_back({"norm/d" + size(width) + "/T" + size(rows), rows == 64 ? 0 : 1,
                       [=](Bench& bench) { return NormCase(bench, rows, width); }});
    }
  }
  const std::vector<std::array<int, 2>> combines =
      tiny ? std::vector<std::array<int, 2>>{{48, 2}}
           : std::vector<std::array<int, 2>>{{192, 2}, {512, 16}, {2048, 8}, {4096, 2}};
  for (const int rows : tiny ? std::vector<int>{3} : std::vector<int>{16, 256, 4096}) {
    for (const auto& [width, k] : combines) {
      cases.push_back({"combine/d" + size(width) + "k" + size(k) + "/T" + size(rows),
                       rows == 256 ? 0 : 1,
                       [=](Bench& bench) { return CombineCase(bench, rows, width, k); }});
    }
  }
  const std::vector<SampleKind> kinds = {{"greedy", 0.0, 0, 1.0, 0.0f},
                                         {"plain", 1.0, 0, 1.0, 0.0f},
                                         {"topk", 0.8, 50, 1.0, 0.0f},
                                         {"topp", 0.8, 0, 0.9, 0.0f},
                                         {"minp", 1.0, 0, 1.0, 0.05f}};
  for (const int rows : tiny ? std::vector<int>{2} : std::vector<int>{1, 32, 128}) {
    for (const int vocabulary : tiny ? std::vector<int>{100} : std::vector<int>{32000, 128000}) {
      for (const SampleKind& kind : kinds) {
        cases.push_back({"sample/" + std::string(kind.name) + size(vocabulary) + "/B" + size(rows),
                         tiny || (rows == 128 && vocabulary == 32000) ? 0 : 1,
                         [=](Bench& bench) { return SampleCase(bench, rows, vocabulary, kind); }});
        if (std::string_view(kind.name) != "topp" || (!tiny && vocabulary < 100000)) continue;
        for (const int blocks : {1, 4, 8, 16}) {
          cases.push_back({"sample/" + std::string(kind.name) + size(vocabulary) + "/B" +
                               size(rows) + "/blocks" + size(blocks),
                           tiny ? 0 : 1, [=](Bench& bench) {
                             return SampleCase(bench, rows, vocabulary, kind, blocks);
                           }});
        }
      }
    }
  }
}

}  // namespace moeserve::bench
