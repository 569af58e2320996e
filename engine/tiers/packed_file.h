// The format of a file with the packed weights of one bank.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/guarded_mapping.h"
#include "kernels/base/dtype.h"

namespace moeserve {

// A file consists of
//
//   magic, version, weight_dtype      8 + 4 + 4 bytes, integers little endian
//   bytes of the payload              8
//   number of experts, key's length   4 + 4
//   table                             offset in the payload, bytes and checksum of each expert: 24
//   key                               text: layout, checkpoint, tensors, types, shape
//   zeros, checksum of all before     8, at the end of a page of 4096 bytes
//   payload                           LinearBank::packed_bytes() of each expert
//
// Experts begin at multiples of 64 bytes, those of 64 KiB or more at pages, so that the pages of
// each can be requested and dropped on their own. Nobody reads the bytes between experts. A dense
// layer is a bank of one expert.

// A place in the payload.
struct PackedPart {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

// Returns the places of experts of these sizes, without checksums.
std::vector<PackedPart> PackedParts(std::span<const uint64_t> bytes);

// The bytes of a file before its payload.
size_t PackedHeaderBytes(size_t experts, size_t key_bytes);
std::string PackedHeader(const std::string& key, DType weight_dtype,
                         std::span<const PackedPart> parts);

// What the first bytes of a file say of it.
struct PackedPrefix {
  uint32_t weight_dtype = 0;
  // The table, whose checksums alone are not yet compared with anything. Empty if it lies behind
  // the end of the file.
  std::vector<PackedPart> parts;
};
// `file`: the bytes of the file, at least PackedHeaderBytes(0, 0).
PackedPrefix ReadPackedPrefix(std::string_view file, size_t experts);

enum class PackedHeaderState : uint8_t {
  kDamaged,
  kOld,     // of an earlier version of the format, which is not read
  kIntact,  // its checksum is right; the key may be another bank's
};
PackedHeaderState CheckPackedHeader(std::string_view file);

// Returns a checksum over 8-byte words, which detects every change that is confined to one word.
uint64_t PackedChecksum(std::span<const char> bytes);

// The experts of a bank in a mapped file. An expert's checksum is compared once per process, before
// the expert is first used. All functions may be called by any thread.
class PackedExperts {
 public:
  // `payload` and `parts` are those of the file at `path`, which `owner` maps. `bank` names the
  // bank in messages.
  PackedExperts(std::shared_ptr<const GuardedMapping> owner, std::span<const char> payload,
                std::vector<PackedPart> parts, std::filesystem::path path, std::string bank);

  int count() const { return static_cast<int>(parts_.size()); }
  std::span<const char> bytes(int expert) const {
    const PackedPart& part = parts_[static_cast<size_t>(expert)];
    return payload_.subspan(part.offset, part.bytes);
  }
  const std::shared_ptr<const GuardedMapping>& owner() const { return owner_; }

  // Reads the expert's bytes unless it is verified. Returns whether they are as they were written.
  bool Matches(int expert);
  bool verified(int expert) const { return verified_[static_cast<size_t>(expert)].load(); }
  // The same. Internal, with the expert, the bank and the
  // file, if they are damaged; the file is then removed, so that the next start packs the bank
  // anew.
  absl::Status Verify(int expert);

 private:
  // Removes the file unless another one has replaced it.
  void Remove() const;

  std::shared_ptr<const GuardedMapping> owner_;
  std::span<const char> payload_;
  std::vector<PackedPart> parts_;
  std::unique_ptr<std::atomic<bool>[]> verified_;
  std::filesystem::path path_;
  std::string bank_;
};

}  // namespace moeserve
