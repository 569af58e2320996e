// One running Encode call.
#pragma once

#include <memory>

#include "base/mutex.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/encode/encode_run.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

class EncodeCall final : public UnaryCall<v1::EncodeRequest, v1::EncodeResponse>,
                         public std::enable_shared_from_this<EncodeCall> {
 public:
  EncodeCall(grpc::GenericCallbackServerContext* context, ServerContext& server,
             Dispatcher& dispatcher);

  void Advance();  // takes what the engine has computed
  void OnDone() override;

 private:
  absl::Status Run(const v1::EncodeRequest& request) override;
  void Cancel() override;

  ServerContext& server_;
  Dispatcher& dispatcher_;

  Mutex mutex_;
  std::unique_ptr<EncodeRun> run_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // whether the client waits no longer
};

}  // namespace moeserve::server::rpc
