// Converts the messages of proto/inference/grpc_predict_v2.proto. All functions are pure.
#pragma once

#include "base/status.h"
#include "inference/grpc_predict_v2.pb.h"
#include "server/models/model_registry.h"
#include "server/open_inference/infer_request.h"
#include "server/open_inference/infer_run.h"

namespace moeserve::server::rpc {

// Reads a request. An error names the tensor or the parameter.
Result<InferRequest> ParseInfer(const inference::ModelInferRequest& request);

// Converts an answer; `raw` sends the elements as bytes.
void Fill(const InferAnswer& answer, bool raw, inference::ModelInferResponse& to);
void Fill(const ModelStatus& model, const std::string& name, InferKind kind,
          inference::ModelMetadataResponse& to);

}  // namespace moeserve::server::rpc
