#include "model_loaders/files/torch/zip_file.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"

namespace moeserve {
namespace {

using testing::Mentions;
using testing::Number;
using testing::ZipBytes;
using testing::ZipPart;
using testing::ZipStyle;

const std::vector<ZipPart>& ZipParts() {
  static const std::vector<ZipPart> parts = {
      {"top/data.pkl", "the pickle"}, {"top/data/0", std::string(100, 'x')}, {"top/empty", ""}};
  return parts;
}

TEST(ZipFile, ReadsEntries) {
  for (const bool descriptors : {false, true}) {
    for (const bool zip64 : {false, true}) {
      const std::string bytes = ZipBytes(ZipParts(), {descriptors, zip64});
      const auto zip = ZipFile::Parse(bytes);
      ASSERT_TRUE(zip.ok()) << zip.status();
      ASSERT_EQ(zip->entries().size(), ZipParts().size());
      for (const ZipPart& part : ZipParts()) {
        const ZipEntry* entry = zip->Find(part.name);
        ASSERT_NE(entry, nullptr) << part.name;
        EXPECT_EQ(entry->bytes, part.bytes);
        EXPECT_TRUE(CheckCrc(*entry).ok());
      }
      EXPECT_EQ(zip->Find("top"), nullptr);
    }
  }
}

TEST(ZipFile, FoldersAreNoEntries) {
  const std::string bytes = ZipBytes({{"top/", ""}, {"top/a", "1"}});
  const auto zip = ZipFile::Parse(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(zip->entries().size(), 1u);
  EXPECT_TRUE(ZipFile::Parse(ZipBytes({})).ok());
}

TEST(ZipFile, RefusesNames) {
  for (const char* name : {"/etc/passwd", "../a", "top/../a", "top/..", "./a", "top//a", "", "/",
                           "top\\a", "..", "top/\n", "//"}) {
    EXPECT_TRUE(Mentions(ZipFile::Parse(ZipBytes({{name, "1"}})).status(),
                         {"zip entry ", "a relative path without"}))
        << name;
  }
  EXPECT_TRUE(Mentions(ZipFile::Parse(ZipBytes({{"a", "1"}, {"a", "2"}})).status(),
                       {"zip entry \"a\"", "every name once"}));
  EXPECT_TRUE(Mentions(ZipFile::Parse(ZipBytes({{"a/", "1"}})).status(), {"a folder of 0 bytes"}));
}

TEST(ZipFile, ChecksTheCrcOfSmallEntries) {
  for (const bool descriptors : {false, true}) {
    std::string bytes = ZipBytes(ZipParts(), {.descriptors = descriptors});
    bytes[bytes.find("the pickle")] ^= 1;
    EXPECT_TRUE(Mentions(ZipFile::Parse(bytes).status(),
                         {"zip entry \"top/data.pkl\"", "expected the CRC ", "damaged"}));
  }
  // A large entry is checked only on demand.
  std::string bytes = ZipBytes({{"large", std::string(ZipFile::kMaxCheckedBytes + 1, 'x')}});
  bytes[bytes.find("xxx")] ^= 1;
  const auto zip = ZipFile::Parse(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_TRUE(Mentions(CheckCrc(zip->entries()[0]), {"zip entry \"large\"", "the CRC"}));
}

TEST(ZipFile, RefusesEveryTruncation) {
  const std::string whole = ZipBytes(ZipParts());
  ASSERT_TRUE(ZipFile::Parse(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ZipFile::Parse(whole.substr(0, size)).ok()) << size;
    EXPECT_FALSE(ZipFile::Parse(whole.substr(whole.size() - size)).ok() && size > 0) << size;
  }
  EXPECT_FALSE(ZipFile::Parse(whole + "x").ok());
}

// Replaces the bytes at `offset`.
void Patch(std::string* bytes, size_t offset, const std::string& value) {
  ASSERT_LE(offset + value.size(), bytes->size());
  bytes->replace(offset, value.size(), value);
}

// Archives that state something false about the entry "top/data/0" or about themselves.
TEST(ZipFile, RefusesLies) {
  const std::string name = "top/data/0";
  struct Case {
    const char* name;
    ZipStyle style;
    std::function<void(std::string*, size_t local, size_t central)> damage;
    std::vector<std::string> expect;
  };
  const ZipStyle plain = {.descriptors = false, .zip64 = false};
  const ZipStyle torch = {};
  const Case cases[] = {
      {"compressed",
       plain,
       [](std::string* z, size_t l, size_t c) {
         Patch(z, l + 8, Number(8, 2));
         Patch(z, c + 10, Number(8, 2));
       },
       {"method 0", "found 8"}},
      {"a bomb's size",
       plain,
       [](std::string* z, size_t, size_t c) { Patch(z, c + 24, Number(0xFFFFFFF0, 4)); },
       {"equal sizes", "100 and 4294967280"}},
      {"encrypted",
       plain,
       [](std::string* z, size_t l, size_t c) {
         Patch(z, l + 6, Number(1, 2));
         Patch(z, c + 8, Number(1, 2));
       },
       {"without encryption", "found 1"}},
      {"beyond the end",
       plain,
       [](std::string* z, size_t l, size_t c) {
         for (const size_t at : {l + 18, l + 22, c + 20, c + 24}) Patch(z, at, Number(5000, 4));
       },
       {"expected at most ", "found 5000"}},
      {"overlap",
       plain,
       [](std::string* z, size_t l, size_t c) {
         for (const size_t at : {l + 18, l + 22, c + 20, c + 24}) Patch(z, at, Number(110, 4));
         Patch(z, l + 14, Number(0, 4));
         Patch(z, c + 16, Number(0, 4));
       },
       {"no overlap with \"top/data/0\""}},
      {"other local size",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 22, Number(99, 4)); },
       {"flags, method, sizes and CRC"}},
      {"other local CRC",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 14, Number(99, 4)); },
       {"flags, method, sizes and CRC"}},
      {"other local method",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 8, Number(8, 2)); },
       {"flags, method, sizes and CRC"}},
      {"other local flags",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 6, Number(1, 2)); },
       {"flags, method, sizes and CRC"}},
      {"other local name",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 30, "evil"); },
       {"the same name", "\"evildata/0\""}},
      {"long local name",
       plain,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 26, Number(0xFFFF, 2)); },
       {"expected at most 0 bytes"}},
      {"other descriptor",
       torch,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 45 + 100 + 8, Number(99, 4)); },
       {"after its data"}},
      {"no descriptor",
       torch,
       [](std::string* z, size_t l, size_t) { Patch(z, l + 45 + 100, "none"); },
       {"after its data"}},
      {"header elsewhere",
       plain,
       [](std::string* z, size_t, size_t c) { Patch(z, c + 42, Number(7, 4)); },
       {"its header at byte 7"}},
      {"header behind the end",
       plain,
       [](std::string* z, size_t, size_t c) { Patch(z, c + 42, Number(0xFFFFFFF0, 4)); },
       {"its header at byte 4294967280"}},
      {"two entries with one header",
       plain,
       [](std::string* z, size_t l, size_t c) {
         // the entry before it, with the same contents under the same name
         Patch(z, c + 42, Number(0, 4));
         (void)l;
       },
       {"the same name", "\"top/data.pkl\""}},
      {"missing zip64 size",
       plain,
       [](std::string* z, size_t, size_t c) { Patch(z, c + 24, Number(0xFFFFFFFF, 4)); },
       {"zip64 field with 1 values"}},
      {"long comment",
       plain,
       [](std::string* z, size_t, size_t c) { Patch(z, c + 32, Number(0xFFFF, 2)); },
       {"an entry of ", "to the end of the directory"}},
      {"too many entries",
       plain,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 14, Number(0x00040004, 4)); },
       {"expected one more entry", "found 0 bytes"}},
      {"too few entries",
       plain,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 14, Number(0x00020002, 4)); },
       {"expected 2 entries", "more bytes"}},
      {"two parts",
       plain,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 18, Number(1, 2)); },
       {"one part"}},
      {"comment",
       plain,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 2, Number(1, 2)); },
       {"without comment"}},
      {"directory elsewhere",
       plain,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 6, Number(3, 4)); },
       {"central directory", "from byte 3"}},
      {"directory behind the end",
       torch,
       [](std::string* z, size_t, size_t) {
         Patch(z, z->size() - 6, Number(0xFFFFFFFF, 4));
         Patch(z, z->size() - 22 - 20 - 8, Number(~0ull, 8));
       },
       {"central directory", "from byte 18446744073709551615"}},
      {"zip64 record elsewhere",
       torch,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 22 - 12, Number(~0ull, 8)); },
       {"zip64 end record", "18446744073709551615"}},
      {"two counts",
       torch,
       [](std::string* z, size_t, size_t) { Patch(z, z->size() - 22 - 20 - 24, Number(9, 8)); },
       {"agree with the end record"}},
      {"a million entries",
       torch,
       [](std::string* z, size_t, size_t) {
         Patch(z, z->size() - 14, Number(~0ull, 4));
         Patch(z, z->size() - 22 - 20 - 32, Number(1ull << 40, 8) + Number(1ull << 40, 8));
       },
       {"at most 1048576 entries"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::string bytes = ZipBytes(ZipParts(), c.style);
    ASSERT_TRUE(ZipFile::Parse(bytes).ok());
    c.damage(&bytes, bytes.find(name) - 30, bytes.rfind(name) - 46);
    const absl::Status status = ZipFile::Parse(bytes).status();
    EXPECT_TRUE(Mentions(status, c.expect));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  }
}

// Sizes and the offset may be in a zip64 field.
TEST(ZipFile, ReadsZip64Entries) {
  std::string directory_entry;
  const std::string small = ZipBytes({{"a", "12345"}}, {.descriptors = false, .zip64 = false});
  const size_t central = small.rfind('a') - 46;
  std::string entry = small.substr(central, 47);
  entry.replace(20, 8, Number(~0ull, 8));
  entry.replace(30, 2, Number(28, 2));
  entry.replace(42, 4, Number(~0ull, 4));
  entry += Number(1, 2) + Number(24, 2) + Number(5, 8) + Number(5, 8) + Number(0, 8);
  std::string end = small.substr(central + 47);
  end.replace(12, 4, Number(entry.size(), 4));
  const std::string bytes = small.substr(0, central) + entry + end;
  const auto zip = ZipFile::Parse(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(zip->entries()[0].bytes, "12345");
}

}  // namespace
}  // namespace moeserve
