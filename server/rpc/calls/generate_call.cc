#include "server/rpc/calls/generate_call.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace moeserve::server::rpc {

GenerateCall::GenerateCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
                           Dispatcher& dispatcher)
    : SingleRequestCall(context, server, kGenerate),
      server_(server),
      queue_(dispatcher.queue()),
      stall_alarm_(context, server),
      charge_(server.memory()) {}

void GenerateCall::Refuse(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    ended_ = true;
  }
  End(status);
}

absl::Status GenerateCall::Run(const v1::GenerateRequest& request) {
  const ApiKey* const key = call().key().get();
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server_.ModelFor(request.model(), key));
  const RequestRules rules = server_.Rules(*model, key);
  MOESERVE_ASSIGN_OR_RETURN(CompletionParams params, ParseGenerate(request, rules));
  submission_ = std::make_unique<Submission>(
      server_.Submissions(model, call().key(), call().record()), params, "gen-");
  if (!submission_->NeedsCompiling()) {
    MOESERVE_RETURN_IF_ERROR(Launch(params));
    Advance();  // output may have arrived before generation_ was set
    return absl::OkStatus();
  }
  return PrepareLater(
      server_, call().client(),
      [self = shared_from_this(), params = std::move(params)]() -> absl::Status {
        {
          MutexLock lock(self->mutex_);
          if (self->ended_) return absl::CancelledError();
        }
        MOESERVE_RETURN_IF_ERROR(self->submission_->CompileConstraint());
        return self->Launch(params);
      },
      [self = shared_from_this()](const absl::Status& status) {
        status.ok() ? self->Advance() : self->Refuse(status);
      });
}

absl::Status GenerateCall::Launch(const CompletionParams& params) {
  const Engine& engine = *submission_->engine();
  MOESERVE_ASSIGN_OR_RETURN(auto prompts, PreparePrompts(params, PromptRulesOf(engine)));
  MOESERVE_RETURN_IF_ERROR(submission_->SetPrompts(std::move(prompts)));
  opened_.assign(submission_->num_choices(), false);
  MOESERVE_ASSIGN_OR_RETURN(
      auto generation,
      submission_->Start(call().engine_deadline(), AdvanceOn(queue_, weak_from_this())));
  MutexLock lock(mutex_);
  if (!ended_) generation_ = std::move(generation);
  return absl::OkStatus();
}

v1::GenerateResponse GenerateCall::NewMessage(int choice) {
  v1::GenerateResponse message;
  const GenerationParams& params = submission_->params();
  message.set_id(submission_->id());
  message.set_model(params.model);
  message.set_index(static_cast<uint32_t>(choice));
  if (!opened_[choice]) {
    opened_[choice] = true;
    if (params.routing.control != nullptr) {
      Fill(params.routing.control->change(), *message.mutable_routing_control());
    }
  }
  return message;
}

RoutingRecord GenerateCall::SendRoutesAhead(int choice, const RoutingRecord& record,
                                            bool of_source) {
  // The limit per message is far below 4 MiB, the largest message that gRPC clients accept by
  // default.
  constexpr size_t kMostBytes = 1 << 19;
  constexpr size_t kOffsetBytes = 5;  // most bytes of a 32-bit varint
  constexpr size_t kRouteBytes = 3 + sizeof(float);
  const RoutingParams& params = submission_->params().routing;
  const RouteLayout& layout = of_source ? *params.source_layout : *params.layout;
  const int rows = layout.rows_per_token;
  int begin = 0;
  size_t bytes = 0;
  for (int t = 0; t < record.tokens; ++t) {
    const size_t first = static_cast<size_t>(t) * static_cast<size_t>(rows);
    const size_t routes = record.offsets[first + static_cast<size_t>(rows)] - record.offsets[first];
    const size_t token = static_cast<size_t>(rows) * kOffsetBytes + routes * kRouteBytes;
    if (t > begin && bytes + token > kMostBytes) {
      v1::GenerateResponse message = NewMessage(choice);
      Fill(Slice(record, begin, t, rows), layout,
           of_source ? *message.mutable_source_routing() : *message.mutable_routing());
      ready_.push_back(std::move(message));
      begin = t;
      bytes = 0;
    }
    bytes += token;
  }
  return Slice(record, begin, record.tokens, rows);
}

absl::Status GenerateCall::Collect() {
  charge_.Release();  // the messages collected before have been written
  for (ChoiceEvent& event : generation_->Take()) {
    if (!event.error.ok()) return event.error;
    if (event.delta.absent) continue;
    std::optional<RoutingRecord> routes;
    std::optional<RoutingRecord> source;
    if (event.delta.source_routing) {
      source = SendRoutesAhead(event.choice, *event.delta.source_routing, true);
    }
    if (event.delta.routing) routes = SendRoutesAhead(event.choice, *event.delta.routing, false);
    v1::GenerateResponse message = NewMessage(event.choice);
    const RoutingParams& routing = submission_->params().routing;
    if (source) Fill(*source, *routing.source_layout, *message.mutable_source_routing());
    if (routes) {
      Fill(*routes, *routing.layout, *message.mutable_routing());
    }
    MOESERVE_RETURN_IF_ERROR(Fill(event.delta, submission_->PromptOf(event.choice),
                                  submission_->engine()->tokenizer(), message));
    MOESERVE_RETURN_IF_ERROR(charge_.Add(message.ByteSizeLong(), ChargeFor::kRunningRequest));
    ready_.push_back(std::move(message));
  }
  return absl::OkStatus();
}

void GenerateCall::Advance() {
  absl::Status end;
  bool write = false;
  {
    MutexLock lock(mutex_);
    if (ended_ || generation_ == nullptr) return;
    if (writing_) {
      if (generation_->overflowed()) generation_->Cancel();
      stall_alarm_.Watch(weak_from_this());
      return;
    }
    if (ready_.empty() && failure_.ok()) failure_ = Collect();
    if (!ready_.empty()) {
      SerializeMessage(ready_.front(), writing_bytes_);
      ready_.pop_front();
      writing_ = write = true;
      stall_alarm_.Progress();
      if (generation_->finished()) stall_alarm_.Watch(weak_from_this());
    } else if (!failure_.ok()) {
      generation_->Cancel();
      end = failure_;
      ended_ = true;
    } else if (generation_->finished()) {
      ended_ = true;
    } else {
      return;
    }
  }
  // Called without the lock, because gRPC may call back from these functions.
  if (write) {
    StartWrite(&writing_bytes_);
  } else {
    End(end);
  }
}

void GenerateCall::OnWriteDone(bool ok) {
  {
    MutexLock lock(mutex_);
    writing_ = false;
    stall_alarm_.Progress();
    if (!ok) {
      if (generation_ != nullptr) generation_->Cancel();
      ready_.clear();
      if (failure_.ok()) failure_ = call().CancelReason();
    }
  }
  Advance();
}

void GenerateCall::OnCancel() {
  bool end = false;
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    if (generation_ != nullptr) generation_->Cancel();
    ready_.clear();
    failure_ = call().CancelReason();
    if (!writing_) end = ended_ = true;
  }
  if (end) End(call().CancelReason());
}

void GenerateCall::End(const absl::Status& status) { Finish(call().End(status)); }

void GenerateCall::OnDone() {
  {
    MutexLock lock(mutex_);
    ended_ = true;
    generation_.reset();
    stall_alarm_.Cancel();
  }
  SingleRequestCall::OnDone();
}

}  // namespace moeserve::server::rpc
