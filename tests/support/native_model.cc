#include "tests/support/native_model.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "base/check.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/native/config_json.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Returns the next number of a splitmix64 generator.
uint64_t Next(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t NameHash(std::string_view name) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// Truncates a float to F16. The values used here are far from overflow and subnormal numbers.
F16 F16FromF32(float value) {
  const uint32_t bits = BitsFromF32(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const int exponent = static_cast<int>((bits >> 23) & 0xffu) - 127 + 15;
  if (exponent <= 0) return static_cast<F16>(sign);
  return static_cast<F16>(sign | (static_cast<uint32_t>(exponent) << 10) | ((bits >> 13) & 0x3ffu));
}

void AppendValue(std::string* bytes, DType dtype, float value) {
  if (dtype == DType::kF32) {
    char raw[4];
    std::memcpy(raw, &value, sizeof(raw));
    bytes->append(raw, sizeof(raw));
    return;
  }
  const uint16_t half = dtype == DType::kF16 ? F16FromF32(value) : Bf16FromF32(value);
  char raw[2];
  std::memcpy(raw, &half, sizeof(raw));
  bytes->append(raw, sizeof(raw));
}

const char* FormatName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
  }
  return "?";
}

}  // namespace

TempFolder::TempFolder() {
  std::string pattern = (fs::temp_directory_path() / "moeserve-test-XXXXXX").string();
  MOESERVE_CHECK(mkdtemp(pattern.data()) != nullptr, "temporary directory");
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void WriteFile(const fs::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  MOESERVE_CHECK(file.good(), "writing a test file");
}

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  MOESERVE_CHECK(file.good(), "reading a test file");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string SafetensorsHeader(const std::vector<RawTensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const RawTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  return header.dump();
}

std::string SafetensorsData(const std::vector<RawTensor>& tensors) {
  std::string data;
  for (const RawTensor& tensor : tensors) data.append(tensor.bytes);
  return data;
}

std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  const uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes.append(header).append(data);
}

std::string SafetensorsBytes(const std::vector<RawTensor>& tensors) {
  return SafetensorsBytes(SafetensorsHeader(tensors), SafetensorsData(tensors));
}

Json TinyConfig() {
  return Json::parse(R"({
    "model_type": "routed_decoder", "format_version": 1,
    "vocab_size": 288, "hidden_size": 16, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "bos_token_id": null, "eos_token_id": 256,
    "attention": [
      {"kind": "dense", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "bias": true,
       "qk_norm": "head"},
      {"kind": "routed", "head_dim": 8, "out_bias": true,
       "routing": {"num_experts": 4, "select": {"kind": "top_k", "k": 2}, "renormalize": true}}
    ],
    "feed_forward": [
      {"kind": "routed", "expert": {"form": "gated", "activation": "silu"},
       "routing": {"num_experts": 8, "widths": [9, 11, 13, 15, 17, 19, 21, 23],
                   "split": {"heads": 2},
                   "score": {"kind": "cosine", "dim": 4, "temperature": "divide"},
                   "select": {"kind": "top_k", "k": 2}}},
      {"kind": "routed", "shared_width": 6, "shared_gate": true,
       "expert": {"form": "plain", "activation": "gelu", "bias": true},
       "routing": {"num_experts": 4, "widths": 12, "score": {"kind": "dot", "bias": true},
                   "select": {"kind": "top_p", "p": 0.6}}}
    ]
  })");
}

std::vector<RawTensor> RandomTensors(const ModelSpec& spec, DType dtype, uint64_t seed) {
  std::vector<RawTensor> tensors;
  for (const TensorRequirement& wanted : RequiredTensors(spec)) {
    const std::string_view name = wanted.name;
    const bool is_matrix = wanted.shape.size() == 2;
    const bool is_norm = !is_matrix && name.ends_with("norm.weight");
    const bool is_temperature = name.ends_with("router.temperature");
    const double fan_in = is_matrix ? static_cast<double>(wanted.shape[1]) : 100.0;
    const double range = std::sqrt(3.0 / fan_in);
    const double centre = is_norm ? 1.0 : is_temperature ? 0.5 : 0.0;

    RawTensor tensor{wanted.name, wanted.ids ? "I32" : FormatName(dtype), wanted.shape, ""};
    int64_t elements = 1;
    for (const int64_t dim : wanted.shape) elements *= dim;
    if (wanted.ids) {
      const int64_t k = wanted.shape[1];
      for (int64_t i = 0; i < elements; ++i) {
        // distinct in a row, and different from row to row
        const auto id = static_cast<int32_t>((i / k + i % k) % k);
        tensor.bytes.append(reinterpret_cast<const char*>(&id), sizeof(id));
      }
      tensors.push_back(std::move(tensor));
      continue;
    }
    tensor.bytes.reserve(static_cast<size_t>(elements) * SizeOf(dtype));
    uint64_t state = NameHash(name) ^ (seed * 0x9e3779b97f4a7c15u);
    for (int64_t i = 0; i < elements; ++i) {
      const double unit = static_cast<double>(Next(&state) >> 11) * 0x1p-53;  // [0, 1)
      AppendValue(&tensor.bytes, dtype, static_cast<float>(centre + (2.0 * unit - 1.0) * range));
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::string TinyTokenizerJson() {
  // GPT-2's byte alphabet: a printable byte is represented by itself, other bytes by characters
  // from U+0100 on.
  Json vocabulary = Json::object();
  int spare = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
                           (byte >= 0xae && byte <= 0xff);
    const int code = printable ? byte : spare++;
    std::string text;
    if (code < 0x80) {
      text.push_back(static_cast<char>(code));
    } else {
      text.push_back(static_cast<char>(0xc0 | (code >> 6)));
      text.push_back(static_cast<char>(0x80 | (code & 0x3f)));
    }
    vocabulary[text] = byte;
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  const Json end_of_text = {
      {"id", 256},       {"content", "<|endoftext|>"}, {"single_word", false}, {"lstrip", false},
      {"rstrip", false}, {"normalized", false},        {"special", true}};
  const Json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", Json::array({end_of_text})},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", byte_level},
                          {"post_processor", nullptr},
                          {"decoder", byte_level},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"continuing_subword_prefix", nullptr},
                            {"end_of_word_suffix", nullptr},
                            {"fuse_unk", false},
                            {"byte_fallback", false},
                            {"vocab", vocabulary},
                            {"merges", Json::array()}}}};
  return tokenizer.dump();
}

void WriteNativeModel(const fs::path& folder, const Json& config, DType dtype, uint64_t seed) {
  const std::string text = config.dump(2);
  const Result<NativeConfig> parsed = ParseNativeConfig(text);
  MOESERVE_CHECK(parsed.ok(), std::string(parsed.status().message()).c_str());
  WriteFile(folder / "config.json", text);
  WriteFile(folder / "model.safetensors",
            SafetensorsBytes(RandomTensors(parsed->spec, dtype, seed)));
  WriteFile(folder / "tokenizer.json", TinyTokenizerJson());
}

}  // namespace moeserve::testing
