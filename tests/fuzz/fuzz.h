// What the fuzz targets share. libFuzzer calls LLVMFuzzerTestOneInput() with one input after the
// other, in one thread.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/files/tensor_file.h"

namespace moeserve::testing {

inline std::string_view Text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Takes parts from the front of an input.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(Text(data, size)) {}

  bool empty() const { return left_.empty(); }
  // Returns 0 at the end of the input.
  uint8_t Byte() {
    if (left_.empty()) return 0;
    const char byte = left_.front();
    left_.remove_prefix(1);
    return static_cast<uint8_t>(byte);
  }
  // Returns up to `count` bytes.
  std::string_view Take(size_t count) {
    const std::string_view part = left_.substr(0, count);
    left_.remove_prefix(part.size());
    return part;
  }
  // Returns the bytes before the next "\n\n\n", and removes them and the separator; all bytes if
  // there is none.
  std::string_view Section() {
    const size_t end = left_.find("\n\n\n");
    const std::string_view part = left_.substr(0, end);
    left_.remove_prefix(end == std::string_view::npos ? left_.size() : end + 3);
    return part;
  }
  std::string_view rest() const { return left_; }

 private:
  std::string_view left_;
};

// A line "NAME NUMBER..."; `numbers` has at most five, and ends at the first word that is none.
struct Row {
  std::string_view name;
  std::vector<int64_t> numbers;
};

// Takes a line from the front of a text.
inline Row TakeRow(std::string_view& text) {
  std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  Row row;
  row.name = line.substr(0, line.find(' '));
  line.remove_prefix(row.name.size());
  while (line.size() > 1 && row.numbers.size() < 5) {
    line.remove_prefix(1);  // the space
    int64_t number = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    if (error != std::errc()) break;
    row.numbers.push_back(number);
    line.remove_prefix(static_cast<size_t>(end - line.data()));
  }
  return row;
}

// Counts an input that the parser accepted. Prints their number at exit; run.sh fails if it is 0,
// because then the target tests little.
inline void CountAccepted() {
  struct Counter {
    ~Counter() { std::fprintf(stderr, "accepted inputs: %lld\n", count); }
    long long count = 0;
  };
  static Counter counter;
  ++counter.count;
}

// A file with the given bytes, in memory if the system has a file system in memory. It is deleted
// when the object is destroyed.
class InputFile {
 public:
  InputFile(std::string_view bytes, std::string_view suffix) {
    const char* const folder = std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
    path_ = std::filesystem::path(folder) /
            ("moeserve-fuzz-" + std::to_string(getpid()) + std::string(suffix));
    std::ofstream out(path_, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    MOESERVE_CHECK(out.good(), "the input is written");
  }
  ~InputFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Reads every tensor of an accepted file and touches its last byte. Reading may fail, because a
// copy would be too large, but not return another number of bytes.
inline void ReadAllTensors(const TensorFile& file) {
  volatile char last = 0;
  for (const TensorEntry& entry : file.tensors()) {
    const auto data = file.Read(entry);
    if (!data.ok()) continue;
    MOESERVE_CHECK(ByteCount(entry.shape, entry.type) == data->bytes.size(), "all of the tensor");
    if (!data->bytes.empty()) last = data->bytes.back();
  }
  (void)last;
}

// Encodes some text with a tokenizer that a file describes, and decodes the ids.
inline void UseTokenizer(const Tokenizer& tokenizer) {
  CountAccepted();
  constexpr std::string_view kText = "Some text, \xc3\xa9\xe2\x82\xac  12\n<s>[UNK]";
  for (const bool special : {false, true}) {
    const auto ids = tokenizer.Encode(kText, special);
    if (!ids.ok()) continue;
    MOESERVE_CHECK(tokenizer.Decode(*ids, special).ok(), "own ids can be decoded");
    const auto one = tokenizer.EncodeTexts(kText, std::nullopt, special);
    MOESERVE_CHECK(one.ok() && one->ids == *ids, "a single text has the ids of Encode()");
    const auto two = tokenizer.EncodeTexts(kText, kText, special, {.most = 9});
    for (const auto* made : {&one, &two}) {
      if (!made->ok()) continue;
      for (const TextSpan& span : (*made)->spans) {
        MOESERVE_CHECK(span.begin <= span.end && span.end <= kText.size(), "parts of the text");
      }
    }
  }
}

}  // namespace moeserve::testing
