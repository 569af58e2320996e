// Owns the intermediate texts of encoding one input.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <utility>

namespace moeserve {

class TextArena {
 public:
  // Stores `text` and returns a view that is valid until the arena is destroyed.
  std::string_view Keep(std::string text) { return texts_.emplace_back(std::move(text)); }

 private:
  std::deque<std::string> texts_;  // never moves its elements
};

}  // namespace moeserve
