// Calls for which the client sends one message.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <exception>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "server/rpc/call.h"
#include "server/rpc/calls/stall_alarm.h"
#include "server/rpc/messages/message_bytes.h"

namespace moeserve::server::rpc {

// Checks the rights of a call and then reads its request, whole and alone. Keeps itself alive until
// OnDone().
template <typename Request>
class SingleRequestCall : public grpc::ServerGenericBidiReactor {
 public:
  // Creates the call, a `Derived`, and begins it. Never null.
  template <typename Derived, typename... Arguments>
  static Derived* Start(Arguments&&... arguments) {
    auto call = std::make_shared<Derived>(std::forward<Arguments>(arguments)...);
    SingleRequestCall& base = *call;
    base.self_ = call;
    if (const absl::Status status = base.call_.Check(); status.ok()) {
      base.StartRead(&base.bytes_);
    } else {
      base.Refuse(status);
    }
    return call.get();
  }

  void OnReadDone(bool ok) final;
  // Classes that override this must call it last.
  void OnDone() override { self_.reset(); }

 protected:
  SingleRequestCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                    const Method& method)
      : context_(context),
        method_(method),
        call_(context, server, method),
        charge_(server.call_memory()) {}

  // Runs the call. An error ends it. Called at most once.
  virtual absl::Status Run(const Request& request) = 0;
  // Ends the call unless it has ended.
  virtual void Refuse(const absl::Status& status) = 0;

  Call& call() { return call_; }
  // The memory of the request and of what derived classes add. Held until OnDone().
  MemoryCharge& charge() { return charge_; }
  // Must not be used after OnDone().
  std::weak_ptr<void> weak_self() const { return self_; }

 private:
  grpc::GenericCallbackServerContext* const context_;
  const Method& method_;
  Call call_;
  MemoryCharge charge_;
  grpc::ByteBuffer bytes_;
  std::unique_ptr<Request> request_;  // that has arrived
  std::shared_ptr<void> self_;
};

template <typename Request>
void SingleRequestCall<Request>::OnReadDone(bool ok) {
  absl::Status status;
  try {
    if (!ok && context_->IsCancelled()) {
      status = call_.CancelReason();
    } else if (request_ != nullptr) {
      // The client has ended its side, or sent something behind the request.
      status = ok ? SecondMessage(method_) : Run(*request_);
      request_.reset();
    } else if (ok) {
      request_ = std::make_unique<Request>();
      status = ParseMessage(method_, bytes_, charge_, *request_);
      bytes_.Clear();
      if (status.ok()) return StartRead(&bytes_);
    } else {
      status = NoMessage(method_);
    }
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (!status.ok()) Refuse(status);
}

// A call that answers with one message, too. A client that does not read it within the time that
// streams have for a write loses the call.
template <typename Request, typename Response>
class UnaryCall : public SingleRequestCall<Request> {
 public:
  void OnCancel() final {
    Cancel();
    EndOnce(this->call().CancelReason());
  }
  void OnDone() override {
    stall_alarm_.Cancel();
    SingleRequestCall<Request>::OnDone();
  }

 protected:
  UnaryCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
            const Method& method)
      : SingleRequestCall<Request>(context, server, method), stall_alarm_(context, server) {}

  // Learns that the client needs no answer any more. May be called before Run() and at any time.
  virtual void Cancel() {}
  // Finishes the call, with response() if `status` is OK. Later calls do nothing. Thread-safe.
  void EndOnce(const absl::Status& status);
  void Refuse(const absl::Status& status) final { EndOnce(status); }

  // Must not be used after EndOnce().
  Response& response() { return response_; }

 private:
  Response response_;
  grpc::ByteBuffer response_bytes_;
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  StallAlarm stall_alarm_;
};

template <typename Request, typename Response>
void UnaryCall<Request, Response>::EndOnce(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
  }
  const grpc::Status end = this->call().End(status);
  if (end.ok()) {
    SerializeMessage(response_, response_bytes_);
    stall_alarm_.Watch(this->weak_self());
    this->StartWriteAndFinish(&response_bytes_, {}, end);
  } else {
    this->Finish(end);
  }
}

// A call that does not wait for the engine. `Body` computes the response: it is called with the
// call's key or null, the request, the response, and the charge for memory that is held until the
// response was sent; it returns an absl::Status.
template <typename Request, typename Response, typename Body>
class ImmediateCall final : public UnaryCall<Request, Response> {
 public:
  ImmediateCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                const Method& method, const Body& body)
      : UnaryCall<Request, Response>(context, server, method), body_(body) {}

 private:
  absl::Status Run(const Request& request) override {
    MOESERVE_RETURN_IF_ERROR(
        body_(this->call().key().get(), request, this->response(), this->charge()));
    this->EndOnce(absl::OkStatus());
    return absl::OkStatus();
  }

  const Body body_;
};

}  // namespace moeserve::server::rpc
