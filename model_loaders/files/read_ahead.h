// Reads files from the disk shortly before their bytes are used.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve {

// Lets the system read mapped files into its page cache on a thread of its own, so that the thread
// that uses the bytes does not wait for the disk. Files are read in the order given, each from
// front to back; a use elsewhere moves the place from which they are read.

// At most kAhead bytes are read that were not used yet. They belong to the page cache, which the
// system can reclaim, and not to the memory of this process. If no thread can be started, the
// system reads the bytes when they are used.
class ReadAhead {
 public:
  // Enough that the disk is busy while the largest usual tensor is being packed.
  static constexpr uint64_t kAhead = uint64_t{256} << 20;

  // Reads a part of a file, which begins at a page, into the page cache; returns when it was read
  // or earlier.
  using Reader = std::function<void(std::string_view)>;

  // `read` is called by the thread; the default is the system's. Tests give another one.
  explicit ReadAhead(std::vector<std::shared_ptr<const MappedFile>> files,
                     Reader read = SystemRead);
  // Waits for the end of the call of the reader in progress.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Says that `part`, a part of the bytes of one of the files, is used now. Does not wait. Ignores
  // bytes of other memory. Can be called by several threads.
  void Use(std::string_view part);

 private:
  struct Placed {
    std::shared_ptr<const MappedFile> file;
    uint64_t begin = 0;  // bytes of the files before this one
  };

  static void SystemRead(std::string_view part);

  void Run();
  // Reads the bytes [begin, end) of the concatenation of all files.
  void Read(uint64_t begin, uint64_t end) const;

  const Reader read_;
  std::vector<Placed> files_;
  uint64_t size_ = 0;  // of all files
  Mutex mutex_;
  std::condition_variable changed_;
  // Positions in the concatenation of all files. Bytes in [begin_, next_) have been read; those in
  // [next_, until_) are wanted.
  uint64_t begin_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t until_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace moeserve
