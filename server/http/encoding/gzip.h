// Inflates and deflates gzip in parts (RFC 1952).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace moeserve::server::http {

enum class Inflated {
  kAll,       // the input is used up
  kPart,      // call again: the output was full
  kBad,       // the input is no gzip
  kTooLarge,  // the output would exceed its limit, or is out of proportion to the input
};

// Inflates one text, which may consist of several gzip members. Must be used by one thread at a
// time, and not after it has returned kBad or kTooLarge.
class GzipInflater {
 public:
  // The whole text may have `max_bytes` inflated.
  explicit GzipInflater(size_t max_bytes);
  ~GzipInflater();
  GzipInflater(const GzipInflater&) = delete;
  GzipInflater& operator=(const GzipInflater&) = delete;

  // Inflates bytes from the start of `input`, removes them from it, and appends at most `most`
  // bytes to `out`.
  Inflated Inflate(std::string_view& input, size_t most, std::string& out);

  // Returns whether the input so far is a complete text.
  bool complete() const { return complete_; }

 private:
  struct Stream;
  const std::unique_ptr<Stream> stream_;
  const size_t max_bytes_;
  uint64_t taken_ = 0;  // bytes of input
  size_t made_ = 0;     // bytes of output
  bool complete_ = false;
};

// Deflates one text, fast rather than small. Must be used by one thread at a time.
class GzipDeflater {
 public:
  GzipDeflater();
  ~GzipDeflater();
  GzipDeflater(const GzipDeflater&) = delete;
  GzipDeflater& operator=(const GzipDeflater&) = delete;

  // Appends to `out` what is ready of the result. `last` ends the text.
  void Deflate(std::string_view input, bool last, std::string& out);

 private:
  struct Stream;
  const std::unique_ptr<Stream> stream_;
};

}  // namespace moeserve::server::http
