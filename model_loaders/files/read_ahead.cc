#include "model_loaders/files/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace moeserve {
namespace {

// Bytes per system call. Use() can move the place from which files are read after each of them.
constexpr uint64_t kStep = uint64_t{8} << 20;

}  // namespace

ReadAhead::ReadAhead(std::vector<std::shared_ptr<const MappedFile>> files, Reader read)
    : read_(std::move(read)) {
  for (std::shared_ptr<const MappedFile>& file : files) {
    const uint64_t bytes = file->bytes().size();
    if (bytes == 0) continue;
    files_.push_back({std::move(file), size_});
    size_ += bytes;
  }
}

ReadAhead::~ReadAhead() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void ReadAhead::Use(std::string_view part) {
  for (const Placed& placed : files_) {
    const std::string_view bytes = placed.file->bytes();
    if (part.data() < bytes.data() || part.data() + part.size() > bytes.data() + bytes.size()) {
      continue;
    }
    const uint64_t begin = placed.begin + static_cast<uint64_t>(part.data() - bytes.data());
    {
      const MutexLock lock(mutex_);
      // A tensor a little before the place of reading was probably read with its neighbours.
      const bool continues = begin + kAhead >= begin_ && begin <= std::max(next_, until_);
      if (!continues) begin_ = next_ = begin;
      const uint64_t until = std::min(begin + part.size() + kAhead, size_);
      until_ = continues ? std::max(until_, until) : until;
      if (next_ >= until_) return;
      if (!thread_.joinable() && !stop_) {
        try {
          thread_ = std::thread([this] { Run(); });
        } catch (const std::system_error&) {
          return;
        }
      }
    }
    changed_.notify_one();
    return;
  }
}

void ReadAhead::SystemRead(std::string_view part) {
  // A failure only means that the bytes are read when they are used.
  madvise(const_cast<char*>(part.data()), part.size(), MADV_WILLNEED);
}

void ReadAhead::Run() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.wait(
        lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || next_ < until_; });
    if (stop_) return;
    const uint64_t begin = next_;
    const uint64_t end = std::min(begin + kStep, until_);
    next_ = end;
    lock.unlock();
    Read(begin, end);
    lock.lock();
  }
}

void ReadAhead::Read(uint64_t begin, uint64_t end) const {
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const Placed& placed : files_) {
    const std::string_view bytes = placed.file->bytes();
    const uint64_t from = std::max(begin, placed.begin);
    const uint64_t until = std::min(end, placed.begin + bytes.size());
    if (from >= until) continue;
    const uint64_t first = (from - placed.begin) / page * page;
    const uint64_t last = until - placed.begin;
    read_(bytes.substr(first, last - first));
  }
}

}  // namespace moeserve
