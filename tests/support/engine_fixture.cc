#include "tests/support/engine_fixture.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "engine/memory/paged_pool.h"

namespace moeserve::testing {

void CollectingSink::OnDelta(OutputDelta delta) {
  const MutexLock lock(mutex_);
  tokens_.insert(tokens_.end(), delta.tokens.begin(), delta.tokens.end());
  text_ += delta.text;
  logprobs_.insert(logprobs_.end(), delta.logprobs.begin(), delta.logprobs.end());
  prompt_logprobs_.insert(prompt_logprobs_.end(), delta.prompt_logprobs.begin(),
                          delta.prompt_logprobs.end());
  if (delta.routing) Append(routing_, *delta.routing);
  if (delta.finished) {
    last_ = delta;
    ++endings_;
    ended_at_ = absl::Now();
    ended_.notify_all();
  }
}

void CollectingSink::OnError(const absl::Status& status) {
  const MutexLock lock(mutex_);
  status_ = status;
  ++endings_;
  ended_at_ = absl::Now();
  ended_.notify_all();
}

absl::Status CollectingSink::Wait() {
  MutexLock lock(mutex_);
  if (!ended_.wait_for(lock, std::chrono::seconds(120),
                       [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return endings_ > 0; })) {
    return absl::InternalError("no answer within two minutes");
  }
  return status_;
}

AnswerBits BitsOf(CollectingSink& sink) {
  EXPECT_TRUE(sink.Wait().ok());
  AnswerBits answer{.tokens = sink.tokens(),
                    .logprobs = {},
                    .expert_routes = sink.last().usage.expert_routes,
                    .activated_parameters = sink.last().usage.activated_parameters};
  for (const TokenLogprob& l : sink.logprobs()) answer.logprobs.push_back(l.logprob);
  return answer;
}

void ExpectSameRoutes(const RoutingRecord& found, const RoutingRecord& expected,
                      const std::string& what) {
  EXPECT_EQ(found.offsets, expected.offsets) << what;
  EXPECT_EQ(found.experts, expected.experts) << what;
  EXPECT_EQ(found.weights, expected.weights) << what;
}

Result<std::unique_ptr<PackedCache>> OpenPacked(const std::filesystem::path& folder,
                                                const Checkpoint& checkpoint, Backend& backend) {
  return PackedCache::Open({.folder = folder,
                            .place = checkpoint.identity.place,
                            .state = checkpoint.identity.state,
                            .warn = {}},
                           backend);
}

Result<std::unique_ptr<TestEngine>> TestEngine::Start(const std::filesystem::path& path,
                                                      const EngineOptions& options, DType compute,
                                                      const std::string& device,
                                                      Quantization quantization,
                                                      const std::filesystem::path& draft_model,
                                                      bool predictions, const TestRanks& ranks) {
  auto test = std::make_unique<TestEngine>();
  EngineOptions o = options;
  // When an engine is created, it runs a step of the largest size, which is slow on the emulated
  // device.
  if (o.max_step_tokens == 0 && device == "cuda_emulated") o.max_step_tokens = 256;
  test->cache_type_ = o.kv_cache_type.value_or(KvCacheTypeOf(compute));
  LoadOptions load{.require_tokenizer = false};
  load.predictions = predictions;
  MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, LoadCheckpoint(path, load));
  o.context_reason = checkpoint.context_reason;
  MOESERVE_ASSIGN_OR_RETURN(test->backend_, CreateBackend({.device = device, .threads = 2}));
  ModelOptions model_options{.compute = compute, .quantization = quantization};
  model_options.tiers = ranks.tiers;
  if (ranks.exchange != nullptr) {
    test->placement_ = ExpertPlacement::Balanced(checkpoint.spec, ranks.exchange->ranks());
    model_options.exchange = ranks.exchange;
    model_options.placement = &test->placement_;
    model_options.listener = ranks.listener;
    model_options.load_watch = ranks.load_watch;
    model_options.split_rows = ranks.split_rows;
    model_options.split_head = ranks.split_head;
    model_options.owner_sums = ranks.owner_sums;
  }
  std::unique_ptr<PackedCache> packed;
  if (!ranks.packed_folder.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(packed, OpenPacked(ranks.packed_folder, checkpoint, *test->backend_));
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Model> model,
                            Model::Create(checkpoint.spec, model_options, *checkpoint.weights,
                                          *test->backend_, packed.get()));
  std::unique_ptr<Model> draft;
  if (!draft_model.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(Checkpoint other,
                              LoadCheckpoint(draft_model, {.require_tokenizer = false}));
    MOESERVE_ASSIGN_OR_RETURN(
        draft, Model::Create(other.spec, {.compute = compute}, *other.weights, *test->backend_));
  }
  MOESERVE_ASSIGN_OR_RETURN(test->engine_,
                            Engine::Create(o, std::move(model), checkpoint.tokenizer,
                                           checkpoint.eos_token_ids, std::move(draft)));
  return test;
}

int64_t TestEngine::BytesFor(int tokens) const {
  return PagesFor(tokens) * backend_->PageBytes(CacheShapes(engine_->spec()), cache_type_);
}

std::shared_ptr<CollectingSink> TestEngine::Submit(Request request) {
  auto sink = std::make_shared<CollectingSink>();
  const absl::Status status = engine_->Submit(std::move(request), sink);
  if (!status.ok()) sink->OnError(status);
  return sink;
}

void TestEngine::ExpectIdle() {
  EngineStats stats;
  for (int i = 0; i < 100; ++i) {
    stats = engine_->Stats();
    if (stats.running == 0 && stats.waiting == 0 && stats.kv_blocks_used == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << stats.running << " running, " << stats.waiting << " waiting, "
                << stats.kv_blocks_used << " blocks in use";
}

}  // namespace moeserve::testing
