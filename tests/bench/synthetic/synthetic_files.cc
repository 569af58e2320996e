#include "tests/bench/synthetic/synthetic_files.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model_loaders/architectures/native/write_config.h"
#include "tests/bench/synthetic/composed_weights.h"
#include "tests/bench/synthetic/family_files.h"
#include "tests/bench/synthetic/gguf_writer.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

absl::Status CheckTokens(const ModelSpec& spec) {
  if (spec.vocab_size > kEndOfText) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "vocab_size: expected at least 257 for a tokenizer of bytes, found " +
      std::to_string(spec.vocab_size));
}

// Whether the files must be those of Qwen3.5, not Qwen3.
bool IsQwen35(const ModelSpec& spec) {
  return std::ranges::any_of(spec.blocks, [](const BlockSpec& b) { return b.delta() != nullptr; });
}

// Returns the token texts in the order of their ids: bytes, the end of text, unused tokens.
std::vector<std::string> TokenTexts(int vocab_size) {
  std::vector<std::string> texts(static_cast<size_t>(vocab_size));
  const nlohmann::json tokenizer = nlohmann::json::parse(TinyTokenizerJson());
  for (const auto& [text, id] : tokenizer["model"]["vocab"].items()) {
    texts[id.get<size_t>()] = text;
  }
  texts[kEndOfText] = "<|endoftext|>";
  for (int i = kEndOfText + 1; i < vocab_size; ++i) {
    texts[static_cast<size_t>(i)] = "tok" + std::to_string(i - kEndOfText - 1);
  }
  return texts;
}

void AddGgufTokenizer(const ModelSpec& spec, GgufWriter& file) {
  file.AddString("tokenizer.ggml.model", "gpt2");
  file.AddString("tokenizer.ggml.pre", "gpt-2");
  std::vector<std::string> tokens = TokenTexts(spec.vocab_size);
  // Readers require at least one merge, and its result among the tokens.
  const std::string merge = tokens[0] + " " + tokens[1];
  if (spec.vocab_size > kEndOfText + 1) tokens[kEndOfText + 1] = tokens[0] + tokens[1];
  std::vector<int32_t> kinds(tokens.size(), 1);  // normal
  kinds[kEndOfText] = 3;                         // control
  file.AddStrings("tokenizer.ggml.tokens", tokens);
  file.AddI32s("tokenizer.ggml.token_type", kinds);
  file.AddStrings("tokenizer.ggml.merges", {merge});
  file.AddU32("tokenizer.ggml.bos_token_id", kEndOfText);
  file.AddU32("tokenizer.ggml.eos_token_id", kEndOfText);
  file.AddBool("tokenizer.ggml.add_bos_token", false);
}

absl::Status CreateFolder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::UnavailableError(folder.string() + ": " + error.message());
  return absl::OkStatus();
}

absl::Status WriteText(std::string_view text, const fs::path& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path.string());
}

// Writes the bytes of a tensor, which is f32 or bf16, as `dtype`. Only f32 can be rounded.
absl::Status WriteValues(const HostTensor& tensor, DType dtype, std::ofstream& file) {
  if (tensor.dtype == dtype) {
    file.write(
        static_cast<const char*>(tensor.data),
        static_cast<std::streamsize>(tensor.size()) * static_cast<std::streamsize>(SizeOf(dtype)));
    return absl::OkStatus();
  }
  if (tensor.dtype != DType::kF32 || dtype != DType::kBF16) {
    return absl::InternalError("a tensor can be rounded from f32 to bf16 only");
  }
  const float* values = static_cast<const float*>(tensor.data);
  std::vector<Bf16> rounded(static_cast<size_t>(tensor.size()));
  for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = Bf16FromF32(values[i]);
  file.write(reinterpret_cast<const char*>(rounded.data()),
             static_cast<std::streamsize>(rounded.size() * sizeof(Bf16)));
  return absl::OkStatus();
}

