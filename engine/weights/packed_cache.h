// Caches linear weights in a device's layout in files, so that later runs of a checkpoint need not
// pack them again.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/tiers/packed_file.h"
#include "kernels/backend.h"

namespace moeserve {

struct PackedCacheOptions {
  std::filesystem::path folder;
  // The fields of the checkpoint's CheckpointIdentity: `place` is the path of its folder, `state`
  // differs between versions of the folder's files. Packed files of the same place with another
  // state are replaced.
  std::string place;
  std::string state;
  // Receives one line for every packed file that cannot be read or written; may be empty.
  std::function<void(const std::string&)> warn;
  // Whether Store() only remembers the bank, for WriteDeferred().
  bool defer = false;
  // Bytes of the file system that must stay free after a file is written.
  uint64_t least_free = 0;
};

// Identifies one bank of linear weights.
struct PackedBankKey {
  std::vector<std::string> tensors;  // names of the bank's tensors, in order; at least one
  LinearBankShape shape;             // weight_dtype is ignored
  DType compute = DType::kF32;       // type of the inputs of matrix products
};

// A bank that reads its weights from a file.
struct CachedBank {
  std::unique_ptr<LinearBank> bank;        // null: there is no valid file
  std::shared_ptr<PackedExperts> experts;  // of the file
};

// A folder with one file per bank (packed_file.h).
//
// Opening a file reads its header only. Every byte of it is compared or covered by a checksum; a
// file that fails a check counts as absent. The experts have checksums of their own, which whoever
// uses an expert must compare first (PackedExperts::Verify()). Files of earlier versions of the
// format count as absent, and are replaced.
//
// Checksums detect damage, not forgery: whoever can write to the folder controls what the model
// computes, as with the checkpoint. Files are replaced by renaming and never changed in place, so
// any number of processes may share a folder, and the folder may be emptied at any time. A file
// that is cut short while it is mapped makes the model's steps fail (Model::CheckFiles()).
//
// One thread at a time may use an object.
class PackedCache {
 public:
  // Creates the folder, readable by this user alone, if it does not exist. `backend` outlives the
  // cache. Unimplemented if the backend has no packed layout. Problems with the folder are reported
  // as warnings, not as errors.
  static Result<std::unique_ptr<PackedCache>> Open(PackedCacheOptions options, Backend& backend);

  // Returns the bank, which reads from the mapped file. The bank lacks experts that are false in
  // `here` [E] (empty: it has all). With `verify`, a file with a damaged expert counts as absent,
  // and no expert need be verified later. Sets the file's time to now, so that RemoveUnused() keeps
  // it.
  CachedBank Find(const PackedBankKey& key, bool verify, const std::vector<bool>& here = {});

  // Writes a bank that has all experts, with all weights loaded. Does nothing while another process
  // writes the same bank. A failure is reported as a warning; after a failure, later calls do
  // nothing.
  void Store(const PackedBankKey& key, const LinearBank& bank);

  // Writes the banks that Store() has remembered, which must still exist, until `stopped` returns
  // true.
  void WriteDeferred(const std::function<bool()>& stopped);
  bool has_deferred() const { return !deferred_.empty(); }

  // Removes the packed files of `folder`, and what writers have left behind, that nobody has used
  // for `age`. Ignores errors: files that cannot be removed stay.
  static void RemoveUnused(const std::filesystem::path& folder, std::chrono::hours age);

  int found() const { return found_; }
  int stored() const { return stored_; }

 private:
  PackedCache(PackedCacheOptions options, Backend& backend);
  std::vector<PackedPart> PartsOf(const LinearBankShape& shape) const;
  void Write(const PackedBankKey& key, const LinearBank& bank,
             const std::function<bool()>& stopped);
  std::filesystem::path PathOf(const PackedBankKey& key) const;
  std::string KeyText(const PackedBankKey& key) const;
  // Returns the experts in `file`, and writes the type of their weights to `shape`. If that is not
  // possible, returns null and writes the reason to `problem`, which stays empty if the file
  // belongs to another state of the checkpoint or to another version of the format.
  std::shared_ptr<PackedExperts> Read(const PackedBankKey& key, const std::filesystem::path& path,
                                      int file, LinearBankShape& shape, std::string& problem) const;
  // Returns a bank with these experts, verified if `verify`.
  CachedBank BankOf(LinearBankShape shape, std::shared_ptr<PackedExperts> experts, bool verify,
                    const std::vector<bool>& here, std::string& problem);
  void Warn(const std::filesystem::path& path, const std::string& problem) const;

  PackedCacheOptions options_;
  std::string state_digest_;
  Backend& backend_;
  std::vector<std::pair<PackedBankKey, const LinearBank*>> deferred_;
  bool writing_ = true;
  bool open_failed_ = false;  // opening a file failed, and a warning was given
  int found_ = 0;
  int stored_ = 0;
};

}  // namespace moeserve
