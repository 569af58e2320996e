// Limits the memory that requests hold together: bodies, parsed JSON, calls over gRPC, answers.
//
// Memory is charged before it is allocated. The charges are estimates that are at least as large as
// the memory that is really used, give or take the allocator's overhead.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace moeserve::server {

// What memory is charged for. The last quarter of a budget is kept for requests that run, so that
// new requests cannot end them. The quarter before is kept from what is arriving: large bodies, and
// calls over gRPC whose messages have not been parsed. So small requests find memory while clients
// send large ones slowly, or hold calls open.
enum class ChargeFor { kArriving, kNewRequest, kRunningRequest };

// Thread-safe.
class MemoryBudget {
 public:
  explicit MemoryBudget(size_t bytes) : capacity_(bytes) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Returns false, and takes nothing, if the budget does not have that many bytes left for this
  // purpose.
  bool TryTake(size_t bytes, ChargeFor purpose);
  void Give(size_t bytes);

  size_t capacity() const { return capacity_; }
  // Returns the number of bytes that can be charged for a purpose if nothing else is charged.
  size_t available_to_one(ChargeFor purpose = ChargeFor::kNewRequest) const;
  size_t used() const { return used_.load(std::memory_order_relaxed); }
  // Returns the most bytes that were used since the last call.
  size_t TakePeak() { return peak_.exchange(used(), std::memory_order_relaxed); }
  // Returns how many charges were refused.
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const size_t capacity_;
  std::atomic<size_t> used_{0};
  std::atomic<size_t> peak_{0};
  std::atomic<uint64_t> refused_{0};
};

// The bytes that one owner holds of a budget; gives them back when it is destroyed. Must be used by
// one thread at a time.
class MemoryCharge {
 public:
  MemoryCharge() = default;  // without a budget: every charge succeeds
  explicit MemoryCharge(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  ~MemoryCharge() { Release(); }
  MemoryCharge(MemoryCharge&& other) noexcept { *this = std::move(other); }
  MemoryCharge& operator=(MemoryCharge&& other) noexcept;

  // Charges `bytes` more. ResourceExhausted if that fails: with API error code "request_too_large"
  // if not even an idle server could hold what this owner would hold, together with `elsewhere`
  // bytes that the same request has charged elsewhere; else "out_of_memory".
  absl::Status Add(size_t bytes, ChargeFor purpose = ChargeFor::kNewRequest, size_t elsewhere = 0);
  // Gives back all bytes beyond `most`.
  void ReduceTo(size_t most);
  // Gives back all bytes.
  void Release();
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  size_t bytes_ = 0;
};

// Returns the budget to use by default: an eighth of the memory that this process may use (the
// machine's or its control group's), from 128 MiB to 4 GiB.
size_t DefaultRequestMemory();

}  // namespace moeserve::server
