// Reads lines from the user: with editing and history on a terminal, else as they come.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace moeserve::server {

class LineEditor {
 public:
  // Longer lines are cut.
  static constexpr size_t kMaxLineBytes = size_t{1} << 20;

  // Edits lines if standard input and output are terminals.
  static std::unique_ptr<LineEditor> Create();
  virtual ~LineEditor() = default;

  // Shows `prompt`, if the user types at a terminal, and returns the next line without its end.
  // nullopt at the end of the input. A line that the user gave up with Ctrl-C is empty.
  virtual std::optional<std::string> Read(const std::string& prompt) = 0;

  // Whether the user types at a terminal.
  virtual bool interactive() const = 0;
};

}  // namespace moeserve::server
