// Linear banks as a device lays them out, kept in files between runs of one checkpoint.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"

namespace moeserve {

struct PackedCacheOptions {
  std::filesystem::path folder;
  // Where the checkpoint lies and what it is (CheckpointIdentity). Another state of the same place
  // replaces the files of the one before.
  std::string place;
  std::string state;
  // Told in one line what could not be read or written; may be empty.
  std::function<void(const std::string&)> warn;
};

// What a bank is made of.
struct PackedBankKey {
  std::vector<std::string> tensors;  // that it is made of, in order; at least one
  LinearBankShape shape;             // all but weight_dtype
  DType compute = DType::kF32;       // type of the run's products
};

// One file for each bank:
//
//   magic, version, weight_dtype      8 + 4 + 4 bytes, integers in the machine's order (little)
//   bytes and checksum of the payload 8 + 8
//   length of the key, zero           4 + 4
//   key                               text: layout, checkpoint, tensors, types, shape
//   zeros, checksum of all before     8, at the end of a page of 4096 bytes
//   payload                           LinearBank::packed_bytes(), to the end of the file
//
// Every byte is compared or covered by a checksum, and a file that is not as it must be counts as
// absent. Checksums find damage, not forgery: who may write to the folder decides what the model
// computes, as with the checkpoint. Files are replaced by renaming and never changed in place, so
// any number of processes may share a folder, and it may be emptied at any time. Files must not be
// truncated by others while they are mapped.
//
// Single-threaded.
class PackedCache {
 public:
  // Makes the folder (for this user alone) if there is none. Unimplemented where the backend, which
  // must outlive the cache, has no packed form. Trouble with the folder is a warning.
  static Result<std::unique_ptr<PackedCache>> Open(PackedCacheOptions options, Backend& backend);

  // The bank, mapped; null if there is none.
  std::unique_ptr<LinearBank> Find(const PackedBankKey& key);

  // Writes a bank that is completely loaded. A failure is a warning and the last attempt. Does
  // nothing while another process writes the same bank.
  void Store(const PackedBankKey& key, const LinearBank& bank);

  int found() const { return found_; }
  int stored() const { return stored_; }

 private:
  PackedCache(PackedCacheOptions options, Backend& backend);
  std::filesystem::path PathOf(const PackedBankKey& key) const;
  std::string KeyText(const PackedBankKey& key) const;
  // The bank in `file`, null with a reason where it is not this key's, empty for another state's.
  std::unique_ptr<LinearBank> Read(const PackedBankKey& key, int file, std::string& problem);
  void Warn(const std::filesystem::path& path, const std::string& problem) const;

  PackedCacheOptions options_;
  std::string state_digest_;
  Backend& backend_;
  bool writing_ = true;
  bool open_failed_ = false;  // and was told
  int found_ = 0;
  int stored_ = 0;
};

// Of `bytes`, 8 of them at a time: any change within one word shows for certain. For tests.
uint64_t PackedChecksum(std::span<const char> bytes);

}  // namespace moeserve
