// Requests and answers of the Open Inference Protocol over HTTP.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/base/json.h"
#include "server/models/model_registry.h"
#include "server/open_inference/infer_run.h"

namespace moeserve::server {

// Parses the body of an `infer` request, without model and version. `bytes` are those after the
// JSON: the elements of inputs with the parameter `binary_data_size`, in their order.
Result<InferRequest> ParseInfer(const Json& body, std::string_view bytes);

// Parses the body of a `generate` request: members with the names of inputs become inputs, all
// others parameters. The members of `parameters` count as members of the body.
Result<InferRequest> ParseGenerate(const Json& body);

struct InferBody {
  std::string body;
  // The size of the JSON if bytes follow it.
  std::optional<size_t> json_bytes;
};
// Returns the body of the response to an `infer` request.
InferBody InferResponseBody(const InferAnswer& answer);

// Returns the body of the response to a `generate` request, or of one event of its stream.
std::string GenerateResponseBody(const InferAnswer& answer);

// These return the bodies of the responses about the server and its models.
OrderedJson ServerMetadataJson();
OrderedJson ModelMetadataJson(const ModelStatus& model, std::string_view name, InferKind kind);
OrderedJson RepositoryIndexJson(const std::vector<ModelStatus>& models);
// The reason of a model whose last load failed. The error itself can name paths of the machine.
inline constexpr std::string_view kLoadFailed = "the last load failed; the server's log says why";
// Returns READY, LOADING or UNAVAILABLE.
std::string_view RepositoryState(const ModelStatus& model);

}  // namespace moeserve::server
