#include "tests/support/encoder_golden.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "model_loaders/files/safetensors.h"

namespace moeserve::testing {
namespace {

template <typename T>
std::vector<T> ValuesOf(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry* entry = file.Find(name);
  if (entry == nullptr) return {};
  const std::string_view bytes = file.Bytes(*entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Returns the part of each text of values [T, width] or [texts, width].
template <typename T>
std::vector<std::vector<T>> Split(const std::vector<T>& values, const std::vector<int32_t>& offsets,
                                  bool per_text) {
  std::vector<std::vector<T>> parts(offsets.size() - 1);
  if (values.empty()) return parts;
  const size_t rows = per_text ? parts.size() : static_cast<size_t>(offsets.back());
  const size_t width = values.size() / rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t begin = per_text ? i : static_cast<size_t>(offsets[i]);
    const size_t end = per_text ? i + 1 : static_cast<size_t>(offsets[i + 1]);
    parts[i].assign(values.begin() + static_cast<int64_t>(begin * width),
                    values.begin() + static_cast<int64_t>(end * width));
  }
  return parts;
}

std::vector<EncodedText> TextsOf(const SafetensorsFile& file, const std::string& prefix,
                                 const std::vector<int32_t>& offsets) {
  std::vector<EncodedText> texts(offsets.size() - 1);
  const auto read = [&](const char* name, bool per_text, auto member) {
    auto parts = Split(ValuesOf<float>(file, prefix + name), offsets, per_text);
    for (size_t i = 0; i < texts.size(); ++i) texts[i].*member = std::move(parts[i]);
  };
  read("target_logprobs", false, &EncodedText::target_logprobs);
  read("top_logprobs", false, &EncodedText::top_logprobs);
  read("logits", false, &EncodedText::logits);
  read("texts", true, &EncodedText::text);
  return texts;
}

}  // namespace

Result<EncoderGolden> ReadEncoderGolden(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> file,
                            SafetensorsFile::Open(path));
  EncoderGolden g;
  const auto offsets = ValuesOf<int32_t>(*file, "offsets");
  if (offsets.size() < 2) return absl::InvalidArgumentError(path.string() + ": no texts");
  g.tokens = Split(ValuesOf<int32_t>(*file, "tokens"), offsets, false);
  for (const auto& types : Split(ValuesOf<int32_t>(*file, "types"), offsets, false)) {
    g.types.emplace_back(types.begin(), types.end());
  }
  if (const TensorEntry* top = file->Find("top_ids")) g.top = static_cast<int>(top->shape[1]);
  g.top_ids = Split(ValuesOf<int32_t>(*file, "top_ids"), offsets, false);
  g.f32 = TextsOf(*file, "", offsets);
  g.bf16 = TextsOf(*file, "bf16_", offsets);
  for (const TensorEntry& entry : file->tensors()) {
    const std::string& n = entry.name;
    if (!n.starts_with("routes.") || !n.ends_with(".offsets")) continue;
    const std::string base = n.substr(0, n.size() - 8);
    const BlockKind block =
        base.ends_with("attention") ? BlockKind::kAttention : BlockKind::kFeedForward;
    g.routes[{std::stoi(n.substr(7)), block}] = {ValuesOf<int32_t>(*file, n),
                                                 ValuesOf<int32_t>(*file, base + ".experts"),
                                                 ValuesOf<float>(*file, base + ".weights")};
  }
  return g;
}

std::vector<GoldenModel> EncoderGoldenModels() {
  std::vector<GoldenModel> models;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourcePath("tests/golden/encoders"))) {
    const std::filesystem::path golden = entry.path() / "golden.safetensors";
    if (std::filesystem::exists(golden)) {
      models.push_back({entry.path().filename().string(), entry.path(), golden});
    }
  }
  std::ranges::sort(models, {}, &GoldenModel::name);
  return models;
}

}  // namespace moeserve::testing
