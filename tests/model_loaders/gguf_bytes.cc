#include "tests/model_loaders/gguf_bytes.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "tests/model_loaders/torch_bytes.h"

namespace moeserve::testing {
namespace {

constexpr uint32_t kU32 = 4;
constexpr uint32_t kI32 = 5;
constexpr uint32_t kF32 = 6;
constexpr uint32_t kBool = 7;
constexpr uint32_t kString = 8;
constexpr uint32_t kArray = 9;

std::string ArrayHead(uint32_t item_type, size_t count) {
  return Number(item_type, 4) + Number(count, 8);
}

std::string FloatBytes(float number) { return Number(std::bit_cast<uint32_t>(number), 4); }

}  // namespace

std::string GgufString(std::string_view text) { return Number(text.size(), 8) + std::string(text); }

GgufKey GgufU32(std::string name, uint32_t number) {
  return {std::move(name), kU32, Number(number, 4)};
}

GgufKey GgufF32(std::string name, float number) {
  return {std::move(name), kF32, FloatBytes(number)};
}

GgufKey GgufBool(std::string name, int number) {
  return {std::move(name), kBool, Number(static_cast<uint64_t>(number), 1)};
}

GgufKey GgufText(std::string name, std::string_view text) {
  return {std::move(name), kString, GgufString(text)};
}

GgufKey GgufTexts(std::string name, const std::vector<std::string>& texts) {
  std::string value = ArrayHead(kString, texts.size());
  for (const std::string& text : texts) value += GgufString(text);
  return {std::move(name), kArray, value};
}

GgufKey GgufInts(std::string name, const std::vector<int32_t>& numbers) {
  std::string value = ArrayHead(kI32, numbers.size());
  for (const int32_t number : numbers) value += Number(static_cast<uint32_t>(number), 4);
  return {std::move(name), kArray, value};
}

GgufKey GgufFloats(std::string name, const std::vector<float>& numbers) {
  std::string value = ArrayHead(kF32, numbers.size());
  for (const float number : numbers) value += FloatBytes(number);
  return {std::move(name), kArray, value};
}

void GgufParts::Set(GgufKey key) {
  Remove(key.name);
  keys.push_back(std::move(key));
}

void GgufParts::Remove(std::string_view key) {
  std::erase_if(keys, [&](const GgufKey& k) { return k.name == key; });
}

GgufTensorBytes& GgufParts::Tensor(std::string_view name) {
  const auto it = std::find_if(tensors.begin(), tensors.end(),
                               [&](const GgufTensorBytes& t) { return t.name == name; });
  MOESERVE_CHECK(it != tensors.end(), "a tensor of the file");
  return *it;
}

std::string GgufBytes(const GgufParts& parts) {
  std::string bytes = parts.magic + Number(parts.version, 4);
  bytes += Number(parts.tensor_count.value_or(parts.tensors.size()), 8);
  bytes += Number(parts.key_count.value_or(parts.keys.size()), 8);
  for (const GgufKey& key : parts.keys) {
    bytes += GgufString(key.name) + Number(key.type, 4) + key.value;
  }
  const auto pad = [&](std::string& text) {
    text.resize((text.size() + parts.alignment - 1) / parts.alignment * parts.alignment);
  };
  std::string data;
  for (const GgufTensorBytes& tensor : parts.tensors) {
    bytes += GgufString(tensor.name) + Number(tensor.shape.size(), 4);
    for (auto it = tensor.shape.rbegin(); it != tensor.shape.rend(); ++it) bytes += Number(*it, 8);
    bytes += Number(tensor.type, 4) + Number(tensor.offset.value_or(data.size()), 8);
    data += tensor.data;
    pad(data);
  }
  pad(bytes);
  return bytes + data;
}

GgufParts PartsOf(std::string_view bytes) {
  const Result<GgufHeader> header = ParseGguf(bytes);
  MOESERVE_CHECK(header.ok(), "a valid file");
  GgufParts parts;
  for (const auto& [name, value] : header->metadata) {
    std::string text(value.bytes);
    if (value.type == GgufValueType::kString) text = GgufString(text);
    if (value.type == GgufValueType::kArray) {
      text = ArrayHead(static_cast<uint32_t>(value.item_type), value.count) + text;
    }
    parts.keys.push_back({std::string(name), static_cast<uint32_t>(value.type), text});
  }
  for (const GgufTensor& tensor : header->tensors) {
    const std::vector<int64_t>& shape = tensor.entry.shape;
    parts.tensors.push_back({tensor.entry.name,
                             {shape.begin(), shape.end()},
                             tensor.type->id,
                             std::string(tensor.data)});
  }
  return parts;
}

}  // namespace moeserve::testing
