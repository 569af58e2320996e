// One running request of a generating HTTP endpoint, from admission to the last byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/generation/answer.h"
#include "server/generation/generation.h"
#include "server/generation/generation_request.h"
#include "server/http/types.h"

namespace moeserve::server {

class GenerationSession final : public http::PendingResponse {
 public:
  // Submits to the engine, under ids that begin with `id`. The error is the engine's refusal.
  static Result<std::unique_ptr<http::PendingResponse>> Start(
      std::shared_ptr<EngineApi> engine, const GenerationParams& params,
      std::vector<PreparedPrompt> prompts, std::unique_ptr<AnswerWriter> writer,
      const std::string& id, absl::Time deadline, GenerationOptions options);

  http::Progress Next() override;
  void CheckBacklog() override {
    if (generation_->overflowed()) generation_->Cancel();
  }
  int FinalStatus() const override { return final_status_; }

 private:
  GenerationSession(std::shared_ptr<EngineApi> engine, const GenerationParams& params,
                    std::vector<PreparedPrompt> prompts, std::unique_ptr<AnswerWriter> writer);

  absl::Status Apply(int index, OutputDelta delta);
  void AppendChunks(int index, std::string& out);
  http::Progress Fail(const absl::Status& status);
  http::Response UnaryAnswer();
  nlohmann::ordered_json SumUsage() const;

  const std::shared_ptr<EngineApi> engine_;  // owns the tokenizer that the writer uses
  const int samples_;
  const bool stream_;
  const bool include_usage_;
  const bool continuous_usage_;
  const std::shared_ptr<const RoutingControl> control_;
  const std::vector<PreparedPrompt> prompts_;
  const std::unique_ptr<AnswerWriter> writer_;
  std::vector<moeserve::Usage> counts_;  // by choice
  std::unique_ptr<Generation> generation_;
  bool streaming_ = false;  // a part was sent
  bool echoed_ = false;     // the stream has said how its routing was changed
  int final_status_ = 200;
};

}  // namespace moeserve::server
