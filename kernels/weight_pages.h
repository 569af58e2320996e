// The operations of a backend on the memory pages of weights that it reads from mapped files.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace moeserve {

// What the system should expect of pages. It is advice: a failure only costs time.
enum class PageAdvice : uint8_t {
  kNormal,   // pages are read in order, so that the system reads ahead
  kRandom,   // only pages that are requested or touched are read
  kRequest,  // the pages are used soon: reading them begins
  kCold,     // the pages are the first to be dropped
};

// Called by the thread that calls the operations of the backend. The bytes are those of banks that
// Backend::NewPackedBank() made.
class WeightPages {
 public:
  virtual ~WeightPages() = default;
  // Writes the experts that have rows in a plan of this step, ascending.
  virtual void ExpertsOf(const RoutingPlan& plan, std::vector<int>& experts) = 0;
  // Calls run(i) for i in [0, count) on the threads of the backend. `run` throws nothing.
  virtual void ForEach(int64_t count, const std::function<void(int64_t)>& run) = 0;
  // Advice on all pages that hold some of the bytes; kCold: nothing but these bytes.
  virtual void Advise(std::span<const char> bytes, PageAdvice advice) = 0;
  // Returns how many of the bytes are in memory, in the units of pages.
  virtual int64_t Resident(std::span<const char> bytes) = 0;
  // Reads the bytes and keeps them in memory. Returns false if the system does not allow the
  // process to keep them.
  virtual bool Lock(std::span<const char> bytes) = 0;
};

}  // namespace moeserve
