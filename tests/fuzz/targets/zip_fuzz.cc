// Zip archives.

#include "model_loaders/files/torch/zip_file.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

void ReadZip(std::string_view bytes) {
  const auto zip = ZipFile::Parse(bytes);
  if (!zip.ok()) return;
  CountAccepted();
  for (const ZipEntry& entry : zip->entries()) {
    MOESERVE_CHECK(entry.bytes.data() >= bytes.data() &&
                       entry.bytes.data() + entry.bytes.size() <= bytes.data() + bytes.size(),
                   "entries lie in the archive");
    MOESERVE_CHECK(zip->Find(entry.name) == &entry, "names are unique");
  }
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadZip(moeserve::testing::Text(data, size));
  return 0;
}
