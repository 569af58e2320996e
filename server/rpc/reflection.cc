#include "server/rpc/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/generic/async_generic_service.h>

#include <set>
#include <string>
#include <string_view>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/rpc/call.h"
#include "server/rpc/messages/message_bytes.h"
#include "server/rpc/methods.h"

namespace moeserve::server::rpc {
namespace {

using google::protobuf::FileDescriptor;

// The services, and the files that declare them. The program's other protobuf files are no part of
// the interface.
struct Interface {
  std::set<std::string> services;
  std::set<const FileDescriptor*> files;
};

void AddFile(const FileDescriptor* file, std::set<const FileDescriptor*>& files) {
  if (!files.insert(file).second) return;
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), files);
}

const Interface& PublicInterface() {
  static const Interface* const interface = [] {
    auto* made = new Interface();
    const auto* pool = google::protobuf::DescriptorPool::generated_pool();
    std::set<std::string_view> names = {kHealth};
    for (const Method* method : kMethods) names.insert(method->service);
    for (const std::string_view name : names) {
      const auto* service = pool->FindServiceByName(std::string(name));
      if (service == nullptr) continue;
      made->services.emplace(name);
      AddFile(service->file(), made->files);
    }
    // What errors carry in the trailer grpc-status-details-bin.
    AddFile(google::rpc::Status::descriptor()->file(), made->files);
    AddFile(google::rpc::ErrorInfo::descriptor()->file(), made->files);
    return made;
  }();
  return *interface;
}

template <typename Response>
void SetError(grpc::StatusCode code, const char* message, Response& response) {
  auto& error = *response.mutable_error_response();
  error.set_error_code(code);
  error.set_error_message(message);
}

template <typename Response>
void AnswerFile(const FileDescriptor* file, Response& response) {
  if (file == nullptr || !PublicInterface().files.contains(file)) {
    SetError(grpc::StatusCode::NOT_FOUND, "there is no such file or symbol", response);
    return;
  }
  std::set<const FileDescriptor*> files;
  AddFile(file, files);
  auto& out = *response.mutable_file_descriptor_response();
  for (const FileDescriptor* each : files) {
    google::protobuf::FileDescriptorProto proto;
    each->CopyTo(&proto);
    out.add_file_descriptor_proto(proto.SerializeAsString());
  }
}

template <typename Request, typename Response>
void Answer(const Request& request, Response& response) {
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  response.Clear();
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case Request::kListServices:
      for (const std::string& name : PublicInterface().services) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      return;
    case Request::kFileByFilename:
      return AnswerFile(pool->FindFileByName(request.file_by_filename()), response);
    case Request::kFileContainingSymbol:
      return AnswerFile(pool->FindFileContainingSymbol(request.file_containing_symbol()), response);
    case Request::kFileContainingExtension:
      SetError(grpc::StatusCode::NOT_FOUND, "the interface has no extensions", response);
      return;
    case Request::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const auto* type = pool->FindMessageTypeByName(name);
      if (type == nullptr || !PublicInterface().files.contains(type->file())) {
        SetError(grpc::StatusCode::NOT_FOUND, "there is no such type", response);
      } else {
        response.mutable_all_extension_numbers_response()->set_base_type_name(name);
      }
      return;
    }
    case Request::MESSAGE_REQUEST_NOT_SET:
      SetError(grpc::StatusCode::INVALID_ARGUMENT, "the request asks for nothing", response);
      return;
  }
}

// One call. Reads a request, writes its response, and so on. Deletes itself when it is done.
template <typename Request, typename Response>
class Stream final : public grpc::ServerGenericBidiReactor {
 public:
  Stream(grpc::GenericCallbackServerContext* context, ServerContext& server, const Method& method)
      : context_(context),
        method_(method),
        call_(context, server, method),
        charge_(server.call_memory()) {
    if (const absl::Status status = call_.Check(); !status.ok()) {
      Finish(call_.End(status));
    } else {
      StartRead(&bytes_);
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End();
    Request request;
    const absl::Status status = ParseMessage(method_, bytes_, charge_, request);
    if (!status.ok()) return Finish(call_.End(status));
    charge_.Release();
    Response response;
    Answer(request, response);
    SerializeMessage(response, bytes_);
    StartWrite(&bytes_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End();
    bytes_.Clear();
    StartRead(&bytes_);
  }

  void OnDone() override { delete this; }

 private:
  void End() {
    Finish(call_.End(context_->IsCancelled() ? call_.CancelReason() : absl::OkStatus()));
  }

  grpc::GenericCallbackServerContext* const context_;
  const Method& method_;
  Call call_;
  MemoryCharge charge_;
  grpc::ByteBuffer bytes_;  // that are being read or written
};

template <typename Request, typename Response>
void AddVersion(Router& router, ServerContext& server, const Method& method) {
  router.Add(method, [&](grpc::GenericCallbackServerContext* context) {
    return new Stream<Request, Response>(context, server, method);
  });
}

}  // namespace

void AddReflection(Router& router, ServerContext& server) {
  namespace v1alpha = grpc::reflection::v1alpha;
  AddVersion<v1alpha::ServerReflectionRequest, v1alpha::ServerReflectionResponse>(
      router, server, kReflectionV1Alpha);
  namespace v1 = grpc::reflection::v1;
  AddVersion<v1::ServerReflectionRequest, v1::ServerReflectionResponse>(router, server,
                                                                        kReflectionV1);
}

}  // namespace moeserve::server::rpc
