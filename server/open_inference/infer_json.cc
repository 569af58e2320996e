#include "server/open_inference/infer_json.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/answers/answer.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/version.h"
#include "server/open_inference/description.h"
#include "server/open_inference/tensor_bytes.h"

namespace moeserve::server {
namespace {

absl::Status Expected(const std::string& param, std::string_view what) {
  return InvalidValue(param, Concat("'", Printable(param, 64), "': expected ", what));
}

// Adds the elements of a list, whose members may be lists again, in row-major order.
absl::Status Flatten(const std::string& name, const Json& list, std::vector<Json>& out) {
  for (const Json& value : list) {
    if (value.is_array()) {
      MOESERVE_RETURN_IF_ERROR(Flatten(name, value, out));
    } else if (value.is_primitive() && !value.is_null()) {
      if (static_cast<int64_t>(out.size()) >= kMaxTensorElements) {
        return Expected(name, Concat("at most ", kMaxTensorElements, " elements"));
      }
      out.push_back(value);
    } else {
      return Expected(name, "strings, booleans or numbers as elements");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadParameters(const Json& parameters, InferRequest& out) {
  if (!parameters.is_object()) return Expected("parameters", "an object");
  for (const auto& [name, value] : parameters.items()) {
    if (!value.is_null()) MOESERVE_RETURN_IF_ERROR(out.Add(name, value));
  }
  return absl::OkStatus();
}

Result<std::vector<int64_t>> ReadShape(const std::string& tensor, const Json& object) {
  const Json* shape = FindField(object, "shape");
  constexpr size_t kMaxDimensions = 8;
  if (shape == nullptr || !shape->is_array() || shape->size() > kMaxDimensions) {
    return Expected(tensor, "a 'shape' with at most 8 dimensions");
  }
  std::vector<int64_t> out;
  for (const Json& size : *shape) {
    const auto value = AsInteger(size);
    if (!value) return Expected(tensor, "integers in its 'shape'");
    out.push_back(*value);
  }
  return out;
}

// Reads one input. Takes its elements from the start of `bytes` if they are not in the JSON.
Result<InferTensor> ReadInput(const Json& object, std::string_view& bytes) {
  if (!object.is_object()) return Expected("inputs", "a list of objects");
  InferTensor out;
  MOESERVE_ASSIGN_OR_RETURN(auto name, StringField(object, "name"));
  if (!name) return Expected("inputs", "a 'name' in each object");
  out.name = *std::move(name);
  MOESERVE_ASSIGN_OR_RETURN(auto datatype, StringField(object, "datatype"));
  if (!datatype) return Expected(out.name, "a 'datatype'");
  out.datatype = *std::move(datatype);
  MOESERVE_ASSIGN_OR_RETURN(out.shape, ReadShape(out.name, object));
  std::optional<int64_t> size;
  if (const Json* parameters = FindField(object, "parameters"); parameters != nullptr) {
    if (!parameters->is_object()) return Expected(out.name, "an object as its 'parameters'");
    if (FindField(*parameters, "shared_memory_region") != nullptr) {
      return InvalidValue(out.name, Concat("'", Printable(out.name, 64),
                                           "': shared memory is not supported; send the elements"));
    }
    MOESERVE_ASSIGN_OR_RETURN(
        size, IntField(*parameters, "binary_data_size", 0, std::numeric_limits<int32_t>::max()));
  }
  const Json* data = FindField(object, "data");
  if (size) {
    if (data != nullptr) return Expected(out.name, "either 'data' or 'binary_data_size'");
    if (static_cast<size_t>(*size) > bytes.size()) {
      return Expected(out.name, Concat(*size, " bytes after the JSON, found ", bytes.size()));
    }
    MOESERVE_RETURN_IF_ERROR(ReadElements(bytes.substr(0, static_cast<size_t>(*size)), out));
    bytes.remove_prefix(static_cast<size_t>(*size));
    return out;
  }
  if (data == nullptr || !data->is_array()) return Expected(out.name, "a list as its 'data'");
  MOESERVE_RETURN_IF_ERROR(Flatten(out.name, *data, out.data));
  return out;
}

absl::Status ReadOutputs(const Json& list, InferRequest& out) {
  if (!list.is_array() || list.size() > kMaxInferTensors)
    return Expected("outputs", "a list of objects");
  for (const Json& object : list) {
    if (!object.is_object()) return Expected("outputs", "a list of objects");
    RequestedOutput output;
    MOESERVE_ASSIGN_OR_RETURN(auto name, StringField(object, "name"));
    if (!name) return Expected("outputs", "a 'name' in each object");
    output.name = *std::move(name);
    output.binary = out.binary_outputs;
    if (const Json* parameters = FindField(object, "parameters"); parameters != nullptr) {
      if (!parameters->is_object()) return Expected("outputs", "an object as 'parameters'");
      MOESERVE_ASSIGN_OR_RETURN(const auto binary, BoolField(*parameters, "binary_data"));
      output.binary = binary.value_or(output.binary);
    }
    out.outputs.push_back(std::move(output));
  }
  return absl::OkStatus();
}

// Adds a member of a `generate` request.
absl::Status AddMember(const std::string& name, const Json& value, InferRequest& out) {
  constexpr std::string_view kTensors[] = {"text_input", "stream", "exclude_input_in_output",
                                           "sampling_parameters"};
  if (value.is_null()) return absl::OkStatus();
  if (std::find(std::begin(kTensors), std::end(kTensors), name) == std::end(kTensors)) {
    return out.Add(name, value);
  }
  InferTensor tensor;
  tensor.name = name;
  if (value.is_array()) {
    MOESERVE_RETURN_IF_ERROR(Flatten(name, value, tensor.data));
  } else if (value.is_object()) {
    return Expected(name, "a string or a boolean");
  } else {
    tensor.data.push_back(value);
  }
  tensor.shape = {static_cast<int64_t>(tensor.data.size())};
  tensor.datatype = name == "text_input" || name == "sampling_parameters" ? "BYTES" : "BOOL";
  return out.Add(std::move(tensor));
}

OrderedJson TensorList(std::span<const TensorDescription> tensors) {
  OrderedJson out = OrderedJson::array();
  for (const TensorDescription& tensor : tensors) {
    out.push_back(
        {{"name", tensor.name},
         {"datatype", tensor.datatype},
         {"shape", IsMatrix(tensor) ? OrderedJson::array({-1, -1}) : OrderedJson::array({-1})}});
  }
  return out;
}

OrderedJson AnswerStart(const InferAnswer& answer) {
  OrderedJson out;
  out["model_name"] = answer.model;
  out["model_version"] = answer.version;
  if (!answer.id.empty()) out["id"] = answer.id;
  return out;
}

}  // namespace

Result<InferRequest> ParseInfer(const Json& body, std::string_view bytes) {
  InferRequest out;
  MOESERVE_ASSIGN_OR_RETURN(auto id, StringField(body, "id"));
  out.id = std::move(id).value_or("");
  if (const Json* parameters = FindField(body, "parameters"); parameters != nullptr) {
    MOESERVE_RETURN_IF_ERROR(ReadParameters(*parameters, out));
    MOESERVE_ASSIGN_OR_RETURN(const auto binary, BoolField(*parameters, "binary_data_output"));
    out.binary_outputs = binary.value_or(false);
  }
  const Json* inputs = FindField(body, "inputs");
  if (inputs == nullptr || !inputs->is_array()) return Expected("inputs", "a list of tensors");
  for (const Json& input : *inputs) {
    MOESERVE_ASSIGN_OR_RETURN(InferTensor tensor, ReadInput(input, bytes));
    MOESERVE_RETURN_IF_ERROR(out.Add(std::move(tensor)));
  }
  if (!bytes.empty()) {
    return InvalidValue(
        "inputs", Concat("'inputs': ", bytes.size(), " bytes after the JSON belong to no input"));
  }
  if (const Json* outputs = FindField(body, "outputs"); outputs != nullptr) {
    MOESERVE_RETURN_IF_ERROR(ReadOutputs(*outputs, out));
  }
  return out;
}

Result<InferRequest> ParseGenerate(const Json& body) {
  InferRequest out;
  MOESERVE_ASSIGN_OR_RETURN(auto id, StringField(body, "id"));
  out.id = std::move(id).value_or("");
  for (const auto& [name, value] : body.items()) {
    if (name == "id" || name == "parameters") continue;
    MOESERVE_RETURN_IF_ERROR(AddMember(name, value, out));
  }
  if (const Json* parameters = FindField(body, "parameters"); parameters != nullptr) {
    if (!parameters->is_object()) return Expected("parameters", "an object");
    for (const auto& [name, value] : parameters->items()) {
      MOESERVE_RETURN_IF_ERROR(AddMember(name, value, out));
    }
  }
  return out;
}

InferBody InferResponseBody(const InferAnswer& answer) {
  OrderedJson json = AnswerStart(answer);
  OrderedJson outputs = OrderedJson::array();
  std::string bytes;
  bool binary = false;
  for (size_t i = 0; i < answer.outputs.size(); ++i) {
    const InferTensor& tensor = answer.outputs[i];
    OrderedJson output;
    output["name"] = tensor.name;
    output["datatype"] = tensor.datatype;
    output["shape"] = tensor.shape;
    if (answer.binary[i]) {
      const std::string elements = ElementBytes(tensor);
      output["parameters"]["binary_data_size"] = elements.size();
      bytes += elements;
      binary = true;
    } else {
      output["data"] = tensor.data;
    }
    outputs.push_back(std::move(output));
  }
  json["outputs"] = std::move(outputs);
  InferBody out;
  out.body = DumpJson(json);
  if (binary) {
    out.json_bytes = out.body.size();
    out.body += bytes;
  }
  return out;
}

std::string GenerateResponseBody(const InferAnswer& answer) {
  OrderedJson json = AnswerStart(answer);
  for (const InferTensor& tensor : answer.outputs) {
    if (tensor.data.size() == 1) {
      json[tensor.name] = tensor.data.front();
    } else {
      json[tensor.name] = tensor.data;
    }
  }
  if (answer.streamed) json["triton_final_response"] = answer.last;
  return DumpJson(json);
}

OrderedJson ServerMetadataJson() {
  OrderedJson extensions = OrderedJson::array();
  for (const std::string_view extension : kInferExtensions) extensions.push_back(extension);
  return {{"name", kInferPlatform}, {"version", kVersion}, {"extensions", std::move(extensions)}};
}

OrderedJson ModelMetadataJson(const ModelStatus& model, std::string_view name, InferKind kind) {
  return {{"name", name},
          {"versions", OrderedJson::array({std::to_string(model.version)})},
          {"platform", kInferPlatform},
          {"inputs", TensorList(TensorsOf(kind).inputs)},
          {"outputs", TensorList(TensorsOf(kind).outputs)}};
}

std::string_view RepositoryState(const ModelStatus& model) {
  if (model.state == ModelState::kReady) return "READY";
  return model.state == ModelState::kLoading ? "LOADING" : "UNAVAILABLE";
}

OrderedJson RepositoryIndexJson(const std::vector<ModelStatus>& models) {
  OrderedJson out = OrderedJson::array();
  for (const ModelStatus& model : models) {
    OrderedJson entry;
    entry["name"] = model.name;
    if (model.version > 0) entry["version"] = std::to_string(model.version);
    entry["state"] = RepositoryState(model);
    if (!model.error.ok()) entry["reason"] = kLoadFailed;
    out.push_back(std::move(entry));
  }
  return out;
}

}  // namespace moeserve::server
