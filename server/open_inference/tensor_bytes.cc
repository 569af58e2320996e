#include "server/open_inference/tensor_bytes.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are copied as they are");

constexpr size_t kLengthBytes = 4;

template <typename T>
T Load(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// Returns the number of bytes of a number or boolean; 0 for other data types.
size_t ElementSize(std::string_view datatype) {
  if (datatype == "BOOL" || datatype == "INT8" || datatype == "UINT8") return 1;
  if (datatype == "INT16" || datatype == "UINT16") return 2;
  if (datatype == "INT32" || datatype == "UINT32" || datatype == "FP32") return 4;
  if (datatype == "INT64" || datatype == "UINT64" || datatype == "FP64") return 8;
  return 0;
}

Json Element(std::string_view bytes, std::string_view datatype) {
  if (datatype == "BOOL") return bytes[0] != '\0';
  if (datatype == "FP32") return static_cast<double>(Load<float>(bytes));
  if (datatype == "FP64") return Load<double>(bytes);
  const bool is_signed = datatype[0] == 'I';
  switch (bytes.size()) {
    case 1:
      return is_signed ? Json(int64_t{Load<int8_t>(bytes)}) : Json(uint64_t{Load<uint8_t>(bytes)});
    case 2:
      return is_signed ? Json(int64_t{Load<int16_t>(bytes)})
                       : Json(uint64_t{Load<uint16_t>(bytes)});
    case 4:
      return is_signed ? Json(int64_t{Load<int32_t>(bytes)})
                       : Json(uint64_t{Load<uint32_t>(bytes)});
    default:
      return is_signed ? Json(Load<int64_t>(bytes)) : Json(Load<uint64_t>(bytes));
  }
}

absl::Status WrongSize(const InferTensor& tensor, int64_t count, size_t bytes) {
  return InvalidValue(tensor.name, Concat("'", Printable(tensor.name, 64), "': expected ", count,
                                          " elements of ", Printable(tensor.datatype, 16),
                                          ", found ", bytes, " bytes that are not those"));
}

}  // namespace

absl::Status ReadElements(std::string_view bytes, InferTensor& tensor) {
  MOESERVE_ASSIGN_OR_RETURN(const int64_t count, ElementCount(tensor.name, tensor.shape));
  tensor.data.clear();
  std::string_view rest = bytes;
  const auto wrong = [&] { return WrongSize(tensor, count, bytes.size()); };
  if (tensor.datatype == "BYTES") {
    for (int64_t i = 0; i < count; ++i) {
      if (rest.size() < kLengthBytes) return wrong();
      const size_t size = Load<uint32_t>(rest);
      rest.remove_prefix(kLengthBytes);
      if (rest.size() < size) return wrong();
      tensor.data.emplace_back(std::string(rest.substr(0, size)));
      rest.remove_prefix(size);
    }
    return rest.empty() ? absl::OkStatus() : wrong();
  }
  const size_t size = ElementSize(tensor.datatype);
  // CheckTensor() refuses other data types.
  if (size == 0) return absl::OkStatus();
  if (rest.size() != static_cast<size_t>(count) * size) return wrong();
  for (; !rest.empty(); rest.remove_prefix(size)) {
    tensor.data.push_back(Element(rest.substr(0, size), tensor.datatype));
  }
  return absl::OkStatus();
}

std::string ElementBytes(const InferTensor& tensor) {
  std::string out;
  const auto append = [&](const auto value) {
    char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    out.append(bytes, sizeof(value));
  };
  for (const Json& value : tensor.data) {
    if (tensor.datatype == "BYTES") {
      const auto& text = value.get_ref<const std::string&>();
      append(static_cast<uint32_t>(text.size()));
      out += text;
    } else if (tensor.datatype == "FP32") {
      append(value.get<float>());
    } else {
      MOESERVE_CHECK(tensor.datatype == "UINT32", "the data types of answers");
      append(value.get<uint32_t>());
    }
  }
  return out;
}

}  // namespace moeserve::server
