// Runs the texts of one request through the engine.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/request.h"
#include "server/encode/encode_job.h"
#include "server/generation/generation.h"
#include "server/generation/submission.h"

namespace moeserve::server {

// What was computed of one input.
struct EncodedText {
  EncodeResult result;
  std::optional<RoutingRecord> routing;  // if requested
};

// The texts become requests of the engine, a few at a time, so that one request with many texts
// neither fills the queue nor makes others wait long. Must be used by one thread at a time.
class EncodeRun {
 public:
  // `model` must live as long as the context's engine. Charges the memory that the texts and the
  // answer take. ResourceExhausted if there is none; InvalidArgument if the routing records would
  // get too long.
  static Result<std::unique_ptr<EncodeRun>> Prepare(SubmissionContext context,
                                                    const EncodeModel& model, EncodeJob job,
                                                    std::vector<PreparedText> texts);
  ~EncodeRun() { Cancel(); }
  EncodeRun(const EncodeRun&) = delete;
  EncodeRun& operator=(const EncodeRun&) = delete;

  // Submits the first texts. The engine thread calls `wake`, which must return quickly, when
  // Advance() has something to do. Returns the refusal of the key's limits or of the engine.
  absl::Status Start(absl::Time deadline, std::function<void()> wake);

  // Takes the results that have arrived and submits more texts. Returns whether all results are
  // there. The first error of a text ends the run.
  Result<bool> Advance();
  // Whether the next Advance() is the last one and an answer of many values follows.
  bool answer_is_large() const { return values_ > kManyValues || filled_ > kManyValues; }
  void Cancel();

  const EncodeJob& job() const { return job_; }
  const EncodeModel& model() const { return model_; }
  const std::vector<PreparedText>& texts() const { return texts_; }
  std::vector<EncodedText>& results() { return results_; }
  const Usage& usage() const { return usage_; }  // the sum
  // Returns the id of the response that begins with `prefix`, such as "rerank-".
  std::string IdWith(std::string_view prefix) const;

 private:
  static constexpr size_t kRunningParts = 2;
  // Writing so many values takes some milliseconds.
  static constexpr int64_t kManyValues = 64 << 10;

  EncodeRun(SubmissionContext context, const EncodeModel& model, EncodeJob job,
            std::vector<PreparedText> texts);

  // A part of the texts, from `first` on.
  struct Part {
    size_t first = 0;
    std::unique_ptr<Generation> generation;
  };

  size_t running_parts() const;
  absl::Status StartPart();
  Request MakeRequest(size_t index) const;
  absl::Status Take(size_t index, OutputDelta delta);

  const SubmissionContext context_;
  const EncodeModel model_;
  const EncodeJob job_;
  const std::string id_;         // the response's, without prefix
  const std::string engine_id_;  // the beginning of the ids of the engine's requests
  const std::vector<PreparedText> texts_;
  const int64_t values_;  // of the answer
  const int64_t filled_;  // tokens of its filled texts
  MemoryCharge charge_;
  absl::Time deadline_;
  std::function<void()> wake_;
  std::shared_ptr<Admission> admission_;  // null without keys
  std::vector<Part> parts_;
  size_t submitted_ = 0;  // texts
  int refusals_ = 0;      // of parts, because the queue was full
  // How many parts must run at most for the next part to be submitted.
  size_t most_running_ = kRunningParts - 1;
  std::vector<EncodedText> results_;
  size_t ended_ = 0;  // texts
  Usage usage_;
};

}  // namespace moeserve::server
