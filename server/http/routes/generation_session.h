// One running request of an HTTP endpoint that generates tokens, from admission to the last byte of
// the response.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/answers/answer_writer.h"
#include "server/base/work_pool.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"
#include "server/http/types.h"

namespace moeserve::server {

class GenerationSession final : public http::PendingResponse {
 public:
  // Starts `submission`. Large parts of the response are written on `pool`, which must outlive the
  // result. Request::wake describes `wake`. Returns the engine's refusal as the error.
  static Result<std::unique_ptr<http::PendingResponse>> Start(
      std::shared_ptr<const Submission> submission, std::unique_ptr<AnswerWriter> writer,
      absl::Time deadline, WorkPool& pool, std::function<void()> wake);

  http::Progress Next() override;
  bool NextIsSlow() const override;
  void CheckBacklog() override {
    if (generation_->overflowed()) generation_->Cancel();
  }
  std::string_view StreamType() const override { return writer_->stream_type(); }
  std::string_view KeepAliveText() const override { return writer_->keep_alive_text(); }
  int FinalStatus() const override { return final_status_; }

 private:
  GenerationSession(std::shared_ptr<const Submission> submission,
                    std::unique_ptr<AnswerWriter> writer, std::function<void()> wake);

  // Whether what is written at the end is large, because it has all of the output.
  bool EndIsLarge() const;
  absl::Status Apply(int index, OutputDelta delta);
  // Ends the answer. `data`: events that were written before the error.
  http::Progress Fail(const absl::Status& status, std::string data);
  moeserve::Usage SumUsage() const;

  const std::shared_ptr<const Submission> submission_;  // keeps the writer's tokenizer alive
  const std::unique_ptr<AnswerWriter> writer_;
  const std::function<void()> wake_;
  std::vector<moeserve::Usage> counts_;  // per choice
  MemoryCharge answer_;                  // what a unary answer has collected
  size_t values_ = 0;                    // the sum of CountValues() of the output so far
  bool writes_end_ = false;              // whether the next call writes the large end of the answer
  std::unique_ptr<Generation> generation_;
  bool streaming_ = false;  // whether a part of a stream was sent
  int final_status_ = 200;
};

}  // namespace moeserve::server
