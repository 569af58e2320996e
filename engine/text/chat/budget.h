// Limits on the work and memory of rendering one template.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/text/chat/value.h"

namespace moeserve::chat {

struct RenderLimits {
  int64_t max_steps = 10'000'000;        // nodes evaluated plus elements visited
  size_t max_bytes = size_t{256} << 20;  // bytes allocated in total, intermediate results included
  size_t max_output_bytes = size_t{4} << 20;
};

// Depth of nested nodes, including those of called macros.
inline constexpr int kMaxEvaluationDepth = 1000;
inline constexpr int kMaxContainerDepth = 80;
inline constexpr int64_t kMaxRange = 100'000;  // largest range(); the value in Jinja's sandbox

class Budget {
 public:
  explicit Budget(const RenderLimits& limits) : limits_(limits) {}

  void Step(int64_t count = 1) {
    if ((steps_ += count) > limits_.max_steps) Fail("the template does too much work");
  }
  // Counts bytes; must be called before they are allocated.
  void Bytes(size_t count) {
    if (count > limits_.max_bytes - bytes_) Fail("the template needs too much memory");
    bytes_ += count;
  }
  // Counts the elements of a new list or dictionary.
  void Elements(size_t count) {
    if (count > limits_.max_bytes / kElementBytes) Fail("the template needs too much memory");
    Bytes(kElementBytes * (count + 1));
  }
  const RenderLimits& limits() const { return limits_; }

 private:
  static constexpr size_t kElementBytes = 64;

  const RenderLimits limits_;
  int64_t steps_ = 0;
  size_t bytes_ = 0;
};

}  // namespace moeserve::chat
