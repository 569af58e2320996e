// An engine that generates scripted completions, and a tokenizer of bytes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"

namespace moeserve::server::testing {

inline constexpr TokenId kEos = 256;
inline constexpr TokenId kBos = 257;
inline constexpr int kVocabSize = 300;

// Token i is byte i for i < 256. Token 256 is "<eos>", 257 is "<bos>", and any other token i is
// "<i>".
class ByteTokenizer final : public Tokenizer {
 public:
  bool add_bos = false;

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool add_special_tokens,
                                              bool parse_special = true) const override;
  // Recognises "<eos>" and "<bos>" as special tokens in trusted spans only.
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                     std::span<const TextSpan> trusted,
                                                     bool add_special_tokens) const override;
  absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                     bool skip_special_tokens) const override;
  std::string TokenBytes(TokenId id) const override;
  std::string_view TokenString(TokenId id) const override;
  std::optional<TokenId> TokenToId(std::string_view token) const override;
  bool IsSpecial(TokenId id) const override { return id >= 256; }
  int vocab_size() const override { return kVocabSize; }
};

struct Script {
  std::string reply = "hello";  // generated text, followed by EOS
  bool endless = false;         // repeats the reply up to max_tokens
  size_t bytes_per_token = 0;   // 0: one byte; else pads each piece to this size
  absl::Duration delay;         // before each token
  bool held = false;            // no output until Release()
  absl::Status submit_error;
  int fail_after = -1;  // ends with run_error after so many tokens; -1: never
  absl::Status run_error = absl::InternalError("scripted failure with secrets");
};

// Returns the log-probability that the fake engine reports for a token.
float FakeLogprob(TokenId token);

class FakeEngine final : public Engine {
 public:
  explicit FakeEngine(Script script = {}, int max_model_len = 256);
  ~FakeEngine() override;

  absl::Status Submit(std::vector<Request> requests,
                      std::vector<std::shared_ptr<TokenSink>> sinks) override;
  void Cancel(const TokenSink* sink) override;
  bool Drain(absl::Time deadline) override;
  void Shutdown() override;
  void Break(absl::Status) override {}
  EngineStats Stats() const override;
  EngineProgress Progress() const override;
  ExpertStats ExpertSnapshot() const override;
  std::optional<TokenExpertCounts> token_expert_counts() const override { return token_counts_; }
  std::vector<HiddenSample> HiddenSamples() const override { return hidden_samples_; }
  const EngineOptions& options() const override { return options_; }
  const ModelSpec& spec() const override { return spec_; }
  const RouteLayout& route_layout() const override { return layout_; }
  const Tokenizer* tokenizer() const override { return &tokenizer_; }

  ByteTokenizer& mutable_tokenizer() { return tokenizer_; }
  // These set the statistics of the one block of ExpertSnapshot(). Must be called before requests
  // arrive.
  void SetTokenCounts(TokenExpertCounts counts) { token_counts_ = std::move(counts); }
  void SetHiddenSample(HiddenSample sample) { hidden_samples_ = {std::move(sample)}; }
  void SetScript(const Script& script);
  void SetHealthy(bool healthy);
  void Release();
  // While `stuck`, the engine's thread is in a step that does not end.
  void SetStuck(bool stuck);

  std::vector<Request> submitted() const;
  int active() const;
  int cancelled() const;
  int snapshots() const { return snapshots_; }  // calls of ExpertSnapshot()
  // Both wait up to five seconds, and return false if the number was not reached by then.
  bool WaitForActive(int count) const;
  bool WaitForCancelled(int count) const;

 private:
  struct Running {
    Request request;
    std::shared_ptr<TokenSink> sink;
    Script script;
    int produced = 0;
    bool started = false;
  };

  void Loop();
  // Runs one step of a request; returns true if the request ended. Called without the lock.
  bool Step(Running& running);

  const EngineOptions options_;
  ModelSpec spec_;
  RouteLayout layout_;
  ByteTokenizer tokenizer_;
  std::optional<TokenExpertCounts> token_counts_;
  std::vector<HiddenSample> hidden_samples_;

  mutable Mutex mutex_;
  mutable std::condition_variable changed_;
  Script script_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Running>> running_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> to_cancel_ ABSL_GUARDED_BY(mutex_);
  std::vector<Request> submitted_ ABSL_GUARDED_BY(mutex_);
  int cancelled_ ABSL_GUARDED_BY(mutex_) = 0;
  bool healthy_ ABSL_GUARDED_BY(mutex_) = true;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool stuck_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> generated_{0};  // tokens
  std::atomic<uint64_t> finished_{0};   // requests that reached their end
  mutable std::atomic<int> snapshots_{0};
  std::atomic<uint64_t> rounds_{0};
  std::atomic<bool> idle_{true};
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace moeserve::server::testing
