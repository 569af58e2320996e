// Reads a zip archive of uncompressed entries, such as a PyTorch file, in place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"

namespace moeserve {

struct ZipEntry {
  std::string_view name;   // with '/' between components
  std::string_view bytes;  // the contents
  uint32_t crc = 0;        // as stated; 0 if the writer did not compute it
};

// The entries of an archive. Refers to the archive's bytes, which must outlive it. Immutable.
class ZipFile {
 public:
  static constexpr size_t kMaxEntries = size_t{1} << 20;
  // The contents of entries of at most this size are compared with their CRC when an archive is
  // opened. Larger ones are tensor data, which would take long to read.
  static constexpr size_t kMaxCheckedBytes = 4096;

  // InvalidArgument, with entry, expected and found value, unless `bytes` is a whole archive of
  // one part, with zip64 records or without, in which
  //  - every entry is stored, neither compressed nor encrypted, and lies inside the archive;
  //  - every local header agrees with the central directory in name, flags, sizes and CRC;
  //  - no two entries have the same name, and none overlap;
  //  - no name is absolute, has a component "." or "..", or a byte that file names must not have;
  //  - the CRC of small entries is right.
  // PyTorch writes a CRC of 0 if it was told not to compute it; a CRC of 0 is not checked.
  static Result<ZipFile> Parse(std::string_view bytes);

  // Returns the entries in the order of the central directory, without those of folders.
  const std::vector<ZipEntry>& entries() const { return entries_; }

  // Returns null if there is no entry of that name.
  const ZipEntry* Find(std::string_view name) const;

 private:
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Returns InvalidArgument if the contents of an entry of any size do not have its CRC.
absl::Status CheckCrc(const ZipEntry& entry);

}  // namespace moeserve
