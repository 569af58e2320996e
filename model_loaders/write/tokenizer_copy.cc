#include "model_loaders/write/tokenizer_copy.h"

#include <algorithm>
#include <climits>
#include <optional>

#include "base/error_text.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/tokenizer/tokenizer_folder.h"
#include "model_loaders/write/new_folder.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr char kTokenizerConfigFile[] = "tokenizer_config.json";
constexpr char kChatTemplate[] = "chat_template.jinja";
constexpr char kGenerationFile[] = "generation_config.json";
constexpr char kFairseqModel[] = "sentencepiece.bpe.model";
constexpr char kFairseqDictionary[] = "dict.txt";

Result<FileNames> Copy(const fs::path& from, FileNames names, const fs::path& to) {
  std::erase_if(names, [&](const std::string& name) { return !Exists(from / name); });
  for (const std::string& name : names) {
    MOESERVE_RETURN_IF_ERROR(CheckInsideModel(from, from / name));
    MOESERVE_RETURN_IF_ERROR(CopyToNewFile(from / name, to / name));
  }
  return names;
}

template <typename T>
void SetIfGiven(OrderedJson& json, const char* key, const std::optional<T>& value) {
  if (value.has_value()) json[key] = *value;
}

// Writes an object, unless it is empty. Strings that are not UTF-8 get replacement characters,
// because JSON cannot hold them.
absl::Status WriteObject(const OrderedJson& json, const fs::path& folder, const char* name,
                         FileNames& written) {
  if (json.empty()) return absl::OkStatus();
  written.push_back(name);
  return WriteNewFile(folder / name,
                      json.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n");
}

}  // namespace

Result<FileNames> CopyTokenizer(const fs::path& from, const fs::path& to) {
  return Copy(from, TokenizerFiles(from), to);
}

Result<FileNames> CopyTextSettings(const fs::path& from, const fs::path& to) {
  return Copy(
      from, {kTokenizerConfigFile, kChatTemplate, "special_tokens_map.json", kGenerationFile}, to);
}

Result<FileNames> WriteLanguages(const TokenizerConfig& config, const fs::path& folder) {
  FileNames written;
  if (!config.src_lang.has_value() || !config.tgt_lang.has_value() ||
      !Exists(folder / Concat("dict.", *config.src_lang, ".txt")) ||
      Exists(folder / kTokenizerConfigFile)) {
    return written;
  }
  const OrderedJson json = {{"src_lang", *config.src_lang}, {"tgt_lang", *config.tgt_lang}};
  MOESERVE_RETURN_IF_ERROR(WriteObject(json, folder, kTokenizerConfigFile, written));
  return written;
}

Result<FileNames> CopyGivenTokenizer(const GivenTokenizer& given, const fs::path& to) {
  const std::string shown = Printable(given.tokenizer.string(), PATH_MAX);
  const fs::path extension = given.tokenizer.extension();
  const bool has_dictionary = !given.dictionary.empty();
  if (extension != ".model" && (has_dictionary || extension != ".json")) {
    return absl::InvalidArgumentError(
        Concat(has_dictionary ? "a dictionary belongs to a SentencePiece model: " : "", shown,
               ": expected a file ", has_dictionary ? "" : "*.json (tokenizer.json) or ",
               "*.model (SentencePiece), found ", shown.empty() ? "none" : "another name"));
  }
  std::string name = "tokenizer.json";
  if (extension == ".model") {
    const bool fairseq = has_dictionary || given.tokenizer.filename() == kFairseqModel;
    name = fairseq ? kFairseqModel : "tokenizer.model";
  }
  MOESERVE_RETURN_IF_ERROR(CopyToNewFile(given.tokenizer, to / name));
  FileNames names = {name};
  if (has_dictionary) {
    MOESERVE_RETURN_IF_ERROR(CopyToNewFile(given.dictionary, to / kFairseqDictionary));
    names.push_back(kFairseqDictionary);
  }
  return names;
}

Result<FileNames> WriteTextSettings(const Checkpoint& checkpoint, const fs::path& to) {
  FileNames written;
  const TokenizerConfig& config = checkpoint.tokenizer_config;
  // The template has a file of its own, because a list of templates takes its key in
  // tokenizer_config.json.
  if (config.chat_template.has_value()) {
    MOESERVE_RETURN_IF_ERROR(WriteNewFile(to / kChatTemplate, *config.chat_template));
    written.push_back(kChatTemplate);
  }
  OrderedJson json = OrderedJson::object();
  SetIfGiven(json, "tokenizer_class", config.tokenizer_class);
  SetIfGiven(json, "bos_token", config.bos_token);
  SetIfGiven(json, "eos_token", config.eos_token);
  SetIfGiven(json, "pad_token", config.pad_token);
  SetIfGiven(json, "unk_token", config.unk_token);
  SetIfGiven(json, "add_bos_token", config.add_bos_token);
  SetIfGiven(json, "add_eos_token", config.add_eos_token);
  for (const auto& [name, text] : config.named_chat_templates) {
    OrderedJson item = OrderedJson::object();
    item["name"] = name;
    item["template"] = text;
    json["chat_template"].push_back(std::move(item));
  }
  MOESERVE_RETURN_IF_ERROR(WriteObject(json, to, kTokenizerConfigFile, written));

  const GenerationDefaults& defaults = checkpoint.generation;
  json = OrderedJson::object();
  SetIfGiven(json, "temperature", defaults.temperature);
  SetIfGiven(json, "top_p", defaults.top_p);
  SetIfGiven(json, "top_k", defaults.top_k);
  SetIfGiven(json, "min_p", defaults.min_p);
  SetIfGiven(json, "repetition_penalty", defaults.repetition_penalty);
  const std::vector<TokenId>& in_config = checkpoint.spec.eos_token_ids;
  for (const TokenId id : checkpoint.eos_token_ids) {
    if (std::find(in_config.begin(), in_config.end(), id) == in_config.end()) {
      json["eos_token_id"].push_back(id);
    }
  }
  MOESERVE_RETURN_IF_ERROR(WriteObject(json, to, kGenerationFile, written));
  return written;
}

}  // namespace moeserve
