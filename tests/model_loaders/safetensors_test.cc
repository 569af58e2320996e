#include "model_loaders/files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using testing::Mentions;
using testing::RawTensor;
using testing::ReadFile;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::WriteFile;

TEST(Safetensors, ReadsEveryTypeOfTheFormat) {
  // Every tensor has few elements, so that odd sizes leave later tensors unaligned.
  std::vector<RawTensor> tensors;
  for (const char* name : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "U16", "I16", "F16", "BF16",
                           "U32", "I32", "F32", "U64", "I64", "F64"}) {
    const auto type = ElementTypeFromName(name);
    ASSERT_TRUE(type.has_value()) << name;
    EXPECT_EQ(Name(*type), name);
    const auto size = static_cast<size_t>(SizeOf(*type));
    tensors.push_back({std::string("t.") + name, name, {3}, std::string(3 * size, name[0])});
  }
  tensors.push_back({"scalar", "I32", {}, std::string("\x2a\0\0\0", 4)});
  tensors.push_back({"empty", "F32", {4, 0, 2}, ""});
  TempFolder folder;
  WriteFile(folder.path() / "a.safetensors", SafetensorsBytes(tensors));
  const auto file = SafetensorsFile::Open(folder.path() / "a.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), tensors.size());
  for (const RawTensor& tensor : tensors) {
    const TensorEntry* entry = (*file)->Find(tensor.name);
    ASSERT_NE(entry, nullptr) << tensor.name;
    EXPECT_EQ(entry->shape, tensor.shape);
    EXPECT_EQ((*file)->Bytes(*entry), tensor.bytes);
  }
  EXPECT_EQ((*file)->Find("t."), nullptr);
  EXPECT_EQ((*file)->file_name(), "a.safetensors");
}

TEST(Safetensors, ReadsMetadataAndPaddedHeaders) {
  const std::vector<RawTensor> tensors = {{"a", "U8", {2}, "xy"}};
  const std::string header =
      testing::SafetensorsHeader(tensors, {{"format", "pt"}, {"note", "é"}}) + "      ";
  TempFolder folder;
  WriteFile(folder.path() / "a", SafetensorsBytes(header, "xy"));
  const auto file = SafetensorsFile::Open(folder.path() / "a");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().at("note"), "é");
  EXPECT_EQ((*file)->Bytes((*file)->tensors()[0]), "xy");
}

TEST(Safetensors, AnEmptyTableIsAFile) {
  TempFolder folder;
  WriteFile(folder.path() / "a", SafetensorsBytes("{}", ""));
  EXPECT_TRUE(SafetensorsFile::Open(folder.path() / "a").ok());
}

TEST(Safetensors, RefusesBrokenContainers) {
  TempFolder folder;
  const auto open = [&](std::string_view bytes) {
    WriteFile(folder.path() / "a.safetensors", bytes);
    return SafetensorsFile::Open(folder.path() / "a.safetensors").status();
  };
  EXPECT_TRUE(Mentions(open(""), {"a.safetensors: ", "at least 8 bytes", "found 0"}));
  EXPECT_TRUE(Mentions(open("1234567"), {"a.safetensors: ", "at least 8 bytes", "found 7"}));
  EXPECT_TRUE(Mentions(open("\xff\xff\xff\xff\xff\xff\xff\xff"),
                       {"at most 100000000 bytes", "found 18446744073709551615"}));
  EXPECT_TRUE(Mentions(open(std::string("\x09\0\0\0\0\0\0\0{}", 10)),
                       {"expected 9 bytes", "found 2 to the end of the file"}));
  const std::string whole = SafetensorsBytes({{"a", "F32", {2}, "12345678"}});
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(open(std::string_view(whole).substr(0, size)).ok()) << size;
  }
  EXPECT_TRUE(open(whole).ok());
  EXPECT_TRUE(Mentions(open(whole + "x"), {"expected 8 bytes", "found 9"}));
}

TEST(Safetensors, RefusesWhatIsNotARegularFile) {
  TempFolder folder;
  EXPECT_EQ(SafetensorsFile::Open(folder.path() / "none").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(Mentions(SafetensorsFile::Open(folder.path()).status(),
                       {"expected a regular file", "directory"}));
}

// The cases are in hostile/headers.json: {name, header (text), data_size, expect (parts of the
// error message)}.
TEST(Safetensors, RefusesHostileHeaders) {
  const auto cases =
      nlohmann::json::parse(ReadFile(std::string(MOESERVE_HOSTILE_DIR) + "/headers.json"));
  ASSERT_GT(cases.size(), 30u);
  for (const auto& c : cases) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const auto header =
        ParseSafetensorsHeader(c["header"].get<std::string>(), c["data_size"].get<uint64_t>());
    EXPECT_TRUE(Mentions(header.status(), c["expect"].get<std::vector<std::string>>()));
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace moeserve
