// One running ModelStreamInfer call.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "inference/grpc_predict_v2.pb.h"
#include "server/open_inference/infer_run.h"
#include "server/rpc/call.h"
#include "server/rpc/calls/stall_alarm.h"
#include "server/rpc/dispatcher.h"

namespace moeserve::server::rpc {

// Limit on the requests of one stream that run at a time, and on their errors that wait for the
// client. The stream reads no further ones meanwhile.
inline constexpr size_t kMaxStreamedRequests = 64;

// Keeps itself alive until OnDone(). At most one read and one write are in progress. Takes output
// from the engine only when the client has taken what was written before.
class InferStream final : public grpc::ServerGenericBidiReactor,
                          public std::enable_shared_from_this<InferStream> {
 public:
  static std::shared_ptr<InferStream> Start(grpc::GenericCallbackServerContext* context,
                                            ServerContext& server, Dispatcher& dispatcher);

  InferStream(grpc::GenericCallbackServerContext* context, ServerContext& server,
              Dispatcher& dispatcher);

  // Starts whatever is possible: a read, a write, the end of the call.
  void Advance();
  // Ends the stream when its requests have ended, although its client could send more.
  void Drain();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Running {
    std::shared_ptr<InferRun> run;
    std::string id;
    bool raw = false;
    bool launched = false;
  };

  // Parses the bytes that were read, and starts the request. An error ends the stream.
  absl::Status ReadRequest();
  // Reads a request and starts it.
  absl::Status Begin(const inference::ModelInferRequest& request);
  absl::Status Launch(uint64_t number, const std::shared_ptr<InferRun>& run);
  // Ends a request that has not started to generate.
  void Refuse(uint64_t number, const std::string& id, const absl::Status& status);
  void Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServerContext& server_;
  const std::shared_ptr<Dispatcher::Queue> queue_;
  Call call_;
  std::shared_ptr<InferStream> self_;
  grpc::ByteBuffer request_bytes_;  // that are being read
  MemoryCharge charge_;             // of the parsed request
  uint64_t requests_ = 0;           // that were read
  grpc::ByteBuffer writing_bytes_;
  StallAlarm stall_alarm_;

  Mutex mutex_;
  std::map<uint64_t, Running> running_ ABSL_GUARDED_BY(mutex_);
  std::deque<inference::ModelStreamInferResponse> ready_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);  // with which the call ends
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool input_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace moeserve::server::rpc
