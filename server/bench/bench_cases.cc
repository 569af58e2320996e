#include "server/bench/bench_cases.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "engine/step/batch.h"
#include "server/bench/bench_work.h"
#include "server/bench/weight_traffic.h"

namespace moeserve::server {
namespace {

// Tokens of all sequences together in one step that fills the cache before decoding. These steps
// are not timed.
constexpr int kContextRows = 4096;

// Most decode steps of a warm-up, which counts the work of the experts.
constexpr int kWarmUpSteps = 8;

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

class Cases {
 public:
  Cases(const CaseSettings& settings, Model& model, KvCacheStorage& cache,
        const std::function<Result<MachineRates>()>& probe, const std::function<void()>& measured,
        const std::function<bool()>& stop)
      : settings_(settings),
        model_(model),
        cache_(cache),
        probe_(probe),
        measured_(measured),
        stop_(stop) {
    const int sequences = *std::max_element(settings.batches.begin(), settings.batches.end());
    const int64_t blocks = PagesFor(std::max(settings.prompt, settings.context + settings.tokens));
    for (int s = 0; s < sequences; ++s) {
      tables_.emplace_back();
      for (int64_t b = 0; b < blocks; ++b) {
        tables_.back().push_back(static_cast<int32_t>(s * blocks + b));
      }
    }
  }

  Result<std::vector<CaseResult>> Run() {
    if (std::vector<StateShape> shapes = StateShapes(model_.spec()); !shapes.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(
          states_,
          model_.backend().NewStates(std::move(shapes), static_cast<int>(tables_.size()), 0));
    }
    std::vector<CaseResult> results;
    std::vector<std::function<double()>> cases;
    // The first round warms up and counts the work of the experts. Later rounds are timed and do
    // not count it, because copying the selected experts of every step from a GPU takes time.
    if (settings_.prompt > 0) {
      results.push_back(WarmPrompt());
      cases.emplace_back([this] { return Prompt(nullptr); });
      Tell();
    }
    for (const int batch : settings_.batches) {
      if (Stopped()) break;
      results.push_back(WarmDecode(batch));
      cases.emplace_back([this, batch] { return Decode(batch, settings_.tokens, nullptr); });
      Tell();
    }
    if (!Stopped()) MOESERVE_RETURN_IF_ERROR(Measure(cases, results));
    std::erase_if(results, [](const CaseResult& result) { return result.rounds.empty(); });
    return results;
  }

 private:
  bool Stopped() const { return stop_ && stop_(); }

  absl::Status Measure(const std::vector<std::function<double()>>& cases,
                       std::vector<CaseResult>& results) {
    MOESERVE_ASSIGN_OR_RETURN(MachineRates before, probe_());
    for (int round = 0; round < settings_.rounds; ++round) {
      for (size_t c = 0; c < cases.size(); ++c) {
        const double speed = cases[c]();
        if (Stopped()) return absl::OkStatus();
        MOESERVE_ASSIGN_OR_RETURN(const MachineRates after, probe_());
        results[c].rounds.push_back({.tokens_per_second = speed, .before = before, .after = after});
        before = after;
        Tell();
      }
    }
    return absl::OkStatus();
  }

  void Tell() const {
    if (measured_) measured_();
  }

  // Stored() returns the bytes of matrices with `parameters` parameters in total; FixedStored() the
  // bytes of weights that every step reads.
  int64_t Stored(int64_t parameters) const {
    return MatrixBytes(parameters, model_.options().compute, model_.options().quantization);
  }
  int64_t FixedStored() const { return FixedWeightBytes(model_.spec(), model_.options()); }

  // Runs one prompt and returns its speed in tokens per second, which means nothing if Stopped().
  // Adds the routed work to `work` if that is not null.
  double Prompt(RoutedWork* work) {
    const int tokens = settings_.prompt;
    // A chunk that is not timed reads the weights again, which the probe evicted from the caches.
    Step(1, 0, std::min(settings_.chunk, tokens), nullptr);
    const auto start = Clock::now();
    for (int at = 0; at < tokens && !Stopped(); at += settings_.chunk) {
      Step(1, at, std::min(settings_.chunk, tokens - at), work);
    }
    return tokens / Seconds(start);
  }

