#include "tests/server/generic_call.h"

#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <vector>

namespace moeserve::server::testing {

grpc::Status GenericUnaryCall(const std::shared_ptr<grpc::Channel>& channel,
                              const std::string& method, const std::string& request,
                              std::string* response, bool streaming,
                              const std::vector<std::string>& authorizations) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  for (const std::string& value : authorizations) context.AddMetadata("authorization", value);
  const auto wait = [&] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  grpc::Slice slice(request);
  grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::Status status;
  if (streaming) {
    const auto call = stub.PrepareCall(&context, method, &queue);
    call->StartCall(nullptr);
    wait();
    call->Write(out, nullptr);
    wait();
    call->Read(&in, nullptr);
    wait();
    call->WritesDone(nullptr);
    wait();
    call->Finish(&status, nullptr);
    wait();
  } else {
    const auto call = stub.PrepareUnaryCall(&context, method, out, &queue);
    call->StartCall();
    call->Finish(&in, &status, nullptr);
    wait();
  }
  std::vector<grpc::Slice> slices;
  response->clear();
  if (in.Valid() && in.Dump(&slices).ok()) {
    for (const grpc::Slice& s : slices) {
      response->append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
  }
  return status;
}

}  // namespace moeserve::server::testing
