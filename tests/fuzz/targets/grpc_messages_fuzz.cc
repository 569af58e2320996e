// The messages of clients over gRPC. The first byte says which message it is (kKinds), the second
// one which of the server's options are set.

#include <memory>
#include <string>
#include <utility>

#include "base/strict_json.h"
#include "inference/grpc_predict_v2.pb.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/completions/completion_request.h"
#include "server/rpc/inference/infer_messages.h"
#include "server/rpc/messages/messages.h"
#include "tests/fuzz/bundled_model.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server::rpc {
namespace {

using testing::BundledModel;

constexpr std::string_view kCallKinds = "gstdi";

// A change of routing that is written is read as the same.
void CheckControl(const CompletionParams& params, const RequestRules& rules) {
  if (params.routing.control == nullptr) return;
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  Fill(params.routing.control->change(), *request.mutable_routing_control());
  const Result<CompletionParams> again = ParseGenerate(request, rules);
  MOESERVE_CHECK(again.ok() && again->routing.control != nullptr, "the change is accepted");
  MOESERVE_CHECK(again->routing.control->key() == params.routing.control->key(), "the same change");
}

template <typename Message>
bool ReadMessage(std::string_view bytes, Message& message) {
  return message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

// Returns whether the message is valid, and what the server makes of the request.
bool RunGenerate(std::string_view bytes, const RequestRules& rules,
                 const std::shared_ptr<MemoryBudget>& memory) {
  v1::GenerateRequest request;
  if (!ReadMessage(bytes, request)) return false;
  const Result<CompletionParams> params = ParseGenerate(request, rules);
  if (!params.ok()) return false;
  CheckControl(*params, rules);
  return BundledModel::Get().Admit(*params, memory).ok();
}

bool RunScore(std::string_view bytes, const RequestRules& rules,
              const std::shared_ptr<MemoryBudget>& memory) {
  v1::ScoreRequest request;
  if (!ReadMessage(bytes, request)) return false;
  const Result<CompletionParams> params = ParseScore(request, rules);
  return params.ok() && BundledModel::Get().Admit(*params, memory).ok();
}

bool RunTokenizeCall(std::string_view bytes) {
  v1::TokenizeRequest request;
  if (!ReadMessage(bytes, request)) return false;
  return BundledModel::Get().tokenizer().Encode(request.text(), true).ok();
}

bool RunDetokenizeCall(std::string_view bytes) {
  v1::DetokenizeRequest request;
  if (!ReadMessage(bytes, request)) return false;
  const std::vector<TokenId> ids(request.token_ids().begin(), request.token_ids().end());
  return BundledModel::Get().tokenizer().Decode(ids, false).ok();
}

bool RunInferCall(std::string_view bytes, const RequestRules& rules, Pieces pieces,
                  const std::shared_ptr<MemoryBudget>& memory) {
  inference::ModelInferRequest request;
  if (!ReadMessage(bytes, request)) return false;
  const Result<InferRequest> infer = ParseInfer(request);
  if (!infer.ok()) return false;
  InferSettings settings;
  Result<nlohmann::json> body = CompletionBody(*infer, pieces, settings);
  if (!body.ok()) return false;
  const Result<CompletionParams> params = ParseCompletion(*body, rules);
  ClearJson(*body);
  if (!params.ok()) return false;
  return BundledModel::Get().Admit(*params, memory).ok();
}

}  // namespace
}  // namespace moeserve::server::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;               // NOLINT(google-build-using-namespace)
  using namespace moeserve::server::rpc;  // NOLINT(google-build-using-namespace)
  // The library logs every text that is not UTF-8.
  static const google::protobuf::LogSilencer silence;
  testing::Input input(data, size);
  char kind = static_cast<char>(input.Byte());
  if (kCallKinds.find(kind) == std::string_view::npos) {
    kind = kCallKinds[static_cast<uint8_t>(kind) % kCallKinds.size()];
  }
  const uint8_t options = input.Byte();
  const server::RequestRules rules = testing::BundledModel::Get().Rules(options);
  const auto memory = std::make_shared<server::MemoryBudget>(16 << 20);
  const std::string_view bytes = input.rest();
  bool accepted = false;
  if (kind == 'g') accepted = RunGenerate(bytes, rules, memory);
  if (kind == 's') accepted = RunScore(bytes, rules, memory);
  if (kind == 't') accepted = RunTokenizeCall(bytes);
  if (kind == 'd') accepted = RunDetokenizeCall(bytes);
  if (kind == 'i') {
    const auto pieces = options % 2 == 0 ? server::Pieces::kNever : server::Pieces::kOnRequest;
    accepted = RunInferCall(bytes, rules, pieces, memory);
  }
  if (accepted) testing::CountAccepted();
  MOESERVE_CHECK(memory->used() == 0, "all memory is given back");
  return 0;
}
