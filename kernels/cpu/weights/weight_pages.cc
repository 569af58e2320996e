#include "kernels/cpu/weights/weight_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#ifndef MADV_COLD
#define MADV_COLD 20
#endif

namespace moeserve::cpu {
namespace {

// The system reads at most the larger of a device's read-ahead and its largest transfer for one
// request; both are at least this long. Whatever is not requested is then read page by page.
constexpr uintptr_t kRequestBytes = uintptr_t{128} << 10;

uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

struct Pages {
  uintptr_t begin;
  uintptr_t end;

  bool empty() const { return begin >= end; }
  void* data() const { return reinterpret_cast<void*>(begin); }
  size_t size() const { return end - begin; }
};

// Returns the pages that hold some of the bytes.
Pages PagesOf(std::span<const char> bytes) {
  const uintptr_t page = PageBytes();
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  if (bytes.empty()) return {begin, begin};
  return {begin / page * page, (begin + bytes.size() + page - 1) / page * page};
}

// Returns the pages that hold nothing else.
Pages PagesWithin(std::span<const char> bytes) {
  const uintptr_t page = PageBytes();
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  return {(begin + page - 1) / page * page, (begin + bytes.size()) / page * page};
}

}  // namespace

void CpuWeightPages::ExpertsOf(const RoutingPlan& plan, std::vector<int>& experts) {
  experts.clear();
  for (int e = 0; e < plan.num_experts; ++e) {
    if (plan.expert_offsets[e] < plan.expert_offsets[e + 1]) experts.push_back(e);
  }
}

void CpuWeightPages::ForEach(int64_t count, const std::function<void(int64_t)>& run) {
  workers_.pool().Run(count, [&](int64_t i, int) { run(i); });
}

void CpuWeightPages::Advise(std::span<const char> bytes, PageAdvice advice) {
  const Pages pages = advice == PageAdvice::kCold ? PagesWithin(bytes) : PagesOf(bytes);
  if (pages.empty()) return;
  const int advices[] = {MADV_NORMAL, MADV_RANDOM, MADV_WILLNEED, MADV_COLD};
  const uintptr_t piece = advice == PageAdvice::kRequest ? kRequestBytes : pages.size();
  for (uintptr_t at = pages.begin; at < pages.end; at += piece) {
    madvise(reinterpret_cast<void*>(at), std::min(piece, pages.end - at),
            advices[static_cast<size_t>(advice)]);
  }
}

int64_t CpuWeightPages::Resident(std::span<const char> bytes) {
  const Pages pages = PagesOf(bytes);
  if (pages.empty()) return 0;
  const size_t count = pages.size() / PageBytes();
  resident_.resize(std::max(resident_.size(), count));
  if (mincore(pages.data(), pages.size(), resident_.data()) != 0) return std::ssize(bytes);
  const auto in_memory =
      std::count_if(resident_.begin(), resident_.begin() + static_cast<std::ptrdiff_t>(count),
                    [](unsigned char page) { return (page & 1) != 0; });
  return std::min<int64_t>(std::ssize(bytes), in_memory * static_cast<int64_t>(PageBytes()));
}

bool CpuWeightPages::Lock(std::span<const char> bytes) {
  const Pages pages = PagesOf(bytes);
  return pages.empty() || mlock(pages.data(), pages.size()) == 0;
}

}  // namespace moeserve::cpu
