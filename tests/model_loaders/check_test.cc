// Damaged copies of one model folder. Each must be refused with the file, the tensor or key, and
// the expected and the found value.
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::Mentions;
using testing::RawTensor;
using testing::ReadFile;
using testing::SafetensorsBytes;
using testing::WriteFile;
using Json = nlohmann::json;
using Tensors = std::vector<RawTensor>;

// The contents of a folder before they are written. Test cases damage them.
struct Folder {
  fs::path path;
  Json config = testing::TinyConfig();
  Json tokenizer = Json::parse(testing::TinyTokenizerJson());
  Tensors tensors;

  RawTensor& Tensor(std::string_view name) {
    for (RawTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors[0];
  }
};

struct Case {
  std::string name;
  std::function<void(Folder&)> damage;                // changes the contents
  std::function<void(const fs::path&)> damage_files;  // changes the written files
  std::vector<std::string> expect;
};

void PatchHeader(const fs::path& path, const std::function<void(Json&)>& change) {
  const std::string bytes = ReadFile(path / "model.safetensors");
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  Json header = Json::parse(bytes.substr(8, size));
  change(header);
  WriteFile(path / "model.safetensors", SafetensorsBytes(header.dump(), bytes.substr(8 + size)));
}

void Truncate(const fs::path& file, int64_t by) {
  fs::resize_file(file, fs::file_size(file) - static_cast<uint64_t>(by));
}

Case CheckedParts(std::string name, std::function<void(Folder&)> damage,
                  std::vector<std::string> expect) {
  return {std::move(name), std::move(damage), nullptr, std::move(expect)};
}
Case Files(std::string name, std::function<void(const fs::path&)> damage,
           std::vector<std::string> expect) {
  return {std::move(name), nullptr, std::move(damage), std::move(expect)};
}

// Long because it is a table.
std::vector<Case> Cases() {
  const std::string weights = "model.safetensors: ";
  return {
      // Truncated files.
      Files("weights cut short", [](const fs::path& p) { Truncate(p / "model.safetensors", 1); },
            {weights, "data_offsets", "bytes of data in the file", "found "}),
      Files("weights cut within the header",
            [](const fs::path& p) { fs::resize_file(p / "model.safetensors", 100); },
            {weights, "header: expected ", "found 92 to the end of the file"}),
      Files("weights cut within the length",
            [](const fs::path& p) { fs::resize_file(p / "model.safetensors", 5); },
            {weights, "expected at least 8 bytes, found 5"}),
      Files("weights empty", [](const fs::path& p) { fs::resize_file(p / "model.safetensors", 0); },
            {weights, "expected at least 8 bytes, found 0"}),
      Files("config cut short", [](const fs::path& p) { Truncate(p / "config.json", 20); },
            {"config.json: ", "parse error"}),
      Files("config empty", [](const fs::path& p) { fs::resize_file(p / "config.json", 0); },
            {"config.json: ", "parse error"}),
      Files("tokenizer cut short", [](const fs::path& p) { Truncate(p / "tokenizer.json", 20); },
            {"tokenizer.json"}),

      // Missing and unexpected files.
      Files("no config", [](const fs::path& p) { fs::remove(p / "config.json"); },
            {": expected a model folder, which has a config.json, ", "models are not downloaded"}),
      Files("no weights", [](const fs::path& p) { fs::remove(p / "model.safetensors"); },
            {"expected model.safetensors, model.safetensors.index.json, ",
             "pytorch_model.bin or pytorch_model.bin.index.json, found none"}),
      Files("no tokenizer", [](const fs::path& p) { fs::remove(p / "tokenizer.json"); },
            {"tokenizer.json: expected tokenizer.json, tokenizer.model", "found none"}),
      Files("JSON in place of a SentencePiece model",
            [](const fs::path& p) { fs::rename(p / "tokenizer.json", p / "tokenizer.model"); },
            {"tokenizer.model: expected a SentencePiece model, found damaged data"}),
      Files("config is a directory",
            [](const fs::path& p) {
              fs::remove(p / "config.json");
              fs::create_directory(p / "config.json");
            },
            {"config.json: expected a regular file, found a directory"}),
      Files("weights are a pipe",
            [](const fs::path& p) {
              fs::remove(p / "model.safetensors");
              ASSERT_EQ(mkfifo((p / "model.safetensors").c_str(), 0600), 0);
            },
            {weights, "expected a regular file, found a special file"}),
      Files("weights are a dangling link",
            [](const fs::path& p) {
              fs::remove(p / "model.safetensors");
              fs::create_symlink("nowhere", p / "model.safetensors");
            },
            {weights, "cannot open"}),

      // Tensors that contradict the configuration.
      CheckedParts("wrong shape",
                   [](Folder& f) {
                     RawTensor& tensor = f.Tensor("blocks.0.attention.k.weight");
                     tensor.shape = {8, 15};
                     tensor.bytes.resize(8 * 15 * 4);
                   },
                   {weights, "\"blocks.0.attention.k.weight\"", "expected shape [8, 16]",
                    "config.json: [attention[0].num_kv_heads * attention[0].head_dim, hidden_size]",
                    "found [8, 15]"}),
      CheckedParts("transposed",
                   [](Folder& f) {
                     f.Tensor("embed.weight").shape = {16, 288};
                   },
                   {weights, "\"embed.weight\"", "[288, 16]", "[vocab_size, hidden_size]",
                    "found [16, 288]"}),
      CheckedParts("one dimension too many",
                   [](Folder& f) {
                     f.Tensor("norm.weight").shape = {1, 16};
                   },
                   {"\"norm.weight\"", "[16]", "hidden_size", "found [1, 16]"}),
      CheckedParts("missing tensor",
                   [](Folder& f) {
                     std::erase_if(f.tensors, [](const RawTensor& t) {
                       return t.name == "blocks.1.attention.out_bias";
                     });
                   },
                   {weights, "\"blocks.1.attention.out_bias\" is missing", "expected shape [16]",
                    "attention[1].out_bias is true", "found no such tensor"}),
      CheckedParts("extra tensor",
                   [](Folder& f) {
                     f.tensors.push_back({"blocks.0.attention.rotary", "F32", {1}, "abcd"});
                   },
                   {weights, "\"blocks.0.attention.rotary\"", "expected no such tensor",
                    "no key of the configuration", "found shape [1]"}),
      CheckedParts(
          "tensors of an expert too many",
          [](Folder& f) {
            RawTensor tensor = f.Tensor("blocks.0.feed_forward.experts.7.up.weight");
            tensor.name = "blocks.0.feed_forward.experts.8.up.weight";
            f.tensors.push_back(tensor);
          },
          {"\"blocks.0.feed_forward.experts.8.up.weight\"",
           "config.json: feed_forward[0].routing.num_experts is 8", "found shape [23, 8]"}),
      CheckedParts("head of a tied model",
                   [](Folder& f) { f.config["tie_word_embeddings"] = true; },
                   {"\"head.weight\"", "tie_word_embeddings is true", "found shape [288, 16]"}),
      CheckedParts("wrong dtype",
                   [](Folder& f) { f.Tensor("blocks.1.attention.router.weight").dtype = "I32"; },
                   {weights, "\"blocks.1.attention.router.weight\"",
                    "expected dtype F32, F16 or BF16", "found I32"}),
      CheckedParts("double precision",
                   [](Folder& f) {
                     f.Tensor("norm.weight").dtype = "F64";
                     f.Tensor("norm.weight").bytes.resize(16 * 8);
                   },
                   {"\"norm.weight\"", "expected dtype F32, F16 or BF16", "found F64"}),
      CheckedParts("every name has a suffix",
                   [](Folder& f) {
                     for (RawTensor& t : f.tensors) t.name.append(".weight");
                   },
                   {"problems", "\"embed.weight\" is missing", "more"}),

      // Expert widths that disagree.
      CheckedParts("widths in another order",
                   [](Folder& f) {
                     f.config["feed_forward"][0]["routing"]["widths"] = {23, 21, 19, 17,
                                                                         15, 13, 11, 9};
                   },
                   {"\"blocks.0.feed_forward.experts.0.gate.weight\"", "expected shape [23, 8]",
                    "feed_forward[0].routing.widths[0]", "found [9, 8]", "more"}),
      CheckedParts("one width",
                   [](Folder& f) { f.config["feed_forward"][0]["routing"]["widths"][5] = 20; },
                   {"3 problems", "\"blocks.0.feed_forward.experts.5.down.weight\"",
                    "expected shape [8, 20]", "hidden_size / feed_forward[0].routing.split.heads",
                    "feed_forward[0].routing.widths[5]", "found [8, 19]"}),
      CheckedParts("widths for fewer experts",
                   [](Folder& f) { f.config["feed_forward"][0]["routing"]["widths"].erase(7); },
                   {"config.json: feed_forward[0].routing.widths", "a list of 8 integers",
                    "found a list of 7 (num_experts is 8)"}),
      CheckedParts("one width for unequal experts",
                   [](Folder& f) { f.config["feed_forward"][0]["routing"]["widths"] = 16; },
                   {"24 problems", "expected shape [16, 8]", "found [9, 8]"}),
      CheckedParts("an expert more",
                   [](Folder& f) { f.config["feed_forward"][1]["routing"]["num_experts"] = 5; },
                   {"\"blocks.1.feed_forward.router.weight\"", "expected shape [5, 16]",
                    "found [4, 16]", "\"blocks.1.feed_forward.experts.4.up.weight\" is missing"}),

      // Keys of config.json.
      CheckedParts("unknown key", [](Folder& f) { f.config["rope_theta"] = 10000; },
                   {"config.json: rope_theta: ", "unknown key"}),
      CheckedParts("wrong type", [](Folder& f) { f.config["hidden_size"] = "16"; },
                   {"config.json: hidden_size: expected an integer, found \"16\""}),
      CheckedParts("k above the experts",
                   [](Folder& f) { f.config["attention"][1]["routing"]["select"]["k"] = 5; },
                   {"config.json: attention[1].routing.select.k: expected an integer in [1, 4], "
                    "found 5 (num_experts is 4)"}),
      CheckedParts(
          "a family with other layers", [](Folder& f) { f.config["model_type"] = "qwen4_exp"; },
          {"config.json: model_type: expected one of the ",
           ", found \"qwen4_exp\", whose models have several residual streams; this server does "
           "not compute that; nearest that is read: \"qwen3_moe\""}),
      CheckedParts("another family", [](Folder& f) { f.config["model_type"] = "mixtrall"; },
                   {"config.json: model_type: expected one of the ",
                    ", found \"mixtrall\"; nearest by name: \"mixtral\""}),

      // The structure of safetensors files.
      Files(
          "overlapping offsets",
          [](const fs::path& p) {
            PatchHeader(p, [](Json& header) {
              header["norm.weight"]["data_offsets"] = header["embed.weight"]["data_offsets"];
              header["norm.weight"]["shape"] = {288, 16};
            });
          },
          {weights, "tensor \"", "data_offsets: expected a begin of 18432", "found 0", "overlap"}),
      Files("a hole",
            [](const fs::path& p) {
              PatchHeader(p, [](Json& header) { header.erase("norm.weight"); });
            },
            {weights, "expected a begin of 18432 (the end of \"embed.weight\"), found 18496",
             "a hole"}),
      Files("size 2^63",
            [](const fs::path& p) {
              PatchHeader(
                  p, [](Json& header) { header["norm.weight"]["shape"] = {uint64_t{1} << 63}; });
            },
            {weights, "\"norm.weight\"", "expected integers in [0, 2^63)",
             "found 9223372036854775808"}),
      Files("product 2^63",
            [](const fs::path& p) {
              PatchHeader(p, [](Json& header) {
                header["norm.weight"]["shape"] = {int64_t{1} << 31, int64_t{1} << 32};
              });
            },
            {weights, "\"norm.weight\"", "expected a size below 2^63 bytes",
             "found [2147483648, 4294967296]"}),
      Files("offset 2^63",
            [](const fs::path& p) {
              PatchHeader(p, [](Json& header) {
                header["norm.weight"]["data_offsets"] = {0, uint64_t{1} << 63};
              });
            },
            {weights, "\"norm.weight\"", "expected two integers in [0, 2^63)"}),
      Files("header length 2^63",
            [](const fs::path& p) {
              std::string bytes = ReadFile(p / "model.safetensors");
              bytes[7] = '\x80';
              WriteFile(p / "model.safetensors", bytes);
            },
            {weights, "at most 100000000 bytes, found 9223372036854"}),
      Files("no JSON in the header",
            [](const fs::path& p) {
              WriteFile(p / "model.safetensors", SafetensorsBytes("{\"a\": nope}", ""));
            },
            {weights, "header: ", "parse error"}),

      // Tokenizer and token ids.
      Files("tokenizer is no JSON",
            [](const fs::path& p) { WriteFile(p / "tokenizer.json", "<>"); }, {"tokenizer.json"}),
      Files("tokenizer is a list", [](const fs::path& p) { WriteFile(p / "tokenizer.json", "[]"); },
            {"tokenizer.json", "expected", "found"}),
      CheckedParts("tokenizer of another model",
                   [](Folder& f) { f.tokenizer["model"]["type"] = "Magic"; },
                   {"tokenizer.json", "Magic"}),
      CheckedParts("token beyond the vocabulary",
                   [](Folder& f) { f.tokenizer["added_tokens"][0]["id"] = 288; },
                   {"tokenizer.json"}),
      CheckedParts(
          "tokenizer larger than the model",
          [](Folder& f) {
            f.tokenizer["added_tokens"] = Json::array();
            for (int id = 256; id <= 288; ++id) {
              f.tokenizer["model"]["vocab"][std::to_string(id)] = id;
            }
          },
          {"tokenizer.json: expected token ids in [0, 287], found ids up to 288 (vocab_size of "
           "config.json is 288)"}),
      Files("tokenizer_config is broken",
            [](const fs::path& p) { WriteFile(p / "tokenizer_config.json", "{"); },
            {"tokenizer_config.json"}),
      Files("tokenizer_config names a foreign id",
            [](const fs::path& p) {
              WriteFile(p / "tokenizer_config.json", R"({"added_tokens_decoder": {"288": {}}})");
            },
            {"tokenizer_config.json: added_tokens_decoder: expected ids in [0, 287], "
             "found \"288\""}),
      Files("generation_config is broken",
            [](const fs::path& p) { WriteFile(p / "generation_config.json", "{\"top_p\": 2}"); },
            {"generation_config.json: top_p: expected a number in [0, 1], found 2"}),
      Files("generation_config names a foreign id",
            [](const fs::path& p) {
              WriteFile(p / "generation_config.json", "{\"eos_token_id\": 288}");
            },
            {"generation_config.json: eos_token_id: expected ids in [0, 287], found 288"}),
  };
}

TEST(Check, TheWholeFolderPasses) {
  testing::TempFolder folder;
  testing::WriteNativeModel(folder.path(), testing::TinyConfig());
  const auto checkpoint = LoadCheckpoint(folder.path());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
}

TEST(Check, DamagedFoldersAreRefusedByName) {
  const ModelSpec spec = ParseNativeConfig(testing::TinyConfig().dump())->spec;
  const Tensors tensors = testing::RandomTensors(spec);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    testing::TempFolder temp;
    Folder folder;
    folder.path = temp.path();
    folder.tensors = tensors;
    if (c.damage) c.damage(folder);
    WriteFile(folder.path / "config.json", folder.config.dump());
    WriteFile(folder.path / "tokenizer.json", folder.tokenizer.dump());
    WriteFile(folder.path / "model.safetensors", SafetensorsBytes(folder.tensors));
    if (c.damage_files) c.damage_files(folder.path);
    const auto checkpoint = LoadCheckpoint(folder.path);
    EXPECT_TRUE(Mentions(checkpoint.status(), c.expect));
    EXPECT_LT(testing::Message(checkpoint.status()).size(), 4000u);
  }
}

TEST(Check, AFolderThatIsNone) {
  testing::TempFolder folder;
  const auto missing = LoadCheckpoint(folder.path() / "none");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(
      Mentions(missing.status(),
               {"none: expected a model folder, a .gguf file or a .pt file, found nothing"}));
  WriteFile(folder.path() / "file", "x");
  EXPECT_TRUE(
      Mentions(LoadCheckpoint(folder.path() / "file").status(),
               {"file: expected a model folder, a .gguf file or a .pt file, found another file"}));
  EXPECT_FALSE(LoadCheckpoint("").ok());
}

}  // namespace
}  // namespace moeserve
