#include "server/rpc/inference/infer_messages.h"

#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/open_inference/description.h"
#include "server/open_inference/tensor_bytes.h"

namespace moeserve::server::rpc {
namespace {

constexpr int kMaxDimensions = 8;

Result<Json> Value(const std::string& name, const inference::InferParameter& parameter) {
  using Choice = inference::InferParameter;
  switch (parameter.parameter_choice_case()) {
    case Choice::kBoolParam:
      return Json(parameter.bool_param());
    case Choice::kInt64Param:
      // Non-negative numbers are unsigned, as those that come from JSON.
      if (parameter.int64_param() >= 0) return Json(static_cast<uint64_t>(parameter.int64_param()));
      return Json(parameter.int64_param());
    case Choice::kStringParam:
      return Json(parameter.string_param());
    case Choice::kDoubleParam:
      return Json(parameter.double_param());
    case Choice::kUint64Param:
      return Json(parameter.uint64_param());
    case Choice::PARAMETER_CHOICE_NOT_SET:
      break;
  }
  return InvalidValue(name, Concat("the parameter '", Printable(name, 64), "' has no value"));
}

template <typename Values>
void Append(const Values& values, std::vector<Json>& out) {
  for (const auto& value : values) out.emplace_back(value);
}

// Copies the elements of all fields: CheckTensor() refuses those that do not fit the data type.
absl::Status ReadContents(const inference::InferTensorContents& from, InferTensor& to) {
  const int64_t count = int64_t{from.bool_contents_size()} + from.int_contents_size() +
                        from.int64_contents_size() + from.uint_contents_size() +
                        from.uint64_contents_size() + from.fp32_contents_size() +
                        from.fp64_contents_size() + from.bytes_contents_size();
  if (count > kMaxTensorElements) {
    return InvalidValue(to.name, Concat("'", Printable(to.name, 64), "': expected at most ",
                                        kMaxTensorElements, " elements, found ", count));
  }
  Append(from.bool_contents(), to.data);
  Append(from.int_contents(), to.data);
  Append(from.int64_contents(), to.data);
  Append(from.uint_contents(), to.data);
  Append(from.uint64_contents(), to.data);
  Append(from.fp32_contents(), to.data);
  Append(from.fp64_contents(), to.data);
  Append(from.bytes_contents(), to.data);
  return absl::OkStatus();
}

Result<InferTensor> ReadInput(const inference::ModelInferRequest::InferInputTensor& input,
                              const std::string* raw) {
  InferTensor out;
  out.name = input.name();
  out.datatype = input.datatype();
  if (input.shape_size() > kMaxDimensions) {
    return InvalidValue(out.name, Concat("'", Printable(out.name, 64), "': expected a shape of at ",
                                         "most ", kMaxDimensions, " dimensions"));
  }
  out.shape.assign(input.shape().begin(), input.shape().end());
  if (input.parameters().contains("shared_memory_region")) {
    return InvalidValue(out.name, Concat("'", Printable(out.name, 64),
                                         "': shared memory is not supported; send the elements"));
  }
  if (raw == nullptr) {
    MOESERVE_RETURN_IF_ERROR(ReadContents(input.contents(), out));
  } else {
    if (input.has_contents()) {
      return InvalidValue(out.name, Concat("'", Printable(out.name, 64),
                                           "': either contents or raw_input_contents can be set"));
    }
    MOESERVE_RETURN_IF_ERROR(ReadElements(*raw, out));
  }
  return out;
}

}  // namespace

Result<InferRequest> ParseInfer(const inference::ModelInferRequest& request) {
  InferRequest out;
  out.model = request.model_name();
  out.version = request.model_version();
  out.id = request.id();
  for (const auto& [name, parameter] : request.parameters()) {
    MOESERVE_ASSIGN_OR_RETURN(Json value, Value(name, parameter));
    MOESERVE_RETURN_IF_ERROR(out.Add(name, std::move(value)));
  }
  const int raw = request.raw_input_contents_size();
  if (raw > 0 && raw != request.inputs_size()) {
    return InvalidValue("raw_input_contents",
                        Concat("'raw_input_contents': expected none or one for each input, found ",
                               raw, " for ", request.inputs_size()));
  }
  for (int i = 0; i < request.inputs_size(); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(
        InferTensor tensor,
        ReadInput(request.inputs(i), raw > 0 ? &request.raw_input_contents(i) : nullptr));
    MOESERVE_RETURN_IF_ERROR(out.Add(std::move(tensor)));
  }
  if (static_cast<size_t>(request.outputs_size()) > kMaxInferTensors) {
    return InvalidValue("outputs", Concat("'outputs': expected at most ", kMaxInferTensors));
  }
  for (const auto& output : request.outputs()) out.outputs.push_back({output.name(), false});
  return out;
}

void Fill(const InferAnswer& answer, bool raw, inference::ModelInferResponse& to) {
  to.set_model_name(answer.model);
  to.set_model_version(answer.version);
  to.set_id(answer.id);
  if (answer.streamed) {
    static const std::string* const kName = new std::string("triton_final_response");
    (*to.mutable_parameters())[*kName].set_bool_param(answer.last);
  }
  for (const InferTensor& tensor : answer.outputs) {
    auto& output = *to.add_outputs();
    output.set_name(tensor.name);
    output.set_datatype(tensor.datatype);
    output.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    if (raw) {
      to.add_raw_output_contents(ElementBytes(tensor));
      continue;
    }
    for (const Json& value : tensor.data) {
      if (tensor.datatype == "BYTES") {
        output.mutable_contents()->add_bytes_contents(value.get_ref<const std::string&>());
      } else if (tensor.datatype == "FP32") {
        output.mutable_contents()->add_fp32_contents(value.get<float>());
      } else {
        output.mutable_contents()->add_uint_contents(value.get<uint32_t>());
      }
    }
  }
}

void Fill(const ModelStatus& model, const std::string& name, InferKind kind,
          inference::ModelMetadataResponse& to) {
  to.set_name(name);
  to.add_versions(std::to_string(model.version));
  to.set_platform(std::string(kInferPlatform));
  const auto fill = [](const TensorDescription& tensor, auto& out) {
    out.set_name(std::string(tensor.name));
    out.set_datatype(std::string(tensor.datatype));
    out.add_shape(-1);
    if (IsMatrix(tensor)) out.add_shape(-1);
  };
  for (const TensorDescription& tensor : TensorsOf(kind).inputs) fill(tensor, *to.add_inputs());
  for (const TensorDescription& tensor : TensorsOf(kind).outputs) fill(tensor, *to.add_outputs());
}

}  // namespace moeserve::server::rpc
