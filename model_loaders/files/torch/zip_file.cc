#include "model_loaders/files/torch/zip_file.h"

#include <algorithm>
#include <bit>
#include <boost/crc.hpp>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error_text.h"

namespace moeserve {
namespace {

static_assert(std::endian::native == std::endian::little, "a zip archive's numbers are so");

// The records of the format begin with these signatures.
constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kDescriptor = 0x08074b50;
constexpr uint32_t kCentralHeader = 0x02014b50;
constexpr uint32_t kEnd64 = 0x06064b50;
constexpr uint32_t kEnd64Locator = 0x07064b50;
constexpr uint32_t kEnd = 0x06054b50;

// Sizes of the records without names and other parts of variable length.
constexpr size_t kLocalHeaderBytes = 30;
constexpr size_t kCentralHeaderBytes = 46;
constexpr size_t kEnd64Bytes = 56;
constexpr size_t kEnd64LocatorBytes = 20;
constexpr size_t kEndBytes = 22;

// Bits of the flags: two describe a compression level; sizes and CRC follow the data; the name is
// UTF-8. Encryption and everything else is refused.
constexpr uint16_t kDescriptorFlag = 1 << 3;
constexpr uint16_t kKnownFlags = 1 << 1 | 1 << 2 | kDescriptorFlag | 1 << 11;

constexpr uint32_t kIn64 = 0xFFFFFFFF;  // the value is in the zip64 record
constexpr uint16_t kExtra64 = 1;        // number of the zip64 extra field

template <typename Number>
Number At(std::string_view bytes, size_t offset) {
  Number number;
  std::memcpy(&number, bytes.data() + offset, sizeof(number));
  return number;
}

absl::Status EntryFault(std::string_view name, std::string_view message) {
  return absl::InvalidArgumentError(Concat("zip entry ", Quoted(name), ": ", message));
}

// The part of the archive that lists the entries.
struct Directory {
  uint64_t entries = 0;
  std::string_view bytes;
  uint64_t begin = 0;  // offset of `bytes` in the archive
};

// What the central directory states about an entry.
struct Listed {
  std::string_view name;
  uint16_t flags = 0;
  uint16_t method = 0;
  uint32_t crc = 0;
  uint64_t compressed = 0;
  uint64_t size = 0;
  uint64_t header = 0;  // offset of the local header
};

Result<Directory> FindDirectory(std::string_view archive) {
  if (archive.size() < kEndBytes || At<uint32_t>(archive, archive.size() - kEndBytes) != kEnd) {
    return absl::InvalidArgumentError(
        Concat("expected a zip archive, which ends with an end record of ", kEndBytes,
               " bytes, found none in ", archive.size(), " bytes"));
  }
  const uint64_t end_at = archive.size() - kEndBytes;
  const std::string_view end = archive.substr(end_at);
  if (At<uint16_t>(end, 4) != 0 || At<uint16_t>(end, 6) != 0 || At<uint16_t>(end, 20) != 0) {
    return absl::InvalidArgumentError(
        "zip end record: expected an archive of one part without comment");
  }
  uint64_t here = At<uint16_t>(end, 8);
  uint64_t entries = At<uint16_t>(end, 10);
  uint64_t size = At<uint32_t>(end, 12);
  uint64_t begin = At<uint32_t>(end, 16);
  uint64_t directory_end = end_at;
  if (end_at >= kEnd64LocatorBytes &&
      At<uint32_t>(archive, end_at - kEnd64LocatorBytes) == kEnd64Locator) {
    const uint64_t locator_at = end_at - kEnd64LocatorBytes;
    const uint64_t record_at = At<uint64_t>(archive, locator_at + 8);
    if (locator_at < kEnd64Bytes || record_at != locator_at - kEnd64Bytes ||
        At<uint32_t>(archive, record_at) != kEnd64 ||
        At<uint64_t>(archive, record_at + 4) != kEnd64Bytes - 12) {
      return absl::InvalidArgumentError(
          Concat("zip64 end record: expected it immediately before its locator at byte ",
                 locator_at, ", found it said to be at byte ", record_at));
    }
    const std::string_view record = archive.substr(record_at, kEnd64Bytes);
    const auto agree = [](uint64_t narrow, uint64_t none, uint64_t wide) {
      return narrow == none || narrow == wide;
    };
    if (At<uint32_t>(record, 16) != 0 || At<uint32_t>(record, 20) != 0 ||
        !agree(entries, 0xFFFF, At<uint64_t>(record, 32)) ||
        !agree(size, kIn64, At<uint64_t>(record, 40)) ||
        !agree(begin, kIn64, At<uint64_t>(record, 48))) {
      return absl::InvalidArgumentError(
          "zip64 end record: expected it to agree with the end record, found other "
          "values");
    }
    here = At<uint64_t>(record, 24);
    entries = At<uint64_t>(record, 32);
    size = At<uint64_t>(record, 40);
    begin = At<uint64_t>(record, 48);
    directory_end = record_at;
  }
  if (here != entries || entries > ZipFile::kMaxEntries) {
    return absl::InvalidArgumentError(
        Concat("zip end record: expected at most ", ZipFile::kMaxEntries,
               " entries, all in this part, found ", entries, " and ", here));
  }
  if (begin > directory_end || size != directory_end - begin) {
    return absl::InvalidArgumentError(Concat("zip central directory: expected it to end at byte ",
                                             directory_end, ", found ", size, " bytes from byte ",
                                             begin));
  }
  return Directory{entries, archive.substr(begin, size), begin};
}

// Replaces the values that are stored as kIn64 by those of the zip64 extra field.
absl::Status ReadExtra64(std::string_view extra, Listed* listed) {
  std::vector<uint64_t*> missing;
  for (uint64_t* value : {&listed->size, &listed->compressed, &listed->header}) {
    if (*value == kIn64) missing.push_back(value);
  }
  if (missing.empty()) return absl::OkStatus();
  while (extra.size() >= 4) {
    const uint16_t id = At<uint16_t>(extra, 0);
    const size_t size = At<uint16_t>(extra, 2);
    extra.remove_prefix(4);
    if (size > extra.size()) break;
    if (id == kExtra64 && size >= 8 * missing.size()) {
      for (size_t i = 0; i < missing.size(); ++i) *missing[i] = At<uint64_t>(extra, 8 * i);
      return absl::OkStatus();
    }
    extra.remove_prefix(size);
  }
  return EntryFault(listed->name, Concat("expected a zip64 field with ", missing.size(),
                                         " values in the central directory, found none"));
}

// Reads the next entry of the central directory and removes it from `rest`.
Result<Listed> ReadListed(std::string_view* rest) {
  if (rest->size() < kCentralHeaderBytes || At<uint32_t>(*rest, 0) != kCentralHeader) {
    return absl::InvalidArgumentError(
        Concat("zip central directory: expected one more entry, found ", rest->size(),
               " bytes that are none"));
  }
  const size_t name = At<uint16_t>(*rest, 28);
  const size_t extra = At<uint16_t>(*rest, 30);
  const size_t comment = At<uint16_t>(*rest, 32);
  const size_t total = kCentralHeaderBytes + name + extra + comment;
  if (total > rest->size()) {
    return absl::InvalidArgumentError(Concat("zip central directory: expected an entry of ", total,
                                             " bytes, found ", rest->size(),
                                             " to the end of the directory"));
  }
  Listed listed{.name = rest->substr(kCentralHeaderBytes, name),
                .flags = At<uint16_t>(*rest, 8),
                .method = At<uint16_t>(*rest, 10),
                .crc = At<uint32_t>(*rest, 16),
                .compressed = At<uint32_t>(*rest, 20),
                .size = At<uint32_t>(*rest, 24),
                .header = At<uint32_t>(*rest, 42)};
  MOESERVE_RETURN_IF_ERROR(ReadExtra64(rest->substr(kCentralHeaderBytes + name, extra), &listed));
  rest->remove_prefix(total);
  return listed;
}

absl::Status CheckName(std::string_view name) {
  std::string_view rest = name.ends_with('/') ? name.substr(0, name.size() - 1) : name;
  bool plain = !rest.empty();
  for (const char c : rest) {
    plain = plain && static_cast<unsigned char>(c) >= 0x20 && c != '\\' && c != 0x7f;
  }
  while (plain) {
    const size_t slash = rest.find('/');
    const std::string_view component = rest.substr(0, slash);
    plain = !component.empty() && component != "." && component != "..";
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  if (plain) return absl::OkStatus();
  return EntryFault(name, "expected a relative path without \".\" and \"..\" as its name");
}

absl::Status CheckListed(const Listed& listed) {
  MOESERVE_RETURN_IF_ERROR(CheckName(listed.name));
  if (listed.method != 0) {
    return EntryFault(listed.name, Concat("expected method 0 (stored without compression), found ",
                                          listed.method));
  }
  if ((listed.flags & ~kKnownFlags) != 0) {
    return EntryFault(
        listed.name, Concat("expected flags of an entry without encryption, found ", listed.flags));
  }
  if (listed.compressed != listed.size) {
    return EntryFault(listed.name, Concat("expected equal sizes of a stored entry, found ",
                                          listed.compressed, " and ", listed.size));
  }
  if (listed.name.ends_with('/') && listed.size != 0) {
    return EntryFault(listed.name, Concat("expected a folder of 0 bytes, found ", listed.size));
  }
  return absl::OkStatus();
}

// Returns the bytes of the record that follows the data of an entry with kDescriptorFlag; nullopt
// if it does not agree with the central directory.
std::optional<uint64_t> DescriptorBytes(const Listed& listed, std::string_view after_data) {
  if (after_data.size() < 16 || At<uint32_t>(after_data, 0) != kDescriptor ||
      At<uint32_t>(after_data, 4) != listed.crc) {
    return std::nullopt;
  }
  // Writers use sizes of 64 bits where they need them, and nothing in the record shows it.
  if (after_data.size() >= 24 && At<uint64_t>(after_data, 8) == listed.compressed &&
      At<uint64_t>(after_data, 16) == listed.size) {
    return 24;
  }
  if (At<uint32_t>(after_data, 8) == listed.compressed &&
      At<uint32_t>(after_data, 12) == listed.size) {
    return 16;
  }
  return std::nullopt;
}

// Returns whether `sizes` and CRC of a local header agree with the central directory. They may be
// absent if they follow the data. `extra` is the header's extra field.
bool LocalSizesAgree(std::string_view header, std::string_view extra, const Listed& listed) {
  const uint32_t crc = At<uint32_t>(header, 14);
  Listed local{.name = listed.name,
               .compressed = At<uint32_t>(header, 18),
               .size = At<uint32_t>(header, 22)};
  if ((listed.flags & kDescriptorFlag) != 0 && crc == 0) {
    const bool absent = (local.compressed == 0 || local.compressed == kIn64) &&
                        (local.size == 0 || local.size == kIn64);
    if (absent) return true;
  }
  return crc == listed.crc && ReadExtra64(extra, &local).ok() &&
         local.compressed == listed.compressed && local.size == listed.size;
}

// Finds the contents of a listed entry. Sets *end to the offset after everything that belongs to
// the entry. Nothing may lie behind `limit`, the offset of the central directory.
Result<ZipEntry> Locate(std::string_view archive, uint64_t limit, const Listed& listed,
                        uint64_t* end) {
  if (listed.header > limit || limit - listed.header < kLocalHeaderBytes ||
      At<uint32_t>(archive, listed.header) != kLocalHeader) {
    return EntryFault(listed.name, Concat("expected its header at byte ", listed.header,
                                          " (central directory), found none"));
  }
  const std::string_view header = archive.substr(listed.header, kLocalHeaderBytes);
  const uint64_t name_bytes = At<uint16_t>(header, 26);
  const uint64_t extra_bytes = At<uint16_t>(header, 28);
  const uint64_t begin = listed.header + kLocalHeaderBytes + name_bytes + extra_bytes;
  if (begin > limit || listed.size > limit - begin) {
    return EntryFault(listed.name,
                      Concat("expected at most ", limit - std::min(begin, limit),
                             " bytes (to the central directory), found ", listed.size));
  }
  const std::string_view name = archive.substr(listed.header + kLocalHeaderBytes, name_bytes);
  if (name != listed.name) {
    return EntryFault(listed.name,
                      Concat("expected the same name in its header, found ", Quoted(name)));
  }
  const std::string_view extra = archive.substr(begin - extra_bytes, extra_bytes);
  if (At<uint16_t>(header, 6) != listed.flags || At<uint16_t>(header, 8) != listed.method ||
      !LocalSizesAgree(header, extra, listed)) {
    return EntryFault(listed.name,
                      "expected flags, method, sizes and CRC of the central directory "
                      "in its header, found others");
  }
  *end = begin + listed.size;
  if ((listed.flags & kDescriptorFlag) != 0) {
    const std::optional<uint64_t> descriptor =
        DescriptorBytes(listed, archive.substr(*end, limit - *end));
    if (!descriptor.has_value()) {
      return EntryFault(listed.name,
                        "expected sizes and CRC of the central directory after its "
                        "data, found others");
    }
    *end += *descriptor;
  }
  return ZipEntry{listed.name, archive.substr(begin, listed.size), listed.crc};
}

// The bytes of the archive that belong to one entry.
struct Extent {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::string_view name;
};

absl::Status CheckOverlap(std::vector<Extent>* extents) {
  std::sort(extents->begin(), extents->end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents->size(); ++i) {
    const Extent& before = (*extents)[i - 1];
    const Extent& entry = (*extents)[i];
    if (entry.begin < before.end) {
      return EntryFault(entry.name, Concat("expected no overlap with ", Quoted(before.name),
                                           ", which ends at byte ", before.end,
                                           ", found a begin at byte ", entry.begin));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCrc(const ZipEntry& entry) {
  if (entry.crc == 0) return absl::OkStatus();
  boost::crc_32_type crc;
  crc.process_bytes(entry.bytes.data(), entry.bytes.size());
  if (crc.checksum() == entry.crc) return absl::OkStatus();
  return EntryFault(entry.name, Concat("expected the CRC ", entry.crc, ", found ", crc.checksum(),
                                       ": the file is damaged"));
}

Result<ZipFile> ZipFile::Parse(std::string_view bytes) {
  MOESERVE_ASSIGN_OR_RETURN(const Directory directory, FindDirectory(bytes));
  ZipFile zip;
  std::vector<Extent> extents;
  std::string_view rest = directory.bytes;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    MOESERVE_ASSIGN_OR_RETURN(const Listed listed, ReadListed(&rest));
    MOESERVE_RETURN_IF_ERROR(CheckListed(listed));
    Extent extent{.begin = listed.header, .name = listed.name};
    MOESERVE_ASSIGN_OR_RETURN(ZipEntry entry, Locate(bytes, directory.begin, listed, &extent.end));
    extents.push_back(extent);
    if (listed.name.ends_with('/')) continue;
    if (!zip.by_name_.emplace(listed.name, zip.entries_.size()).second) {
      return EntryFault(listed.name, "expected every name once, found it twice");
    }
    if (entry.bytes.size() <= kMaxCheckedBytes) MOESERVE_RETURN_IF_ERROR(CheckCrc(entry));
    zip.entries_.push_back(entry);
  }
  if (!rest.empty()) {
    return absl::InvalidArgumentError(Concat("zip central directory: expected ", directory.entries,
                                             " entries, found ", rest.size(), " more bytes"));
  }
  MOESERVE_RETURN_IF_ERROR(CheckOverlap(&extents));
  return zip;
}

const ZipEntry* ZipFile::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

}  // namespace moeserve
