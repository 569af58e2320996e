// Limits on the work and memory of rendering one template.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "engine/text/chat/value.h"

namespace moeserve::chat {

struct RenderLimits {
  // Units of work: nodes evaluated, elements visited, and bytes read or written as Budget says.
  int64_t max_steps = 10'000'000;
  // Wall-clock time. A second guard only: every operation is charged in steps.
  std::chrono::steady_clock::duration max_time = std::chrono::seconds(10);
  size_t max_bytes = size_t{256} << 20;  // bytes allocated in total, intermediate results included
  size_t max_output_bytes = size_t{4} << 20;
};

// Depth of nested nodes, including those of called macros.
inline constexpr int kMaxEvaluationDepth = 1000;
inline constexpr int kMaxContainerDepth = 80;
inline constexpr int64_t kMaxRange = 100'000;  // largest range(); the value in Jinja's sandbox

// Every operation charges its work before it does it, in proportion to the bytes and elements that
// it touches. One step stands for some tens of nanoseconds.
class Budget {
 public:
  explicit Budget(const RenderLimits& limits)
      : limits_(limits), end_(std::chrono::steady_clock::now() + limits.max_time) {}

  void Step(int64_t count = 1) {
    if ((steps_ += count) > limits_.max_steps) Fail("the template does too much work");
    if (steps_ >= next_look_) Look();
  }
  // Counts bytes that are compared, searched or copied as a whole.
  void Read(size_t bytes) { Step(static_cast<int64_t>(bytes / 64)); }
  // Counts bytes that are decoded character by character.
  void Scan(size_t bytes) { Step(static_cast<int64_t>(bytes / 4)); }
  // Counts a copy of a text.
  void Copy(const Text& text) {
    const size_t spans = text.spans().size();
    Bytes(text.size() + spans * sizeof(TextSpan));
    Read(text.size() + 16 * spans);
  }
  // Counts bytes; must be called before they are allocated.
  void Bytes(size_t count) {
    if (count > limits_.max_bytes - bytes_) Fail("the template needs too much memory");
    bytes_ += count;
  }
  // Counts the elements of a new list or dictionary.
  void Elements(size_t count) {
    if (count > limits_.max_bytes / kElementBytes) Fail("the template needs too much memory");
    Step(static_cast<int64_t>(count / 4));
    Bytes(kElementBytes * (count + 1));
  }
  // Counts filters that apply filters, such as map, as long as it exists.
  class Nesting {
   public:
    explicit Nesting(Budget& budget) : budget_(budget) {
      if (++budget_.nesting_ > kMaxFilterNesting) {
        --budget_.nesting_;
        Fail("filters are nested too deeply");
      }
    }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;
    ~Nesting() { --budget_.nesting_; }

   private:
    Budget& budget_;
  };
  const RenderLimits& limits() const { return limits_; }
  int64_t steps() const { return steps_; }

 private:
  static constexpr size_t kElementBytes = 64;
  static constexpr int64_t kStepsPerLook = 4096;
  static constexpr int kMaxFilterNesting = 16;

  void Look() {
    next_look_ = steps_ + kStepsPerLook;
    if (std::chrono::steady_clock::now() > end_) Fail("the template takes too much time");
  }

  const RenderLimits limits_;
  const std::chrono::steady_clock::time_point end_;
  int64_t steps_ = 0;
  int64_t next_look_ = kStepsPerLook;
  size_t bytes_ = 0;
  int nesting_ = 0;
};

}  // namespace moeserve::chat
