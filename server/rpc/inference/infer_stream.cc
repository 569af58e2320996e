#include "server/rpc/inference/infer_stream.h"

#include <optional>
#include <utility>

#include "base/steady_clock.h"
#include "server/base/status_conversion.h"
#include "server/rpc/inference/infer_messages.h"
#include "server/rpc/messages/message_bytes.h"

namespace moeserve::server::rpc {
namespace {

inference::ModelStreamInferResponse ErrorMessage(const std::string& id,
                                                 const absl::Status& status) {
  inference::ModelStreamInferResponse out;
  out.set_error_message(ToHttpError(status).message);
  out.mutable_infer_response()->set_id(id);
  return out;
}

}  // namespace

InferStream::InferStream(grpc::GenericCallbackServerContext* context, ServerContext& server,
                         Dispatcher& dispatcher)
    : server_(server),
      queue_(dispatcher.queue()),
      call_(context, server, kModelStreamInfer),
      charge_(server.call_memory()),
      stall_alarm_(context, server) {}

std::shared_ptr<InferStream> InferStream::Start(grpc::GenericCallbackServerContext* context,
                                                ServerContext& server, Dispatcher& dispatcher) {
  auto stream = std::make_shared<InferStream>(context, server, dispatcher);
  stream->self_ = stream;
  absl::Status status = stream->call_.Check();
  if (status.ok()) status = server.CheckServing();
  if (!status.ok()) {
    MutexLock lock(stream->mutex_);
    stream->input_ended_ = true;
    stream->end_ = status;
  }
  stream->Advance();
  return stream;
}

absl::Status InferStream::Begin(const inference::ModelInferRequest& request) {
  const uint64_t number = requests_++;
  // The call itself counts as the first request.
  if (number > 0 && call_.key() != nullptr) MOESERVE_RETURN_IF_ERROR(call_.key()->TakeRequest());
  MOESERVE_RETURN_IF_ERROR(server_.CheckServing());
  MOESERVE_ASSIGN_OR_RETURN(const InferRequest parsed, ParseInfer(request));
  MOESERVE_ASSIGN_OR_RETURN(
      std::shared_ptr<InferRun> run,
      InferRun::Prepare(server_, parsed, Pieces::kOnRequest, call_.key(), nullptr));
  {
    MutexLock lock(mutex_);
    running_[number] = {
        .run = run, .id = request.id(), .raw = request.raw_input_contents_size() > 0};
  }
  if (!run->NeedsCompiling()) {
    const absl::Status status = Launch(number, run);
    if (!status.ok()) Refuse(number, request.id(), status);
    return absl::OkStatus();
  }
  const absl::Status posted = PrepareLater(
      server_, call_.client(),
      [self = shared_from_this(), number, run] { return self->Launch(number, run); },
      [self = shared_from_this(), number, id = request.id()](const absl::Status& status) {
        if (!status.ok()) self->Refuse(number, id, status);
        self->Advance();
      });
  if (!posted.ok()) Refuse(number, request.id(), posted);
  return absl::OkStatus();
}

absl::Status InferStream::Launch(uint64_t number, const std::shared_ptr<InferRun>& run) {
  // Compiles without the lock, so that the call can be cancelled meanwhile.
  MOESERVE_RETURN_IF_ERROR(run->Compile());
  MutexLock lock(mutex_);
  const auto found = running_.find(number);
  if (found == running_.end()) return absl::OkStatus();  // was cancelled
  const absl::Time deadline = SteadyNow() + server_.settings().limits.max_request_time;
  MOESERVE_RETURN_IF_ERROR(run->Launch(deadline, AdvanceOn(queue_, weak_from_this())));
  found->second.launched = true;
  return absl::OkStatus();
}

void InferStream::Refuse(uint64_t number, const std::string& id, const absl::Status& status) {
  if (status.code() == absl::StatusCode::kInvalidArgument) {
    server_.metrics().CountRejected(Rejection::kInvalid);
  }
  MutexLock lock(mutex_);
  running_.erase(number);
  if (!cancelled_) ready_.push_back(ErrorMessage(id, status));
}

void InferStream::Collect() {
  for (auto it = running_.begin(); it != running_.end();) {
    Running& running = it->second;
    if (!running.launched) {
      ++it;
      continue;
    }
    Result<std::optional<InferAnswer>> answer = running.run->Take();
    bool last = true;
    if (!answer.ok()) {
      ready_.push_back(ErrorMessage(running.id, answer.status()));
    } else if (*answer) {
      Fill(**answer, running.raw, *ready_.emplace_back().mutable_infer_response());
      last = (*answer)->last;
    } else {
      last = false;
    }
    it = last ? running_.erase(it) : std::next(it);
  }
}

void InferStream::Advance() {
  bool read = false;
  bool write = false;
  bool end = false;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    if (writing_) {
      for (auto& [number, running] : running_) {
        if (running.launched && running.run->overflowed()) running.run->Cancel();
      }
      stall_alarm_.Watch(weak_from_this());
    } else if (!cancelled_) {
      if (ready_.empty()) Collect();
      if (!ready_.empty()) {
        SerializeMessage(ready_.front(), writing_bytes_);
        ready_.pop_front();
        writing_ = write = true;
        stall_alarm_.Progress();
        if (running_.empty()) stall_alarm_.Watch(weak_from_this());
      }
    }
    const bool idle = !writing_ && running_.empty();
    if (idle && (input_ended_ || cancelled_)) {
      // A cancelled read ends, too.
      end = !reading_;
    } else if (idle && server_.state() == ServerState::kDraining) {
      end_ = server_.CheckServing();
      end = true;
    } else if (!reading_ && !input_ended_ && !cancelled_ &&
               running_.size() + ready_.size() < kMaxStreamedRequests) {
      reading_ = read = true;
    }
    ended_ = end;
    status = end_;
  }
  // Called without the lock, because gRPC may call back from these functions.
  if (read) StartRead(&request_bytes_);
  if (write) StartWrite(&writing_bytes_);
  if (end) Finish(call_.End(status));
}

