// Files of linear banks in a device's layout, kept between runs of one checkpoint.
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
  // CheckpointIdentity of the checkpoint. Files of another state of the same place are replaced.
  std::string place;
  std::string state;
  // Receives one line for every file that cannot be read or written; may be empty.
  std::function<void(const std::string&)> warn;
};

// Identifies a bank.
struct PackedBankKey {
  std::vector<std::string> tensors;  // names of its tensors, in order; at least one
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
// Every byte is compared or covered by a checksum; a file that fails a check counts as absent.
// Checksums detect damage, not forgery: whoever may write to the folder controls what the model
// computes, as with the checkpoint. Files are replaced by renaming and never changed in place, so
// any number of processes may share a folder, and it may be emptied at any time. Files must not be
// truncated while they are mapped.
//
// Single-threaded.
class PackedCache {
 public:
  // Creates the folder, readable by this user alone, if it does not exist. `backend` outlives the
  // cache. Unimplemented if it has no packed form. Failures of the folder are warnings.
  static Result<std::unique_ptr<PackedCache>> Open(PackedCacheOptions options, Backend& backend);

  // Returns the bank, mapped; null if it is not in the folder.
  std::unique_ptr<LinearBank> Find(const PackedBankKey& key);

  // Writes a completely loaded bank. A failure is a warning, and later calls do nothing. Does
  // nothing while another process writes the same bank.
  void Store(const PackedBankKey& key, const LinearBank& bank);

  int found() const { return found_; }
  int stored() const { return stored_; }

 private:
  PackedCache(PackedCacheOptions options, Backend& backend);
  std::filesystem::path PathOf(const PackedBankKey& key) const;
  std::string KeyText(const PackedBankKey& key) const;
  // Returns the bank in `file`, or null with the reason in `problem` (empty if the file belongs to
  // another state of the checkpoint).
  std::unique_ptr<LinearBank> Read(const PackedBankKey& key, int file, std::string& problem);
  void Warn(const std::filesystem::path& path, const std::string& problem) const;

  PackedCacheOptions options_;
  std::string state_digest_;
  Backend& backend_;
  bool writing_ = true;
  bool open_failed_ = false;  // and a warning was given
  int found_ = 0;
  int stored_ = 0;
};

// Checksum over 8-byte words; detects every change within one word. Public for tests.
uint64_t PackedChecksum(std::span<const char> bytes);

}  // namespace moeserve
