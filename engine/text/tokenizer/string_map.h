// A hash map whose keys are string views; it does not own the strings.
#pragma once

#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"

namespace moeserve {

// Hashes std::string_view through absl::string_view: in Debian's Abseil the two are different
// types, and only the latter can be hashed.
struct StringViewHash {
  size_t operator()(std::string_view text) const {
    return absl::Hash<absl::string_view>()(absl::string_view(text.data(), text.size()));
  }
};

template <typename Value>
using StringMap = absl::flat_hash_map<std::string_view, Value, StringViewHash>;

}  // namespace moeserve
