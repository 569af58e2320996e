#include "server/rpc/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/support/server_callback.h>

#include <set>
#include <string>
#include <string_view>

#include "server/rpc/call.h"
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
    for (const Method* method : kMethods) {
      const std::string name(method->service);
      const auto* service = pool->FindServiceByName(name);
      if (service == nullptr) continue;
      made->services.insert(name);
      AddFile(service->file(), made->files);
    }
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
class Stream final : public grpc::ServerBidiReactor<Request, Response> {
 public:
  Stream(grpc::CallbackServerContext* context, ServerContext& server, const Method& method)
      : context_(context), call_(context, server, method) {
    if (const absl::Status status = call_.Check(); !status.ok()) {
      this->Finish(call_.End(status));
    } else {
      this->StartRead(&request_);
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End();
    Answer(request_, response_);
    this->StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End();
    this->StartRead(&request_);
  }

  void OnDone() override { delete this; }

 private:
  void End() {
    this->Finish(call_.End(context_->IsCancelled() ? call_.CancelReason() : absl::OkStatus()));
  }

  grpc::CallbackServerContext* const context_;
  Call call_;
  Request request_;
  Response response_;
};

}  // namespace

grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                        grpc::reflection::v1alpha::ServerReflectionResponse>*
ReflectionV1Alpha::ServerReflectionInfo(grpc::CallbackServerContext* context) {
  return new Stream<grpc::reflection::v1alpha::ServerReflectionRequest,
                    grpc::reflection::v1alpha::ServerReflectionResponse>(context, server_,
                                                                         kReflectionV1Alpha);
}

grpc::ServerBidiReactor<grpc::reflection::v1::ServerReflectionRequest,
                        grpc::reflection::v1::ServerReflectionResponse>*
ReflectionV1::ServerReflectionInfo(grpc::CallbackServerContext* context) {
  return new Stream<grpc::reflection::v1::ServerReflectionRequest,
                    grpc::reflection::v1::ServerReflectionResponse>(context, server_,
                                                                    kReflectionV1);
}

}  // namespace moeserve::server::rpc
