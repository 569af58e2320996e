// Tables of experts by token id: their files, what is refused, and conversions.
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/spec/weights.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/inspect.h"
#include "model_loaders/write/convert_folder.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

constexpr char kTable[] = "blocks.1.feed_forward.router.table";
constexpr int kVocabulary = 288, kListed = 3, kExperts = 4;

Json Config() {
  Json json = TinyConfig();
  json["feed_forward"][1]["routing"]["select"] = {{"kind", "table"}, {"k", kListed}};
  return json;
}

// Three of the four experts; which one is missing depends on the token.
Ids SomeIds() {
  Ids ids;
  for (int token = 0; token < kVocabulary; ++token) {
    for (int i = 1; i <= kListed; ++i) ids.push_back((token + i) % kExperts);
  }
  return ids;
}

template <typename Integer>
std::string BytesOf(const std::vector<Integer>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Integer)};
}

// Writes a model whose table has this data and type.
void WriteTable(const fs::path& folder, const std::string& dtype, std::string bytes) {
  WriteNativeModel(folder, Config());
  const auto config = ParseNativeConfig(Config().dump());
  ASSERT_TRUE(config.ok()) << config.status();
  std::vector<RawTensor> tensors = RandomTensors(config->spec);
  for (RawTensor& tensor : tensors) {
    if (tensor.name != kTable) continue;
    tensor.dtype = dtype;
    tensor.bytes = std::move(bytes);
  }
  WriteFile(folder / "model.safetensors", SafetensorsBytes(tensors));
}

Result<Ids> IdsOf(const fs::path& folder) {
  MOESERVE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, LoadCheckpoint(folder));
  MOESERVE_RETURN_IF_ERROR(CheckTables(checkpoint.spec, *checkpoint.weights));
  return checkpoint.weights->GetIds(kTable, {kVocabulary, kListed});
}

std::vector<float> RouterLogits(const fs::path& folder) {
  auto runner = ModelRunner::Load(folder);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  return (*runner)->Run({3, 200, 17, 4, 280, 5, 61, 9}, 8);
}

TEST(RouterTable, ReadsBothIntegerTypes) {
  TempFolder folder;
  const Ids ids = SomeIds();
  WriteTable(folder.path(), "I32", BytesOf(ids));
  auto read = IdsOf(folder.path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, ids);
  const std::vector<float> expected = RouterLogits(folder.path());

  WriteTable(folder.path(), "I64", BytesOf(std::vector<int64_t>(ids.begin(), ids.end())));
  read = IdsOf(folder.path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, ids);
  EXPECT_EQ(RouterLogits(folder.path()), expected);

  // Other ids give other results, so the table is used.
  Ids others = ids;
  for (int32_t& id : others) id = (id + 1) % kExperts;
  WriteTable(folder.path(), "I32", BytesOf(others));
  EXPECT_NE(RouterLogits(folder.path()), expected);
}

TEST(RouterTable, IsNoParameter) {
  TempFolder folder;
  WriteTable(folder.path(), "I32", BytesOf(SomeIds()));
  const auto checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  int tables = 0;
  for (const TensorRequirement& tensor : RequiredTensors(checkpoint->spec)) {
    tables += tensor.ids;
    EXPECT_EQ(tensor.ids, tensor.name == kTable);
  }
  EXPECT_EQ(tables, 1);
  Json without = Config();
  without["feed_forward"][1]["routing"]["select"]["kind"] = "top_k";
  const auto config = ParseNativeConfig(without.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(Summarize(checkpoint->spec).parameters, Summarize(config->spec).parameters);
  EXPECT_EQ(checkpoint->weights->Get(kTable, {kVocabulary, kListed}).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(checkpoint->weights->GetIds("norm.weight", {16}).status().code(),
            absl::StatusCode::kInternal);
}

TEST(RouterTable, RefusesOtherTypes) {
  TempFolder folder;
  const std::vector<float> numbers(static_cast<size_t>(kVocabulary * kListed), 1.0f);
  WriteTable(folder.path(), "F32", BytesOf(numbers));
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                       {"model.safetensors: ", kTable, "expected dtype I32 or I64", "found F32"}));
}

TEST(RouterTable, RefusesIdsThatAreNoDistinctExperts) {
  TempFolder folder;
  const auto expect = [&](const std::function<void(Ids&)>& damage,
                          const std::vector<std::string>& parts) {
    Ids ids = SomeIds();
    damage(ids);
    WriteTable(folder.path(), "I32", BytesOf(ids));
    EXPECT_TRUE(Mentions(IdsOf(folder.path()).status(), parts));
    EXPECT_TRUE(Mentions(ModelRunner::Load(folder.path()).status(), parts));
  };
  expect([](Ids& ids) { ids[7] = -1; },
         {kTable, "row 2, column 1: expected an expert in [0, 3], found -1"});
  expect([](Ids& ids) { ids.back() = kExperts; },
         {kTable, "row 287, column 2: expected an expert in [0, 3], found 4"});
  expect([](Ids& ids) { ids[5] = ids[3]; },
         {kTable, "row 1, column 2: expected experts that are distinct in a row, found 2"});

  const Ids ids = SomeIds();
  std::vector<int64_t> wide(ids.begin(), ids.end());
  wide[4] = int64_t{1} << 32;  // 0 in its low 32 bits
  WriteTable(folder.path(), "I64", BytesOf(wide));
  EXPECT_TRUE(Mentions(IdsOf(folder.path()).status(),
                       {"model.safetensors: ", kTable,
                        "element 4: expected an integer of 32 bits, found 4294967296"}));
}

TEST(RouterTable, ConversionsKeepIt) {
  TempFolder folder;
  const Ids ids = SomeIds();
  WriteTable(folder.path(), "I64", BytesOf(std::vector<int64_t>(ids.begin(), ids.end())));
  const std::vector<float> expected = RouterLogits(folder.path());
  TempFolder parent;
  const fs::path made = parent.path() / "made", again = parent.path() / "again";
  ASSERT_TRUE(ConvertFolder(folder.path(), made, {}).ok());
  EXPECT_EQ(RouterLogits(made), expected);
  ASSERT_TRUE(ConvertFolder(made, again, {}).ok());
  EXPECT_EQ(ReadFile(again / "model.safetensors"), ReadFile(made / "model.safetensors"));
  ASSERT_TRUE(ConvertFolder(made, parent.path() / "bf16", {.type = ConvertType::kBf16}).ok());
  ASSERT_TRUE(QuantizeFolder(made, parent.path() / "int4", Quantization::kInt4).ok());
  for (const char* name : {"made", "bf16", "int4"}) {
    const auto read = IdsOf(parent.path() / name);
    ASSERT_TRUE(read.ok()) << name << ": " << read.status();
    EXPECT_EQ(*read, ids) << name;
  }
}

}  // namespace
}  // namespace moeserve::testing
