// An engine for a checkpoint folder, and sinks that store the output of requests.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/devices.h"

namespace moeserve::testing {

// Collects the output of a request. Wait() returns the final status; call the other functions after
// it.
class CollectingSink : public TokenSink {
 public:
  void OnDelta(OutputDelta delta) override;
  void OnError(const absl::Status& status) override;

  absl::Status Wait();
  const std::vector<TokenId>& tokens() const { return tokens_; }
  const std::string& text() const { return text_; }
  const std::vector<TokenLogprob>& logprobs() const { return logprobs_; }
  const std::vector<std::optional<TokenLogprob>>& prompt_logprobs() const {
    return prompt_logprobs_;
  }
  // Returns the routing record of all tokens, joined from the records of all deltas.
  const RoutingRecord& routing() const { return routing_; }
  const OutputDelta& last() const { return last_; }
  int endings() const {
    const MutexLock lock(mutex_);
    return endings_;
  }
  absl::Time ended_at() const { return ended_at_; }

 private:
  mutable Mutex mutex_;
  std::condition_variable ended_;
  int endings_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time ended_at_;
  absl::Status status_;
  std::vector<TokenId> tokens_;
  std::string text_;
  std::vector<TokenLogprob> logprobs_;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs_;
  RoutingRecord routing_;
  OutputDelta last_;
};

// What must not depend on how an answer was computed.
struct AnswerBits {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  uint64_t expert_routes = 0;
  uint64_t activated_parameters = 0;
  friend bool operator==(const AnswerBits&, const AnswerBits&) = default;
};
// Waits for the end of a request, which must not be an error.
AnswerBits BitsOf(CollectingSink& sink);
// Expects the same routes with weights of the same bits. `what` names the request.
void ExpectSameRoutes(const RoutingRecord& found, const RoutingRecord& expected,
                      const std::string& what);

// The ranks of an engine, which is the leader; without an exchange, it computes alone.
struct TestRanks {
  Exchange* exchange = nullptr;
  StepListener* listener = nullptr;
  LoadWatch* load_watch = nullptr;  // may be null
  SplitChoice split_rows = SplitChoice::kAuto;
  SplitChoice split_head = SplitChoice::kAuto;
  SplitChoice owner_sums = SplitChoice::kAuto;
  std::filesystem::path packed_folder = {};  // of a packed cache; empty: there is none
  TierOptions tiers = {};
};

// Opens the packed cache in `folder` for a checkpoint.
Result<std::unique_ptr<PackedCache>> OpenPacked(const std::filesystem::path& folder,
                                                const Checkpoint& checkpoint, Backend& backend);

class TestEngine {
 public:
  // `draft_model`: the folder of a model that drafts tokens; empty: none does. `predictions`: its
  // own prediction layers do.
  static Result<std::unique_ptr<TestEngine>> Start(
      const std::filesystem::path& model, const EngineOptions& options, DType compute = DType::kF32,
      const std::string& device = TestDevice(), Quantization quantization = Quantization::kNone,
      const std::filesystem::path& draft_model = {}, bool predictions = false,
      const TestRanks& ranks = {});

  Engine& get() { return *engine_; }
  // Returns the KV cache memory for one sequence of `tokens` tokens.
  int64_t BytesFor(int tokens) const;
  // Submits a request. If the engine refuses it, the sink receives the error as the end of the
  // request.
  std::shared_ptr<CollectingSink> Submit(Request request);
  // Fails the test unless nothing runs or waits and every cache block is free (within a second).
  void ExpectIdle();

 private:
  std::unique_ptr<Backend> backend_;
  ExpertPlacement placement_;
  std::unique_ptr<Engine> engine_;
  KvCacheType cache_type_ = KvCacheType::kF32;
};

}  // namespace moeserve::testing
