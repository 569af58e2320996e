// What an API key allows its owner to do.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace moeserve::server {

enum class Scope : uint8_t {
  kGenerate = 1,    // run the model on own texts: completions, chats, scores, tokenization
  kStatistics = 2,  // read statistics that show no text
  kRouting = 4,     // routing records and routing control in requests
  kAdmin = 8,       // read what shows texts of other users
};

// Returns "generate", "statistics", "routing" or "admin".
std::string_view Name(Scope scope);
// Returns nullopt if no scope has this name.
std::optional<Scope> ParseScope(std::string_view name);

class ScopeSet {
 public:
  constexpr ScopeSet() = default;
  constexpr ScopeSet(std::initializer_list<Scope> scopes) {
    for (const Scope scope : scopes) Add(scope);
  }
  static constexpr ScopeSet All() {
    return {Scope::kGenerate, Scope::kStatistics, Scope::kRouting, Scope::kAdmin};
  }

  constexpr void Add(Scope scope) { bits_ |= static_cast<unsigned>(scope); }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool Has(Scope scope) const { return (bits_ & static_cast<unsigned>(scope)) != 0; }
  constexpr bool HasAnyOf(ScopeSet other) const { return (bits_ & other.bits_) != 0; }
  // Returns the names, joined by `separator`.
  std::string Text(std::string_view separator) const;

 private:
  unsigned bits_ = 0;
};

}  // namespace moeserve::server