  // Fills the cache, runs `steps` decode steps and returns the speed in tokens per second, summed
  // over all sequences.
  double Decode(int batch, int steps, RoutedWork* work) {
    const int piece = std::max(1, kContextRows / batch);
    for (int at = 0; at < settings_.context && !Stopped(); at += piece) {
      Step(batch, at, std::min(piece, settings_.context - at), nullptr);
    }
    const auto start = Clock::now();
    for (int i = 0; i < steps && !Stopped(); ++i) Step(batch, settings_.context + i, 1, work);
    return static_cast<double>(steps) * batch / Seconds(start);
  }

  CaseResult WarmPrompt() {
    const int64_t tokens = settings_.prompt;
    CaseResult result;
    result.name = "prompt " + std::to_string(tokens);
    RoutedWork work(model_.spec());
    Prompt(&work);
    const int64_t steps = (tokens + settings_.chunk - 1) / settings_.chunk;
    result.tokens_per_step = static_cast<double>(tokens);
    // The keys and values that earlier chunks left are not counted, because the CPU's caches may
    // still hold them.
    result.bytes_per_step = static_cast<double>(steps * FixedStored() + Stored(work.parameters()));
    result.operations_per_step =
        Operations(model_.spec(), work, tokens, {.first = 1, .last = tokens});
    result.distinct_experts = DistinctExperts(work, steps);
    return result;
  }

  CaseResult WarmDecode(int batch) {
    const int steps = std::min(settings_.tokens, kWarmUpSteps);
    const ModelSpec& spec = model_.spec();
    CaseResult result;
    result.name = "decode " + std::to_string(batch);
    RoutedWork work(spec);
    Decode(batch, steps, &work);
    const VisiblePositions visible{settings_.context + 1, settings_.context + settings_.tokens};
    result.decode = true;
    result.tokens_per_step = batch;
    result.bytes_per_step =
        static_cast<double>(FixedStored()) +
        static_cast<double>(Stored(work.parameters())) / steps +
        batch * (CacheBytesRead(spec, cache_.type(), visible) + StateBytesMoved(spec));
    const StepOperations all = Operations(spec, work, int64_t{steps} * batch, visible);
    const auto count = static_cast<double>(steps);
    result.operations_per_step = {
        .matrices = all.matrices / count + 2.0 * batch * static_cast<double>(HeadMacs(spec)),
        .attention = all.attention / count};
    result.distinct_experts = DistinctExperts(work, steps);
    return result;
  }

  double DistinctExperts(const RoutedWork& work, int64_t steps) const {
    const auto blocks = std::ranges::count_if(
        model_.spec().blocks, [](const BlockSpec& b) { return b.routing() != nullptr; });
    if (blocks == 0) return 0.0;
    return static_cast<double>(work.experts()) / static_cast<double>(steps * blocks);
  }

