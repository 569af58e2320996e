#include "server/open_inference/infer_request.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/text/tokenizer/utf8.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxSamplingBytes = 64 << 10;

bool IsOneOf(std::string_view text, std::initializer_list<std::string_view> list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// Returns whether the elements of a tensor with this data type look like `value`.
bool Fits(const Json& value, std::string_view datatype) {
  if (datatype == "BYTES") return value.is_string();
  if (datatype == "BOOL") return value.is_boolean();
  if (datatype.starts_with("UINT")) return value.is_number_unsigned();
  if (datatype.starts_with("INT")) return value.is_number_integer();
  return value.is_number();
}

// Collects the fields of a completions request.
class Fields {
 public:
  Fields() = default;
  Fields(const Fields&) = delete;
  Fields& operator=(const Fields&) = delete;
  ~Fields() { ClearJson(body_); }

  bool Has(const std::string& name) const { return body_.contains(name); }

  absl::Status Put(const std::string& name, Json value) {
    if (IsOneOf(name, {"model", "prompt", "input", "stream", "stream_options"})) {
      return InvalidValue(name, Concat("'", Printable(name, 64), "' cannot be given in this way"));
    }
    if (IsOneOf(name, {"logprobs", "prompt_logprobs", "return_token_ids", "return_routing",
                       "return_routed_experts", "return_word_experts"})) {
      return InvalidValue(
          name, Concat("'", name, "': there is no output tensor for it; use POST /v1/completions"));
    }
    if (!body_.emplace(name, std::move(value)).second) return Twice(name);
    return absl::OkStatus();
  }
  void PutOwn(const char* name, Json value) { body_[name] = std::move(value); }

  Json Take() { return std::exchange(body_, Json::object()); }

  static absl::Status Twice(const std::string& name) {
    return InvalidValue(name, Concat("'", Printable(name, 64), "' is given more than once"));
  }

 private:
  Json body_ = Json::object();
};

absl::Status PutParameter(const std::string& name, const Json& value, Fields& fields,
                          InferSettings& settings) {
  if (name == "timeout") {
    if (!value.is_number_integer() || value.get<int64_t>() < 0) {
      return InvalidValue(name, "'timeout': expected a number of microseconds");
    }
    // Triton counts 0 as no timeout.
    if (const auto micros = value.get<int64_t>(); micros > 0) {
      settings.timeout = absl::Microseconds(micros);
    }
    return absl::OkStatus();
  }
  if (IsOneOf(name, {"sequence_id", "sequence_start", "sequence_end"})) {
    const bool none = value == Json(0) || value == Json(false) || value == Json("");
    if (none) return absl::OkStatus();
    return InvalidValue(name, Concat("'", name, "': sequences with a state are not supported"));
  }
  // The last response of a stream always has triton_final_response.
  if (IsOneOf(name, {"binary_data_output", "triton_enable_empty_final_response"})) {
    return absl::OkStatus();
  }
  return fields.Put(name, value);
}

Result<bool> Flag(const InferTensor& tensor) {
  if (tensor.datatype != "BOOL" || tensor.data.size() != 1) {
    return InvalidValue(tensor.name,
                        Concat("'", tensor.name, "': expected one element of BOOL, found ",
                               tensor.data.size(), " of ", Printable(tensor.datatype, 16)));
  }
  return tensor.data.front().get<bool>();
}

absl::Status PutTexts(const InferTensor& tensor, const char* field, Fields& fields) {
  if (tensor.datatype != "BYTES" || tensor.data.empty()) {
    return InvalidValue(tensor.name,
                        Concat("'text_input': expected at least one element of BYTES, found ",
                               tensor.data.size(), " of ", Printable(tensor.datatype, 16)));
  }
  if (tensor.data.size() == 1) {
    fields.PutOwn(field, tensor.data.front());
  } else {
    fields.PutOwn(field, Json(tensor.data));
  }
  return absl::OkStatus();
}

absl::Status PutSampling(const InferTensor& tensor, Fields& fields) {
  if (tensor.datatype != "BYTES" || tensor.data.size() != 1) {
    return InvalidValue(tensor.name, "'sampling_parameters': expected one element of BYTES");
  }
  const auto& text = tensor.data.front().get_ref<const std::string&>();
  JsonLimits limits;
  limits.max_bytes = kMaxSamplingBytes;
  auto object = ParseStrictJson(text, limits);
  if (!object.ok() || !object->is_object()) {
    if (object.ok()) ClearJson(*object);
    return InvalidValue(tensor.name, "'sampling_parameters': expected a JSON object");
  }
  absl::Status status;
  for (auto it = object->begin(); it != object->end() && status.ok(); ++it) {
    status = fields.Put(it.key(), it.value());
  }
  ClearJson(*object);
  return status;
}

// Puts a tensor whose name is that of a field of completions.
absl::Status PutField(const InferTensor& tensor, Fields& fields) {
  const bool list =
      IsOneOf(tensor.name, {"stop", "stop_token_ids", "allowed_token_ids", "bad_words"});
  if (list) return fields.Put(tensor.name, Json(tensor.data));
  if (tensor.data.size() != 1) {
    return InvalidValue(tensor.name, Concat("'", Printable(tensor.name, 64),
                                            "': expected one element, found ", tensor.data.size()));
  }
  return fields.Put(tensor.name, tensor.data.front());
}

}  // namespace

InferRequest::~InferRequest() {
  for (auto& [name, value] : parameters) ClearJson(value);
}

