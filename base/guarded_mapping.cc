#include "base/guarded_mapping.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/error_text.h"
#include "base/mutex.h"

namespace moeserve {

// Written under Registry::mutex, read by the signal handler without a lock. `begin` is 0 while the
// slot is free and is the last member to be set.
struct GuardedMapping::Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> damaged{false};
};

namespace {

using Slot = GuardedMapping::Slot;

// Blocks are never freed, so that the handler can walk them at any time.
struct SlotBlock {
  static constexpr int kSlots = 256;
  Slot slots[kSlots];
  std::atomic<SlotBlock*> next{nullptr};
};

struct Registry {
  Mutex mutex;
  std::map<uintptr_t, const GuardedMapping*> mappings ABSL_GUARDED_BY(mutex);  // by first address
};

static_assert(std::atomic<uintptr_t>::is_always_lock_free &&
                  std::atomic<SlotBlock*>::is_always_lock_free,
              "the handler must not lock");

SlotBlock first_block;
std::atomic<bool> any_damage{false};
uintptr_t page_size = 4096;
struct sigaction previous_action;

Registry& TheRegistry() {
  static auto* const registry = new Registry;  // never destroyed: mappings may outlive statics
  return *registry;
}

// Returns the slot of the mapping at `address`, or null. Async-signal-safe.

// A slot that is reused meanwhile could show the begin of one mapping and the end of another; then
// `begin` changes between the two loads. The slot of the mapping at a faulting address is stable,
// because the thread that faulted keeps that mapping.
Slot* FindSlot(uintptr_t address) {
  for (SlotBlock* block = &first_block; block != nullptr; block = block->next.load()) {
    for (Slot& slot : block->slots) {
      const uintptr_t begin = slot.begin.load();
      if (begin == 0 || address < begin || address >= slot.end.load()) continue;
      if (slot.begin.load() == begin) return &slot;
    }
  }
  return nullptr;
}

// Only async-signal-safe calls. The system calls are made directly, past the interceptors of
// sanitizers.
void HandleBusError(int signal, siginfo_t* info, void*) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  // Positive codes mean that the kernel reports an access of this thread.
  if (Slot* const slot = info->si_code > 0 ? FindSlot(address) : nullptr) {
    const uintptr_t from = address / page_size * page_size;
    const uintptr_t end = (slot->end.load() + page_size - 1) / page_size * page_size;
    // The mark comes first: whoever reads the zeros must find it.
    slot->damaged.store(true);
    any_damage.store(true);
    const long mapped = syscall(SYS_mmap, from, end - from, PROT_READ,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0L);
    if (mapped == static_cast<long>(from)) {
      errno = saved_errno;
      return;
    }
  }
  // After the return, the access is repeated and has the effect that it had without this handler.
  sigaction(SIGBUS, &previous_action, nullptr);
  if (info->si_code <= 0) raise(signal);  // another process sent it: nothing is repeated
  errno = saved_errno;
}

void InstallHandler() {
  page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action {};
  action.sa_sigaction = HandleBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous_action);
}

// Requires the registry's mutex.
Slot* TakeSlot(uintptr_t begin, uintptr_t end) {
  for (SlotBlock* block = &first_block;; block = block->next.load()) {
    for (Slot& slot : block->slots) {
      if (slot.begin.load() != 0) continue;
      slot.damaged.store(false);
      slot.end.store(end);
      slot.begin.store(begin);
      return &slot;
    }
    if (block->next.load() == nullptr) block->next.store(new SlotBlock);
  }
}

long long SteadyNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::unique_ptr<const GuardedMapping> GuardedMapping::Map(int fd, size_t size,
                                                          const std::filesystem::path& path) {
  void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  std::unique_ptr<GuardedMapping> mapping(
      new GuardedMapping(static_cast<const char*>(data), size, path));
  struct stat info {};
  if (fstat(fd, &info) == 0) {
    mapping->device_ = info.st_dev;
    mapping->inode_ = info.st_ino;
  }
  return mapping;
}

GuardedMapping::GuardedMapping(const char* data, size_t size, const std::filesystem::path& path)
    : data_(data), size_(size) {
  std::error_code error;
  path_ = std::filesystem::absolute(path, error);  // the working directory may change
  if (error) path_ = path;
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  Registry& registry = TheRegistry();
  const MutexLock lock(registry.mutex);
  slot_ = TakeSlot(begin, begin + size);
  registry.mappings[begin] = this;
}

GuardedMapping::~GuardedMapping() {
  {
    Registry& registry = TheRegistry();
    const MutexLock lock(registry.mutex);
    registry.mappings.erase(reinterpret_cast<uintptr_t>(data_));
    slot_->begin.store(0);
  }
  munmap(const_cast<char*>(data_), size_);
}

absl::Status GuardedMapping::Damaged() const {
  return absl::InternalError(Concat(
      "the file ", Printable(path_.filename().string(), 255),
      " changed while it was in use: expected ", size_,
      " bytes, found a shorter file or a disk that does not answer; write a new file and rename it "
      "over the old one instead of changing it"));
}

absl::Status GuardedMapping::CheckAccesses() const {
  return any_damage.load() && slot_->damaged.load() ? Damaged() : absl::OkStatus();
}

bool GuardedMapping::IsFileAt(const std::filesystem::path& path) const {
  struct stat info {};
  return inode_ != 0 && stat(path.c_str(), &info) == 0 && info.st_dev == device_ &&
         info.st_ino == inode_;
}

absl::Status GuardedMapping::Check() const {
  if (!slot_->damaged.load()) {
    struct stat info {};
    if (stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_ &&
        static_cast<uint64_t>(info.st_size) < size_) {
      slot_->damaged.store(true);
      any_damage.store(true);
    }
  }
  return CheckAccesses();
}

void WatchedMappings::Add(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  Registry& registry = TheRegistry();
  const MutexLock lock(registry.mutex);
  auto it = registry.mappings.upper_bound(at);
  if (it == registry.mappings.begin()) return;
  const GuardedMapping* const mapping = std::prev(it)->second;
  if (at >= std::prev(it)->first + mapping->size()) return;
  if (std::find(mappings_.begin(), mappings_.end(), mapping) == mappings_.end()) {
    mappings_.push_back(mapping);
  }
}

absl::Status WatchedMappings::Check(bool now) {
  if (mappings_.empty()) return absl::OkStatus();
  constexpr long long kInterval = 20'000'000;
  const long long time = SteadyNanoseconds();
  const bool looks = now || last_look_ns_ == 0 || time - last_look_ns_ >= kInterval;
  if (looks) last_look_ns_ = time;
  if (!looks && !any_damage.load()) return absl::OkStatus();
  for (const GuardedMapping* mapping : mappings_) {
    const absl::Status status = looks ? mapping->Check() : mapping->CheckAccesses();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace moeserve
