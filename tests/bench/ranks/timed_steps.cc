#include "tests/bench/ranks/timed_steps.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>

#include "base/check.h"

namespace moeserve {

std::vector<std::vector<int32_t>> Work::Tables(int sequences, int positions) {
  const int pages = (positions + kPageTokens - 1) / kPageTokens;
  std::vector<std::vector<int32_t>> tables(static_cast<size_t>(sequences));
  for (int32_t i = 0; i < sequences * pages; ++i) tables[i % sequences].push_back(i);
  return tables;
}

void Work::AddStep(int sequences, int begin, int tokens_of_sequence) {
  Batch& batch = batches.emplace_back();
  for (int s = 0; s < sequences; ++s) {
    batch.page_tables.emplace_back(tables[static_cast<size_t>(s)]);
    for (int t = begin; t < begin + tokens_of_sequence; ++t) {
      batch.tokens.push_back((t * 31 + s * 7) % 251);
      batch.positions.push_back(t);
      batch.sequence.push_back(s);
      batch.phase.push_back(Phase::kPrefill);
    }
    batch.logit_rows.push_back(batch.num_tokens() - 1);
  }
  tokens += batch.num_tokens();
}

Timed RunSteps(Model& model, KvCacheStorage& cache, const Work& work, bool divide_rows,
               StepTimes* times) {
  Timed timed;
  const auto vocabulary = static_cast<size_t>(model.spec().vocab_size);
  const auto begin = std::chrono::steady_clock::now();
  for (Batch batch : work.batches) {
    if (model.options().exchange != nullptr) batch.divide_rows = divide_rows;
    std::vector<float> logits(batch.logit_rows.size() * vocabulary);
    StepOptions options;
    options.times = times;
    model.Forward(batch, cache, options, {.logits = logits});
    const absl::Status status = model.CheckFiles();
    MOESERVE_CHECK(status.ok(), std::string(status.message()).c_str());
    timed.logits.insert(timed.logits.end(), logits.begin(), logits.end());
  }
  timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return timed;
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

void Add(StepTimes& sum, const StepTimes& times) {
  sum.experts += times.experts;
  sum.rows += times.rows;
  sum.head += times.head;
  sum.imbalance += times.imbalance;
  sum.blocks += times.blocks;
}

}  // namespace moeserve
