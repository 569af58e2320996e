#include "server/rpc/health.h"

#include <exception>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "base/mutex.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/rpc/error_details.h"
#include "server/rpc/messages/message_bytes.h"

namespace moeserve::server::rpc {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// A call that reads one message. Probes call often, so there are no metrics and no log lines.
class HealthCall : public grpc::ServerGenericBidiReactor {
 public:
  // Begins the call, which keeps itself alive until OnDone().
  void Begin(std::shared_ptr<HealthCall> self) {
    self_ = std::move(self);
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) final {
    absl::Status status;
    try {
      if (!ok && arrived_) return Run(request_.service());
      if (!ok) {
        status = NoMessage(method_);
      } else if (arrived_) {
        status = SecondMessage(method_);
      } else {
        status = ParseMessage(method_, bytes_, charge_, request_);
        bytes_.Clear();
        arrived_ = true;
        if (status.ok()) return StartRead(&bytes_);
      }
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    Fail(status);
  }
  void OnDone() final { self_.reset(); }

 protected:
  HealthCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
             const Method& method)
      : context_(context), method_(method), charge_(server.call_memory()) {}

  virtual void Run(const std::string& service) = 0;
  // Ends the call unless it has ended.
  virtual void Fail(const absl::Status& status) = 0;
  // Adds trailers. Returns the status with which to finish the call.
  grpc::Status Detailed(const absl::Status& status) {
    if (status.ok()) return grpc::Status::OK;
    const std::string id = NewRequestId();
    context_->AddTrailingMetadata("x-request-id", id);
    context_->AddTrailingMetadata("x-error-code", ApiCode(status));
    return DetailedStatus(status, id);
  }

 private:
  grpc::GenericCallbackServerContext* const context_;
  const Method& method_;
  MemoryCharge charge_;
  grpc::ByteBuffer bytes_;
  HealthCheckRequest request_;
  bool arrived_ = false;
  std::shared_ptr<HealthCall> self_;
};

void SerializeState(HealthService::State state, grpc::ByteBuffer& bytes) {
  HealthCheckResponse response;
  response.set_status(state);
  SerializeMessage(response, bytes);
}

class CheckCall final : public HealthCall {
 public:
  using Finder = std::function<HealthService::State(const std::string&)>;
  CheckCall(grpc::GenericCallbackServerContext* context, ServerContext& server, Finder finder)
      : HealthCall(context, server, kHealthCheck), finder_(std::move(finder)) {}

 private:
  void Run(const std::string& service) override {
    const HealthService::State state = finder_(service);
    if (state == HealthCheckResponse::SERVICE_UNKNOWN) {
      return Fail(MakeError(absl::StatusCode::kNotFound, "not_found",
                            Concat("there is no service ", Quoted(service))));
    }
    SerializeState(state, response_);
    StartWriteAndFinish(&response_, {}, grpc::Status::OK);
  }
  void Fail(const absl::Status& status) override { Finish(Detailed(status)); }

  const Finder finder_;
  grpc::ByteBuffer response_;
};

}  // namespace

// At most one write is in progress. States that change faster than the client reads are left out.
class HealthService::WatchCall final : public HealthCall,
                                       public std::enable_shared_from_this<WatchCall> {
 public:
  WatchCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
            HealthService& service)
      : HealthCall(context, server, kHealthWatch), service_(service) {}

  void Tell(State state) {
    {
      MutexLock lock(mutex_);
      state_ = state;
    }
    Advance();
  }

  void Fail(const absl::Status& status) override {
    {
      MutexLock lock(mutex_);
      if (!end_) end_ = status;
    }
    Advance();
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mutex_);
      writing_ = false;
    }
    if (!ok) return Fail(absl::CancelledError("the client cancelled the call"));
    Advance();
  }

  void OnCancel() override {
    {
      MutexLock lock(mutex_);
      state_ = sent_;
    }
    Fail(absl::CancelledError("the client cancelled the call"));
  }

 private:
  void Run(const std::string& service) override { service_.Watch(service, shared_from_this()); }

  // Starts the next write or ends the call, if either is possible.
  void Advance() {
    std::optional<absl::Status> end;
    {
      MutexLock lock(mutex_);
      if (writing_ || ended_) return;
      if (state_ != sent_) {
        sent_ = state_;
        SerializeState(*state_, bytes_);
        writing_ = true;
      } else if (end_) {
        end = end_;
        ended_ = true;
      } else {
        return;
      }
    }
    // Called without the lock, because gRPC may call back from these functions.
    if (end) {
      Finish(Detailed(*end));
    } else {
      StartWrite(&bytes_);
    }
  }

  HealthService& service_;
  grpc::ByteBuffer bytes_;
  Mutex mutex_;
  std::optional<State> state_ ABSL_GUARDED_BY(mutex_);
  std::optional<State> sent_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

HealthService::HealthService(Router& router, ServerContext& server) {
  const auto find = [this](const std::string& service) {
    MutexLock lock(mutex_);
    return Find(service);
  };
  router.Add(kHealthCheck, [&server, find](grpc::GenericCallbackServerContext* context) {
    const auto call = std::make_shared<CheckCall>(context, server, find);
    call->Begin(call);
    return call.get();
  });
  router.Add(kHealthWatch, [this, &server](grpc::GenericCallbackServerContext* context) {
    const auto call = std::make_shared<WatchCall>(context, server, *this);
    call->Begin(call);
    return call.get();
  });
}

HealthService::State HealthService::Find(const std::string& service) const {
  const auto found = states_.find(service);
  return found != states_.end() ? found->second : HealthCheckResponse::SERVICE_UNKNOWN;
}

void HealthService::SetServing(const std::string& service, bool serving) {
  const State state = serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  std::vector<std::shared_ptr<WatchCall>> watchers;
  {
    MutexLock lock(mutex_);
    if (shut_down_ || (states_.contains(service) && states_[service] == state)) return;
    states_[service] = state;
    watchers = WatchersOf(service);
  }
  for (const auto& call : watchers) call->Tell(state);
}

void HealthService::Shutdown() {
  std::vector<std::shared_ptr<WatchCall>> watchers;
  {
    MutexLock lock(mutex_);
    if (std::exchange(shut_down_, true)) return;
    for (auto& [service, state] : states_) state = HealthCheckResponse::NOT_SERVING;
    for (const auto& [service, weak] : watchers_) {
      if (auto call = weak.lock()) watchers.push_back(std::move(call));
    }
    watchers_.clear();
  }
  for (const auto& call : watchers) {
    call->Tell(HealthCheckResponse::NOT_SERVING);
    call->Fail(MakeError(absl::StatusCode::kUnavailable, "draining", "the server is draining"));
  }
}

void HealthService::Watch(const std::string& service, const std::shared_ptr<WatchCall>& call) {
  State state;
  bool ended;
  {
    MutexLock lock(mutex_);
    std::erase_if(watchers_, [](const auto& entry) { return entry.second.expired(); });
    watchers_.emplace(service, call);
    state = Find(service);
    ended = shut_down_;
  }
  call->Tell(state);
  if (ended) {
    call->Fail(MakeError(absl::StatusCode::kUnavailable, "draining", "the server is draining"));
  }
}

std::vector<std::shared_ptr<HealthService::WatchCall>> HealthService::WatchersOf(
    const std::string& service) {
  std::vector<std::shared_ptr<WatchCall>> watchers;
  const auto [begin, end] = watchers_.equal_range(service);
  for (auto it = begin; it != end; ++it) {
    if (auto call = it->second.lock()) watchers.push_back(std::move(call));
  }
  return watchers;
}

}  // namespace moeserve::server::rpc
