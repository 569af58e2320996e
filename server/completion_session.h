// One running POST /v1/completions, from admission to the last byte.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/completion_request.h"
#include "server/completion_response.h"
#include "server/generation.h"
#include "server/http/types.h"

namespace moeserve::server {

class CompletionSession final : public http::PendingResponse {
 public:
  // Submits to the engine. The error is the engine's refusal.
  static Result<std::unique_ptr<http::PendingResponse>> Start(std::shared_ptr<EngineApi> engine,
                                                              CompletionParams params,
                                                              std::vector<PreparedPrompt> prompts,
                                                              AnswerIdentity identity,
                                                              absl::Time deadline,
                                                              GenerationOptions options);

  http::Progress Next() override;
  void CheckBacklog() override {
    if (generation_->overflowed()) generation_->Cancel();
  }
  int FinalStatus() const override { return final_status_; }

 private:
  struct Choice {
    explicit Choice(LogprobArrays arrays) : logprobs(std::move(arrays)) {}
    LogprobArrays logprobs;
    ChoicePart part;       // what has not been sent
    bool started = false;  // the prompt's share was added
    int completion_tokens = 0;
    int cached_tokens = 0;
  };

  CompletionSession(std::shared_ptr<EngineApi> engine, CompletionParams params,
                    std::vector<PreparedPrompt> prompts, AnswerIdentity identity);

  absl::Status Apply(int index, OutputDelta delta);
  absl::Status AddPrompt(Choice& choice, const PreparedPrompt& prompt, const OutputDelta& delta);
  void AppendChunk(int index, std::string& out);
  http::Progress Fail(const absl::Status& status);
  http::Response UnaryAnswer();
  int64_t PromptTokens() const;
  int64_t CompletionTokens() const;
  int64_t CachedTokens() const;

  const std::shared_ptr<EngineApi> engine_;
  const CompletionParams params_;
  const std::vector<PreparedPrompt> prompts_;
  const AnswerIdentity identity_;
  std::vector<Choice> choices_;
  std::unique_ptr<Generation> generation_;
  bool streaming_ = false;  // a part was sent
  int final_status_ = 200;
};

}  // namespace moeserve::server
