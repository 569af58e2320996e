// A request of the Open Inference Protocol, as tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/base/json.h"

namespace moeserve::server {

// Limits on a request.
inline constexpr int64_t kMaxTensorElements = 65536;  // of each tensor, and of all together
inline constexpr size_t kMaxInferTensors = 64;        // inputs, and outputs
inline constexpr size_t kMaxInferParameters = 256;

struct InferTensor {
  std::string name;
  std::string datatype;        // such as "BYTES"
  std::vector<int64_t> shape;  // [dimensions]
  // The elements in row-major order, each a string, a boolean or a number.
  std::vector<Json> data;
};

struct RequestedOutput {
  std::string name;
  bool binary = false;  // HTTP: whether its elements are sent as bytes after the JSON
};

class InferRequest {
 public:
  InferRequest() = default;
  InferRequest(InferRequest&&) = default;
  InferRequest& operator=(InferRequest&&) = default;
  ~InferRequest();  // needs no memory

  // Adds an input; InvalidArgument beyond the limits.
  absl::Status Add(InferTensor tensor);
  // Adds a parameter; InvalidArgument beyond the limit.
  absl::Status Add(const std::string& name, Json value);

  std::string model;    // empty: the default model
  std::string version;  // empty: the version that is served
  std::string id;       // is returned in the answer
  // By name.
  std::vector<std::pair<std::string, Json>> parameters;
  std::vector<InferTensor> inputs;
  std::vector<RequestedOutput> outputs;  // empty: all outputs
  bool binary_outputs = false;           // HTTP: the default of RequestedOutput::binary

 private:
  int64_t elements_ = 0;  // of all inputs
};

// Whether a call sends an answer in pieces.
enum class Pieces {
  kNever,
  kOnRequest,  // if the request has the input `stream` with the value true
  kByDefault,  // unless the request has the input `stream` with the value false
};

// What a request says, apart from the fields of completions.
struct InferSettings {
  bool stream = false;                    // whether pieces are sent
  std::optional<absl::Duration> timeout;  // from the arrival of the request
};

// Returns the number of elements that `shape` describes. InvalidArgument, naming `tensor`, if a
// dimension is negative or the product exceeds kMaxTensorElements.
Result<int64_t> ElementCount(const std::string& tensor, const std::vector<int64_t>& shape);

// Returns InvalidArgument unless the tensor has as many elements as its shape says, all of its data
// type.
absl::Status CheckTensor(const InferTensor& tensor);

// Converts the request to the body of POST /v1/completions, without `model`, and sets `settings`.
// An error names the tensor or parameter. The caller empties the result with ClearJson().
Result<Json> CompletionBody(const InferRequest& request, Pieces pieces, InferSettings& settings);

// Converts the request to the body of POST /v1/embeddings or /classify, in the same way. A streamed
// answer is refused.
Result<Json> TextsBody(const InferRequest& request, Pieces pieces, InferSettings& settings);

}  // namespace moeserve::server