// Writes a safetensors file, reading one source tensor after the other.
absl::Status WriteSafetensors(const std::vector<StoredTensor>& tensors, WeightSource& weights,
                              const fs::path& path) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t offset = 0;
  for (const StoredTensor& t : tensors) {
    uint64_t bytes = SizeOf(t.dtype);
    for (const int64_t d : t.shape) bytes *= static_cast<uint64_t>(d);
    header[t.name] = {{"dtype", t.dtype == DType::kF32 ? "F32" : "BF16"},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data
  const uint64_t size = text.size();
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const StoredTensor& t : tensors) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, weights.Get(t.source, t.shape));
    MOESERVE_RETURN_IF_ERROR(WriteValues(tensor, t.dtype, file));
  }
  const bool complete =
      file.good() && static_cast<uint64_t>(file.tellp()) == sizeof(size) + size + offset;
  file.close();
  return complete && file.good() ? absl::OkStatus()
                                 : absl::UnavailableError("cannot write " + path.string());
}

// The tokens of TokenTexts() in the format of Hugging Face's tokenizers.
nlohmann::json HuggingFaceTokenizer(int vocab_size) {
  nlohmann::json tokenizer = nlohmann::json::parse(TinyTokenizerJson());
  nlohmann::json& vocab = tokenizer["model"]["vocab"];
  const std::vector<std::string> texts = TokenTexts(vocab_size);
  for (size_t id = 0; id < texts.size(); ++id) vocab[texts[id]] = id;
  return tokenizer;
}

}  // namespace

absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights, const fs::path& folder) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  MOESERVE_RETURN_IF_ERROR(CreateFolder(folder));
  std::vector<StoredTensor> tensors;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const bool f32 = t.shape.size() == 1 || t.name.find(".router.") != std::string::npos;
    tensors.push_back({t.name, t.name, t.shape, f32 ? DType::kF32 : DType::kBF16});
  }
  MOESERVE_RETURN_IF_ERROR(WriteSafetensors(tensors, weights, folder / "model.safetensors"));
  ModelSpec ending = spec;
  ending.eos_token_ids = {kEndOfText};
  MOESERVE_RETURN_IF_ERROR(
      WriteText(NativeConfigJson(ending).dump(2) + "\n", folder / "config.json"));
  return WriteText(TinyTokenizerJson(), folder / "tokenizer.json");
}

absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const fs::path& path) {
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  const bool hybrid = IsQwen35(spec);
  MOESERVE_RETURN_IF_ERROR(hybrid ? CheckQwen35(spec, "--gguf") : CheckQwen3(spec, "--gguf"));
  GgufWriter file;
  ComposedWeights composed(weights);
  file.AddString("general.name", name);
  file.AddU32("general.file_type", 32);  // mostly bf16
  if (hybrid) {
    AddQwen35Gguf(spec, file, composed);
  } else {
    AddQwen3Gguf(spec, file);
  }
  AddGgufTokenizer(spec, file);
  return file.Write(path, composed);
}

absl::Status WriteHuggingFace(const ModelSpec& spec, WeightSource& weights,
                              const fs::path& folder) {
  constexpr std::string_view kOption = "--hugging-face";
  MOESERVE_RETURN_IF_ERROR(CheckTokens(spec));
  const bool hybrid = IsQwen35(spec);
  MOESERVE_RETURN_IF_ERROR(hybrid ? CheckQwen35(spec, kOption) : CheckQwen3(spec, kOption));
  if (!spec.feed_forward(0).routed()) {
    return absl::InvalidArgumentError(
        "--hugging-face: expected routed feed-forward layers, found dense ones");
  }
  ComposedWeights composed(weights);
  const std::vector<StoredTensor> tensors =
      hybrid ? Qwen35Tensors(spec, composed) : Qwen3Tensors(spec);
  const nlohmann::json config = hybrid ? Qwen35Config(spec) : Qwen3Config(spec);
  MOESERVE_RETURN_IF_ERROR(CreateFolder(folder));
  MOESERVE_RETURN_IF_ERROR(WriteSafetensors(tensors, composed, folder / "model.safetensors"));
  MOESERVE_RETURN_IF_ERROR(WriteText(config.dump(2) + "\n", folder / "config.json"));
  MOESERVE_RETURN_IF_ERROR(
      WriteText(HuggingFaceTokenizer(spec.vocab_size).dump(), folder / "tokenizer.json"));
  const nlohmann::json tokenizer = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                    {"bos_token", "<|endoftext|>"},
                                    {"eos_token", "<|endoftext|>"},
                                    {"model_max_length", spec.max_position_embeddings}};
  return WriteText(tokenizer.dump(2) + "\n", folder / "tokenizer_config.json");
}

}  // namespace moeserve::testing
