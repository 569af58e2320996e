#include "server/rpc/call.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "base/error_text.h"
#include "base/steady_clock.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/base/status_conversion.h"
#include "server/logging/logging.h"
#include "server/rpc/error_details.h"

namespace moeserve::server::rpc {
namespace {

std::string_view Metadata(const grpc::CallbackServerContext& context, const char* key) {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find(key);
  if (it == metadata.end()) return {};
  return {it->second.data(), it->second.size()};
}

// Returns the time until the client's deadline; infinite without one. gRPC keeps the deadline on
// its monotonic clock, so the wall clock has no part in this.
absl::Duration TimeLeft(const grpc::CallbackServerContext& context) {
  const gpr_timespec deadline = context.raw_deadline();
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0) {
    return absl::InfiniteDuration();
  }
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  return absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

std::string_view CodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND:
      return "NOT_FOUND";
    case grpc::StatusCode::ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    default:
      return "INTERNAL";
  }
}

// Returns the client's `traceparent`, or nothing unless there is exactly one.
std::string_view TraceParentOf(const grpc::CallbackServerContext& context) {
  return context.client_metadata().count("traceparent") == 1 ? Metadata(context, "traceparent")
                                                             : std::string_view();
}

bool IsServerFault(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNKNOWN || code == grpc::StatusCode::DEADLINE_EXCEEDED ||
         code == grpc::StatusCode::INTERNAL || code == grpc::StatusCode::UNAVAILABLE;
}

}  // namespace

Call::Call(grpc::CallbackServerContext* context, ServerContext& server, const Method& method)
    : context_(context),
      server_(server),
      method_(method),
      start_(std::chrono::steady_clock::now()),
      id_(ChooseRequestId(Metadata(*context, "x-request-id"))),
      deadline_(SteadyNow() +
                std::min(server.settings().limits.max_request_time, TimeLeft(*context))),
      engine_deadline_(std::min(deadline_ + absl::Seconds(1),
                                SteadyNow() + server.settings().limits.max_request_time)) {
  record_ =
      server.settings().observer->Begin({.protocol = "grpc",
                                         .request_id = id_,
                                         .method = Concat(method.service, '/', method.name),
                                         .path = {},
                                         .client = {},
                                         .time = start_},
                                        TraceParentOf(*context), Metadata(*context, "tracestate"));
  cancel_margin_ =
      std::clamp((deadline_ - SteadyNow()) / 10, absl::ZeroDuration(), absl::Milliseconds(100));
}

absl::Status Call::Check() {
  if (context_->client_metadata().count("authorization") > 1) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_value",
                     "at most one authorization is allowed");
  }
  MOESERVE_ASSIGN_OR_RETURN(key_,
                            server_.keys().Authenticate(Metadata(*context_, "authorization")));
  if (key_ != nullptr) {
    MOESERVE_RETURN_IF_ERROR(key_->RequireAnyOf(method_.scopes));
    MOESERVE_RETURN_IF_ERROR(key_->TakeRequest());
  }
  if (deadline_ <= SteadyNow()) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "timeout",
                     "the deadline had passed when the call arrived");
  }
  checked_ = true;
  return absl::OkStatus();
}

ClientId Call::client() const {
  const size_t id = key_ != nullptr ? std::hash<const ApiKey*>()(key_.get())
                                    : std::hash<std::string>()(context_->peer());
  return std::max<ClientId>(id, 1);
}

absl::Status Call::CancelReason() const {
  if (SteadyNow() >= deadline_ - cancel_margin_) {
    return absl::DeadlineExceededError("the call ran into its deadline");
  }
  return absl::CancelledError("the client cancelled the call");
}

grpc::Status Call::End(const absl::Status& status) {
  grpc::Status out = DetailedStatus(status, id_);
  context_->AddTrailingMetadata("x-request-id", id_);
  if (record_->shows_trace()) {
    context_->AddTrailingMetadata("traceparent", TraceParentHeader(record_->trace()));
  }
  if (key_ != nullptr) {
    for (const auto& [name, value] : key_->RateHeaders()) {
      context_->AddTrailingMetadata(name, value);
    }
  }
  if (!status.ok()) {
    context_->AddTrailingMetadata("x-error-code", ApiCode(status));
    // A field of the request needs a scope that the key lacks.
    if (checked_ && key_ != nullptr && ApiCode(status) == "permission_denied") {
      key_->Count(KeyRefusal::kScope);
    }
    if (const int seconds = RetryAfterSeconds(status); seconds > 0) {
      context_->AddTrailingMetadata("retry-after", std::to_string(seconds));
    }
    if (status.code() == absl::StatusCode::kInternal) {
      LogError("grpc", std::string(status.message()));
    }
    if (status.code() == absl::StatusCode::kInvalidArgument) {
      server_.metrics().CountRejected(Rejection::kInvalid);
    } else if (server_.state() == ServerState::kDraining) {
      server_.metrics().CountRejected(Rejection::kDraining);
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const std::string_view code = CodeName(out.error_code());
  server_.metrics().CountGrpc(method_.name, code, seconds);
  RequestEnd end;
  end.status = static_cast<int>(out.error_code());
  end.code = code;
  end.method = method_.name;
  end.key = KeyName(key_.get());
  end.failed = IsServerFault(out.error_code());
  server_.settings().observer->End(*record_, end);
  return out;
}

absl::Status PrepareLater(ServerContext& server, ClientId client,
                          std::function<absl::Status()> prepare,
                          std::function<void(const absl::Status&)> done) {
  const bool posted = server.work_pool().Post(
      [prepare = std::move(prepare), done = std::move(done)] { done(Caught(prepare)); }, client);
  if (posted) return absl::OkStatus();
  server.metrics().CountRejected(Rejection::kQueueFull);
  return MakeError(absl::StatusCode::kResourceExhausted, "queue_full",
                   "too many requests are waiting to be prepared");
}

}  // namespace moeserve::server::rpc