absl::Status InferRequest::Add(InferTensor tensor) {
  elements_ += static_cast<int64_t>(tensor.data.size());
  if (inputs.size() >= kMaxInferTensors || elements_ > kMaxTensorElements) {
    return InvalidValue(
        "inputs", Concat("'inputs': expected at most ", kMaxInferTensors, " tensors with at most ",
                         kMaxTensorElements, " elements together"));
  }
  inputs.push_back(std::move(tensor));
  return absl::OkStatus();
}

absl::Status InferRequest::Add(const std::string& name, Json value) {
  if (parameters.size() >= kMaxInferParameters) {
    ClearJson(value);
    return InvalidValue("parameters", Concat("'parameters': expected at most ", kMaxInferParameters,
                                             " parameters"));
  }
  parameters.emplace_back(name, std::move(value));
  return absl::OkStatus();
}

Result<int64_t> ElementCount(const std::string& tensor, const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || (size > 0 && count > kMaxTensorElements / size)) {
      return InvalidValue(tensor, Concat("'", Printable(tensor, 64), "': expected a shape of 0 to ",
                                         kMaxTensorElements, " elements"));
    }
    count *= size;
  }
  return count;
}

absl::Status CheckTensor(const InferTensor& tensor) {
  const std::string name = Printable(tensor.name, 64);
  if (!IsOneOf(tensor.datatype, {"BYTES", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8",
                                 "UINT16", "UINT32", "UINT64", "FP32", "FP64"})) {
    return InvalidValue(
        tensor.name,
        Concat("'", name, "': expected a data type of BYTES, BOOL, INT8 to INT64, ",
               "UINT8 to UINT64, FP32 or FP64, found ", Printable(tensor.datatype, 16)));
  }
  MOESERVE_ASSIGN_OR_RETURN(const int64_t count, ElementCount(tensor.name, tensor.shape));
  if (static_cast<int64_t>(tensor.data.size()) != count) {
    return InvalidValue(tensor.name, Concat("'", name, "': its shape has ", count,
                                            " elements, but its data ", tensor.data.size()));
  }
  for (const Json& value : tensor.data) {
    if (!Fits(value, tensor.datatype)) {
      return InvalidValue(tensor.name, Concat("'", name, "': expected elements of ",
                                              tensor.datatype, ", found ", value.type_name()));
    }
    if (value.is_string() && !IsValidUtf8(value.get_ref<const std::string&>())) {
      return InvalidValue(tensor.name, Concat("'", name, "': the text is not valid UTF-8"));
    }
  }
  return absl::OkStatus();
}

namespace {

// What a request has besides the fields.
struct InferParts {
  std::optional<bool> without_input;  // `exclude_input_in_output`
  bool stream = false;
};

// Converts parameters and inputs to fields; `texts` is the name of the field of `text_input`.
Result<InferParts> PutAll(const InferRequest& request, Pieces pieces, const char* texts,
                          Fields& fields, InferSettings& settings) {
  InferParts parts{.without_input = std::nullopt, .stream = pieces == Pieces::kByDefault};
  const InferTensor* inputs = nullptr;
  std::vector<std::string_view> names;
  for (const auto& [name, value] : request.parameters) {
    MOESERVE_RETURN_IF_ERROR(PutParameter(name, value, fields, settings));
  }
  for (const InferTensor& tensor : request.inputs) {
    MOESERVE_RETURN_IF_ERROR(CheckTensor(tensor));
    if (std::find(names.begin(), names.end(), tensor.name) != names.end()) {
      return Fields::Twice(tensor.name);
    }
    names.push_back(tensor.name);
    if (tensor.name == "text_input") {
      inputs = &tensor;
    } else if (tensor.name == "stream") {
      MOESERVE_ASSIGN_OR_RETURN(parts.stream, Flag(tensor));
      if (parts.stream && pieces == Pieces::kNever) {
        return InvalidValue("stream",
                            "'stream': pieces of an answer need ModelStreamInfer or "
                            "generate_stream");
      }
    } else if (tensor.name == "exclude_input_in_output") {
      MOESERVE_ASSIGN_OR_RETURN(parts.without_input, Flag(tensor));
    } else if (tensor.name == "sampling_parameters") {
      MOESERVE_RETURN_IF_ERROR(PutSampling(tensor, fields));
    } else {
      MOESERVE_RETURN_IF_ERROR(PutField(tensor, fields));
    }
  }
  if (inputs == nullptr) return MissingField("text_input");
  MOESERVE_RETURN_IF_ERROR(PutTexts(*inputs, texts, fields));
  return parts;
}

}  // namespace

Result<Json> CompletionBody(const InferRequest& request, Pieces pieces, InferSettings& settings) {
  Fields fields;
  MOESERVE_ASSIGN_OR_RETURN(const InferParts parts,
                            PutAll(request, pieces, "prompt", fields, settings));
  settings.stream = parts.stream;
  if (!fields.Has("echo")) fields.PutOwn("echo", !parts.without_input.value_or(parts.stream));
  fields.PutOwn("stream", parts.stream);
  return fields.Take();
}

Result<Json> TextsBody(const InferRequest& request, Pieces pieces, InferSettings& settings) {
  Fields fields;
  MOESERVE_ASSIGN_OR_RETURN(const InferParts parts,
                            PutAll(request, pieces, "input", fields, settings));
  if (parts.stream) {
    return InvalidValue("stream", "'stream': vectors and labels of texts are not sent in pieces");
  }
  return fields.Take();
}

}  // namespace moeserve::server