  // Runs one step with `count` random tokens for each of `sequences` sequences, starting at
  // position `begin`, and computes the logits of each sequence's last token. Adds the routed work
  // to `work` if that is not null.
  void Step(int sequences, int begin, int count, RoutedWork* work) {
    Batch batch;
    for (int s = 0; s < sequences; ++s) {
      batch.page_tables.emplace_back(tables_[s]);
      if (states_ != nullptr) {
        if (begin == 0) states_->Clear(s);
        batch.states.Add(*states_, s, count);
      }
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
    const StepReport report =
        model_.Forward(batch, cache_, {.report = {.plans = work != nullptr}}, {.logits = logits_});
    if (work != nullptr) work->Add(report);
  }

  const CaseSettings& settings_;
  Model& model_;
  KvCacheStorage& cache_;
  const std::function<Result<MachineRates>()>& probe_;
  const std::function<void()>& measured_;
  const std::function<bool()>& stop_;
  std::vector<std::vector<int32_t>> tables_;
  std::unique_ptr<StateStorage> states_;  // a slot of each sequence; null if the model has none
  std::vector<float> logits_;
  uint64_t random_ = 88172645463325252ULL;
};

}  // namespace

MachineRates MachineRates::Best(const MachineRates& a, const MachineRates& b) {
  return {.read_bandwidth = std::max(a.read_bandwidth, b.read_bandwidth),
          .f32 = std::max(a.f32, b.f32),
          .bf16 = std::max(a.bf16, b.bf16),
          .int8 = std::max(a.int8, b.int8)};
}

double MachineRates::PeakFor(const ModelOptions& types) const {
  if (types.quantization != Quantization::kNone && int8 > 0) return int8;
  // Without bf16 instructions, bf16 rows are widened and computed at the f32 rate.
  return types.compute == DType::kBF16 && bf16 > 0 ? bf16 : f32;
}

double MachineRates::AttentionPeak(KvCacheType cache) const {
  return cache == KvCacheType::kBF16 && bf16 > 0 ? bf16 : f32;
}

bool MachineRates::IsNear(const MachineRates& other) const {
  const auto near = [](double a, double b) { return std::max(a, b) <= 1.1 * std::min(a, b); };
  return near(read_bandwidth, other.read_bandwidth) && near(f32, other.f32) &&
         near(bf16, other.bf16) && near(int8, other.int8);
}

double CaseResult::Median() const {
  std::vector<double> speeds;
  for (const Measurement& m : rounds) speeds.push_back(m.tokens_per_second);
  return MedianOf(std::move(speeds));
}

double CaseResult::Min() const {
  return std::ranges::min(rounds, {}, &Measurement::tokens_per_second).tokens_per_second;
}

double CaseResult::Max() const {
  return std::ranges::max(rounds, {}, &Measurement::tokens_per_second).tokens_per_second;
}

double CaseResult::Bound(const MachineRates& rates, const ModelOptions& types,
                         KvCacheType cache) const {
  const double peak = rates.PeakFor(types);
  if (!decode && peak <= 0) return 0.0;
  double seconds = 0.0;
  if (rates.read_bandwidth > 0) seconds = bytes_per_step / rates.read_bandwidth;
  if (peak > 0) {
    const double attention_peak = rates.AttentionPeak(cache);
    const double arithmetic =
        operations_per_step.matrices / peak +
        operations_per_step.attention / (attention_peak > 0 ? attention_peak : peak);
    seconds = std::max(seconds, arithmetic);
  }
  return seconds > 0 ? tokens_per_step / seconds : 0.0;
}

ShareOfBound CaseResult::Share(const ModelOptions& types, KvCacheType cache) const {
  ShareOfBound result;
  for (const Measurement& m : rounds) result.steady += m.before.IsNear(m.after);
  std::vector<double> bounds, shares;
  for (const Measurement& m : rounds) {
    if (result.steady > 0 && !m.before.IsNear(m.after)) continue;
    const double bound = Bound(MachineRates::Best(m.before, m.after), types, cache);
    bounds.push_back(bound);
    shares.push_back(bound > 0 ? m.tokens_per_second / bound : 0.0);
  }
  result.bound = MedianOf(std::move(bounds));
  result.share = MedianOf(std::move(shares));
  return result;
}

Result<std::vector<CaseResult>> MeasureCases(const CaseSettings& settings, Model& model,
                                             KvCacheStorage& cache,
                                             const std::function<Result<MachineRates>()>& probe,
                                             const std::function<void()>& measured,
                                             const std::function<bool()>& stop) {
  return Cases(settings, model, cache, probe, measured, stop).Run();
}

int64_t CountMeasurements(const CaseSettings& settings) {
  const auto cases = static_cast<int64_t>(settings.batches.size()) + (settings.prompt > 0 ? 1 : 0);
  return cases * (1 + settings.rounds);  // a warm-up and the rounds
}

}  // namespace moeserve::server
