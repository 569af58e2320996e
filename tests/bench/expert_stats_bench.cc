// Measures by how much expert statistics reduce the decode throughput.
//
//   expert_stats_bench [--pairs 40] [--tokens 512] MODEL...
//
// For batches of 1 and 32, two engines with the same model run in one process, one with statistics
// and one without, which calls no recorder and whose counters stay 0. A pair of runs decodes once
// with each engine; the engine that runs first alternates between pairs. Prints the median over the
// pairs of the slowdown due to statistics, and the 95 % confidence interval of this median (by
// order statistics, without assuming a distribution).

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/engine_fixture.h"

namespace moeserve::testing {
namespace {

using Clock = std::chrono::steady_clock;

// Records the times of the first and the last token.
class TimingSink : public CollectingSink {
 public:
  void OnDelta(OutputDelta delta) override {
    const auto now = Clock::now();
    if (!started_) first_ = now;
    started_ = true;
    last_token_ = now;
    CollectingSink::OnDelta(std::move(delta));
  }
  // Valid after Wait().
  Clock::time_point first() const { return first_; }
  Clock::time_point last_token() const { return last_token_; }

 private:
  bool started_ = false;
  Clock::time_point first_, last_token_;
};

// Returns the tokens per second during the time in which all sequences decode.
double DecodeThroughput(TestEngine& engine, int batch, int tokens, int round) {
  std::vector<Request> requests;
  std::vector<std::shared_ptr<TokenSink>> plain;
  std::vector<std::shared_ptr<TimingSink>> sinks;
  for (int i = 0; i < batch; ++i) {
    Request r;
    r.id = std::to_string(round) + "." + std::to_string(i);
    // All sequences have the same prompt, so that decoding begins in the same step. The sequences
    // differ from the first sampled token on.
    for (int t = 0; t < 16; ++t) r.prompt.push_back((round * 31 + t * 7) % 500);
    r.sampling.max_tokens = tokens;
    r.sampling.ignore_eos = true;
    r.sampling.seed = 1000 * round;
    r.sampling.sample_index = i;
    requests.push_back(std::move(r));
    sinks.push_back(std::make_shared<TimingSink>());
    plain.push_back(sinks.back());
  }
  if (!engine.get().Submit(std::move(requests), std::move(plain)).ok()) std::abort();
  Clock::time_point begin = Clock::time_point::min(), end = Clock::time_point::min();
  for (const auto& sink : sinks) {
    if (!sink->Wait().ok()) std::abort();
    begin = std::max(begin, sink->first());
    end = std::max(end, sink->last_token());
  }
  return batch * (tokens - 1) / std::chrono::duration<double>(end - begin).count();
}

struct Interval {
  double low, median, high;
};

// Returns the 95 % confidence interval of the median of `values`.
Interval MedianInterval(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  // r is the largest number with P(at most r - 1 of n fair coins show heads) <= 2.5 %.
  double probability = 1.0;
  for (size_t i = 0; i < n; ++i) probability /= 2;
  double below = 0.0;
  size_t r = 0;
  for (; r < n / 2; ++r) {
    if (below + probability > 0.025) break;
    below += probability;
    probability *= static_cast<double>(n - r) / static_cast<double>(r + 1);
  }
  const size_t low = r == 0 ? 0 : r - 1;
  const double median = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  return {values[low], median, values[n - 1 - low]};
}

int Run(const std::vector<std::filesystem::path>& models, int pairs, int tokens) {
  std::printf("%-12s %6s %12s %9s %22s\n", "model", "batch", "tokens/s off", "slower by",
              "95 % interval");
  for (const std::filesystem::path& model : models) {
    std::unique_ptr<TestEngine> engines[2];
    for (const bool on : {false, true}) {
      auto engine = TestEngine::Start(
          model, {.max_model_len = 16 + tokens, .max_num_seqs = 32, .expert_stats = on},
          DType::kBF16);
      if (!engine.ok()) {
        std::fprintf(stderr, "%s\n", std::string(engine.status().message()).c_str());
        return 1;
      }
      engines[on] = *std::move(engine);
    }
    for (const int batch : {1, 32}) {
      std::vector<double> slower, off;
      for (int pair = -2; pair < pairs; ++pair) {  // the first two pairs are warm-up
        double speed[2];
        for (const int turn : {0, 1}) {
          const bool on = (pair + turn) % 2 == 0;
          speed[on] = DecodeThroughput(*engines[on], batch, tokens, pair + 2);
        }
        if (pair < 0) continue;
        off.push_back(speed[0]);
        slower.push_back(1.0 - speed[1] / speed[0]);
      }
      if (engines[0]->get().ExpertSnapshot().tokens != 0) std::abort();
      if (engines[1]->get().ExpertSnapshot().tokens == 0) std::abort();
      const Interval i = MedianInterval(slower);
      std::printf("%-12s %6d %12.0f %8.2f%% %9.2f%% to %6.2f%%\n",
                  model.filename().string().c_str(), batch, MedianInterval(off).median,
                  100 * i.median, 100 * i.low, 100 * i.high);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace moeserve::testing

int main(int argc, char** argv) {
  int pairs = 40, tokens = 512;
  std::vector<std::filesystem::path> models;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--pairs" && i + 1 < argc) {
      pairs = std::max(1, std::atoi(argv[++i]));
    } else if (argument == "--tokens" && i + 1 < argc) {
      tokens = std::max(2, std::atoi(argv[++i]));
    } else {
      models.emplace_back(argument);
    }
  }
  if (models.empty()) {
    std::fprintf(stderr, "usage: expert_stats_bench [--pairs 40] [--tokens 512] MODEL...\n");
    return 2;
  }
  return moeserve::testing::Run(models, pairs, tokens);
}
