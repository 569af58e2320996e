// Implements the service of proto/inference/grpc_predict_v2.proto, the Open Inference Protocol.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "server/context.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/inference/infer_stream.h"
#include "server/rpc/router.h"

namespace moeserve::server::rpc {

class OpenInferenceService final {
 public:
  // Adds the calls of the service to `router`. `server`, `dispatcher` and the service must outlive
  // every call.
  OpenInferenceService(Router& router, ServerContext& server, Dispatcher& dispatcher);

  // Ends the streams that have no running request, and the others when they have none. The server
  // must be draining.
  void Drain();

 private:
  InferStream* StartStream(grpc::GenericCallbackServerContext* context);

  ServerContext& server_;
  Dispatcher& dispatcher_;
  Mutex mutex_;
  // Also some that have ended.
  std::vector<std::weak_ptr<InferStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::server::rpc