void InferStream::Drain() { Advance(); }

absl::Status InferStream::ReadRequest() {
  inference::ModelInferRequest request;
  absl::Status status = ParseMessage(kModelStreamInfer, request_bytes_, charge_, request);
  request_bytes_.Clear();
  charge_.Release();
  MOESERVE_RETURN_IF_ERROR(status);
  status = Caught([&] { return Begin(request); });
  if (!status.ok()) Refuse(requests_, request.id(), status);
  return absl::OkStatus();
}

void InferStream::OnReadDone(bool ok) {
  absl::Status status;
  if (ok) status = Caught([&] { return ReadRequest(); });
  {
    MutexLock lock(mutex_);
    reading_ = false;
    if (!ok || !status.ok()) input_ended_ = true;
    if (!status.ok() && end_.ok()) end_ = status;
  }
  Advance();
}

void InferStream::OnWriteDone(bool ok) {
  {
    MutexLock lock(mutex_);
    writing_ = false;
    stall_alarm_.Progress();
    if (!ok && !cancelled_) {
      CancelAll();
      end_ = call_.CancelReason();
    }
  }
  Advance();
}

void InferStream::OnCancel() {
  {
    MutexLock lock(mutex_);
    if (!cancelled_) {
      CancelAll();
      end_ = call_.CancelReason();
    }
  }
  Advance();
}

void InferStream::CancelAll() {
  cancelled_ = true;
  for (auto& [number, running] : running_) {
    if (running.launched) running.run->Cancel();
  }
  running_.clear();
  ready_.clear();
}

void InferStream::OnDone() {
  {
    MutexLock lock(mutex_);
    ended_ = true;
    CancelAll();
    stall_alarm_.Cancel();
  }
  self_.reset();
}

}  // namespace moeserve::server::rpc
