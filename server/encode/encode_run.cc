#include "server/encode/encode_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/encode/label_scores.h"
#include "server/metrics/request_metrics.h"

namespace moeserve::server {
namespace {

// A part of a request's texts that the engine gets at a time.
constexpr size_t kPartTexts = 128;
constexpr size_t kPartTokens = 64 << 10;

// Returns an estimate of the memory of the texts, the results and the answer.
size_t RunBytes(const EncodeJob& job, const ModelSpec& spec, const std::vector<PreparedText>& texts,
                int64_t values, int64_t filled) {
  constexpr size_t kText = 2 << 10;
  constexpr size_t kToken = 64;
  constexpr size_t kRoute = 60;
  constexpr size_t kFilled = 24;  // the text of a token in the answer, which grows by doubling
  // Bytes of a value: as a number, and as text, which grows by doubling.
  const size_t value = job.task == EncodeTask::kFillMask ? 600 : (job.base64 ? 16 : 36);
  const auto routes = job.routing.any_record()
                          ? static_cast<size_t>(MostRoutes(spec, job.routing.control.get()))
                          : 0;
  size_t tokens = 0;
  for (const PreparedText& text : texts) tokens += text.ids.size();
  size_t bytes = texts.size() * kText + tokens * (kToken + kRoute * routes);
  for (const std::string& document : job.documents) bytes += 3 * document.size();
  return bytes + static_cast<size_t>(values) * value + static_cast<size_t>(filled) * kFilled;
}

absl::Status CheckFilled(const EncodeJob& job, int64_t tokens) {
  if (tokens <= kMaxFilledTokens) return absl::OkStatus();
  return InvalidValue("top_k", Concat("'top_k': the text with ", job.top_k,
                                      " words for each of its masks would be an answer of ", tokens,
                                      " tokens, at most ", kMaxFilledTokens,
                                      " are accepted; ask for fewer words or masks"));
}

absl::Status CheckRoutes(const EncodeJob& job, const ModelSpec& spec,
                         const std::vector<PreparedText>& texts, int64_t most) {
  if (!job.routing.any_record()) return absl::OkStatus();
  const int64_t per_token = MostRoutes(spec, job.routing.control.get());
  int64_t tokens = 0;
  for (const PreparedText& text : texts) tokens += std::ssize(text.ids);
  if (per_token == 0 || tokens <= most / per_token) return absl::OkStatus();
  const char* const field = job.routing.record ? "return_routing" : "return_routed_experts";
  return InvalidValue(field, Concat("'", field, "': ", tokens,
                                    " tokens of all texts are too many for one answer: at most ",
                                    most / per_token, " with this model; send fewer texts"));
}

absl::Status CheckRow(const TokenLogprob& row) {
  bool nan = std::isnan(row.logprob);
  for (const auto& [token, logprob] : row.top) nan |= std::isnan(logprob);
  return nan ? absl::InternalError("a log-probability is NaN") : absl::OkStatus();
}

void AddUsage(const Usage& from, Usage& to) {
  to.prompt_tokens += from.prompt_tokens;
  to.cached_tokens += from.cached_tokens;
  to.routed_tokens += from.routed_tokens;
  to.expert_routes += from.expert_routes;
  to.activated_parameters += from.activated_parameters;
  // Known if those of all texts are.
  if (to.macs && from.macs) {
    *to.macs += *from.macs;
  } else {
    to.macs.reset();
  }
}

}  // namespace

Result<std::unique_ptr<EncodeRun>> EncodeRun::Prepare(SubmissionContext context,
                                                      const EncodeModel& model, EncodeJob job,
                                                      std::vector<PreparedText> texts) {
  MOESERVE_RETURN_IF_ERROR(CheckRoutes(job, *model.spec, texts, context.limits.max_routes));
  MOESERVE_RETURN_IF_ERROR(CheckFilled(job, CountFilledTokens(job, texts)));
  std::unique_ptr<EncodeRun> run(
      new EncodeRun(std::move(context), model, std::move(job), std::move(texts)));
  MOESERVE_RETURN_IF_ERROR(
      run->charge_.Add(RunBytes(run->job_, *model.spec, run->texts_, run->values_, run->filled_)));
  return run;
}

EncodeRun::EncodeRun(SubmissionContext context, const EncodeModel& model, EncodeJob job,
                     std::vector<PreparedText> texts)
    : context_(std::move(context)),
      model_(model),
      job_(std::move(job)),
      id_(!job_.request_id.empty()     ? job_.request_id
          : context_.record != nullptr ? context_.record->start().request_id
                                       : NewRequestId()),
      // An id of the client's is unique among its key's running requests, not among all.
      engine_id_(job_.request_id.empty()
                     ? NewRequestId()
                     : Concat(context_.key == nullptr
                                  ? ""
                                  : Concat("key ", context_.key->usage()->serial, ' '),
                              "encode-", id_)),
      texts_(std::move(texts)),
      values_(CountAnswerValues(job_, *model.spec, texts_)),
      filled_(CountFilledTokens(job_, texts_)),
      charge_(context_.memory),
      results_(texts_.size()) {
  usage_.macs = 0.0;
}

std::string EncodeRun::IdWith(std::string_view prefix) const { return Concat(prefix, id_); }

absl::Status EncodeRun::Start(absl::Time deadline, std::function<void()> wake) {
  deadline_ = deadline;
  wake_ = std::move(wake);
  int64_t tokens = 0;
  for (const PreparedText& text : texts_) tokens += std::ssize(text.ids);
  if (context_.key != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(
        admission_, Admission::Admit(context_.key, tokens, 0, std::numeric_limits<int>::max()));
  }
  if (context_.record != nullptr) {
    context_.record->Update([&](RequestFacts& facts) {
      facts.operation = job_.task == EncodeTask::kEmbed || job_.task == EncodeTask::kTokenEmbed
                            ? "embeddings"
                            : std::string(KindName(job_.task));
      facts.model = job_.model;
      facts.response_id = id_;
      facts.submitted = std::chrono::steady_clock::now();
      facts.prompt_tokens = tokens;
      facts.choices = static_cast<int>(texts_.size());
    });
  }
  if (const absl::Status status = StartPart(); !status.ok()) {
    if (admission_ != nullptr) admission_->Refuse();
    return status;
  }
  if (context_.metrics != nullptr) context_.metrics->CountRequest(KindName(job_.task));
  return absl::OkStatus();
}

size_t EncodeRun::running_parts() const {
  return static_cast<size_t>(
      std::ranges::count_if(parts_, [](const Part& part) { return !part.generation->finished(); }));
}

Request EncodeRun::MakeRequest(size_t index) const {
  const PreparedText& text = texts_[index];
  Request request;
  // What the engine has taken of a part that it then refused may not have ended yet.
  request.id = Concat(engine_id_, '-', index, '-', refusals_);
  request.prompt = text.ids;
  request.token_types = text.types;
  request.deadline = deadline_;
  request.priority = job_.priority;
  request.cache_salt =
      context_.key == nullptr ? job_.cache_salt : context_.key->CacheSalt(job_.cache_salt);
  request.routing_record = job_.routing.any_record();
  request.routing_control = job_.routing.control;
  request.encode = EncodeParamsOf(job_, *model_.spec, text);
  return request;
}

absl::Status EncodeRun::StartPart() {
  std::vector<Request> requests;
  size_t tokens = 0;
  for (size_t i = submitted_; i < texts_.size() && requests.size() < kPartTexts; ++i) {
    tokens += texts_[i].ids.size();
    if (!requests.empty() && tokens > kPartTokens) break;
    requests.push_back(MakeRequest(i));
  }
  const size_t count = requests.size();
  GenerationOptions options;
  options.keeps_partial = false;
  options.max_unread_bytes = std::numeric_limits<size_t>::max();
  options.live = context_.live;
  options.wake = wake_;
  options.metrics = context_.metrics;
  options.macs = context_.macs;
  Part part;
  part.first = submitted_;
  MOESERVE_ASSIGN_OR_RETURN(
      part.generation, Generation::Start(context_.engine, std::move(requests), std::move(options)));
  parts_.push_back(std::move(part));
  submitted_ += count;
  return absl::OkStatus();
}

absl::Status EncodeRun::Take(size_t index, OutputDelta delta) {
  if (!delta.finished) return absl::OkStatus();
  if (!delta.encoded) return absl::InternalError("a text ended without its result");
  MOESERVE_RETURN_IF_ERROR(CheckFinite(delta.encoded->values));
  for (const TokenLogprob& row : delta.encoded->rows) MOESERVE_RETURN_IF_ERROR(CheckRow(row));
  EncodedText& out = results_[index];
  out.result = *std::move(delta.encoded);
  out.routing = std::move(delta.routing);
  ++ended_;
  AddUsage(delta.usage, usage_);
  if (context_.record != nullptr) {
    // Without the reasons for which the texts ended, of which there may be thousands.
    context_.record->Update([&](RequestFacts& facts) {
      if (!facts.queue_seconds) facts.queue_seconds = delta.usage.queue_seconds;
      facts.cached_tokens = usage_.cached_tokens;
      if (ended_ == texts_.size()) facts.finish_reasons.push_back("stop");
    });
  }
  if (context_.metrics != nullptr) {
    context_.metrics->encode_tokens += static_cast<uint64_t>(delta.usage.prompt_tokens);
  }
  return absl::OkStatus();
}

Result<bool> EncodeRun::Advance() {
  for (Part& part : parts_) {
    for (ChoiceEvent& event : part.generation->Take()) {
      MOESERVE_RETURN_IF_ERROR(event.error);
      MOESERVE_RETURN_IF_ERROR(
          Take(part.first + static_cast<size_t>(event.choice), std::move(event.delta)));
    }
  }
  while (submitted_ < texts_.size() && running_parts() <= most_running_) {
    const absl::Status status = StartPart();
    most_running_ = kRunningParts - 1;
    if (status.ok()) continue;
    const size_t running = running_parts();
    if (!absl::IsResourceExhausted(status) || running == 0) return status;
    // The queue is full: the end of a part that runs is the time to try again.
    ++refusals_;
    most_running_ = running - 1;
    break;
  }
  if (ended_ < texts_.size()) return false;
  if (admission_ != nullptr) admission_->End();
  return true;
}

void EncodeRun::Cancel() {
  for (Part& part : parts_) part.generation->Cancel();
  if (admission_ != nullptr) admission_->End();
}

}  // namespace moeserve::server
