// One running request of a generating HTTP endpoint, from admission to the last byte.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/http/types.h"
#include "server/openai/answer.h"

namespace moeserve::server {

class GenerationSession final : public http::PendingResponse {
 public:
  // Starts `submission`; `wake` as Request::wake. The error is the engine's refusal.
  static Result<std::unique_ptr<http::PendingResponse>> Start(
      std::shared_ptr<const Submission> submission, std::unique_ptr<AnswerWriter> writer,
      absl::Time deadline, std::function<void()> wake);

  http::Progress Next() override;
  void CheckBacklog() override {
    if (generation_->overflowed()) generation_->Cancel();
  }
  int FinalStatus() const override { return final_status_; }

 private:
  GenerationSession(std::shared_ptr<const Submission> submission,
                    std::unique_ptr<AnswerWriter> writer);

  absl::Status Apply(int index, OutputDelta delta);
  void AppendChunks(int index, std::string& out);
  http::Progress Fail(const absl::Status& status);
  http::Response UnaryAnswer();
  nlohmann::ordered_json SumUsage() const;

  const std::shared_ptr<const Submission> submission_;  // keeps the writer's tokenizer alive
  const std::unique_ptr<AnswerWriter> writer_;
  std::vector<moeserve::Usage> counts_;  // by choice
  std::unique_ptr<Generation> generation_;
  bool streaming_ = false;  // a part was sent
  bool echoed_ = false;     // the stream has reported how its routing was changed
  int final_status_ = 200;
};

}  // namespace moeserve::server
