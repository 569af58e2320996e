// A hash map with keys that it does not own.
#pragma once

#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"

namespace moeserve {

// Debian's Abseil has a string_view of its own and does not hash the standard one.
struct StringViewHash {
  size_t operator()(std::string_view text) const {
    return absl::Hash<absl::string_view>()(absl::string_view(text.data(), text.size()));
  }
};

template <typename Value>
using StringMap = absl::flat_hash_map<std::string_view, Value, StringViewHash>;

}  // namespace moeserve
