#include "server/base/memory_budget.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/control_group.h"
#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

constexpr uint64_t kLeast = uint64_t{128} << 20;
constexpr uint64_t kMost = uint64_t{4} << 30;

}  // namespace

size_t MemoryBudget::available_to_one(ChargeFor purpose) const {
  const size_t quarter = capacity_ / 4;
  switch (purpose) {
    case ChargeFor::kArriving:
      return capacity_ - 2 * quarter;
    case ChargeFor::kNewRequest:
      return capacity_ - quarter;
    case ChargeFor::kRunningRequest:
      break;
  }
  return capacity_;
}

bool MemoryBudget::TryTake(size_t bytes, ChargeFor purpose) {
  const size_t limit = available_to_one(purpose);
  size_t used = used_.load(std::memory_order_relaxed);
  do {
    if (used > limit || bytes > limit - used) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  size_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < used + bytes &&
         !peak_.compare_exchange_weak(peak, used + bytes, std::memory_order_relaxed)) {
  }
  return true;
}

void MemoryBudget::Give(size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

MemoryCharge& MemoryCharge::operator=(MemoryCharge&& other) noexcept {
  if (this == &other) return *this;
  Release();
  budget_ = std::move(other.budget_);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

absl::Status MemoryCharge::Add(size_t bytes, ChargeFor purpose, size_t elsewhere) {
  if (budget_ == nullptr || bytes == 0) return absl::OkStatus();
  if (budget_->TryTake(bytes, purpose)) {
    bytes_ += bytes;
    return absl::OkStatus();
  }
  const size_t most = budget_->available_to_one(std::min(purpose, ChargeFor::kNewRequest));
  if (bytes > most || bytes_ + elsewhere > most - bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "request_too_large",
        Concat("the request and its answer need about ",
               ShowBytes(static_cast<int64_t>(bytes + bytes_ + elsewhere)),
               " of memory, expected at most ", ShowBytes(static_cast<int64_t>(most))));
  }
  return MakeError(absl::StatusCode::kResourceExhausted, "out_of_memory",
                   "the server has no memory left for this request; try again later");
}

void MemoryCharge::ReduceTo(size_t most) {
  if (budget_ == nullptr || bytes_ <= most) return;
  budget_->Give(bytes_ - most);
  bytes_ = most;
}

void MemoryCharge::Release() {
  if (budget_ != nullptr) budget_->Give(std::exchange(bytes_, 0));
}

size_t DefaultRequestMemory() {
  const uint64_t machine = static_cast<uint64_t>(std::max(0L, sysconf(_SC_PHYS_PAGES))) *
                           static_cast<uint64_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
  const uint64_t group = ReadControlGroupLimits().memory_bytes.value_or(machine);
  return static_cast<size_t>(std::clamp(std::min(machine, group) / 8, kLeast, kMost));
}

}  // namespace moeserve::server
