#include "server/keys/scopes.h"

namespace moeserve::server {
namespace {

constexpr Scope kScopes[] = {Scope::kGenerate, Scope::kStatistics, Scope::kRouting, Scope::kAdmin};

}  // namespace

std::string_view Name(Scope scope) {
  switch (scope) {
    case Scope::kGenerate:
      return "generate";
    case Scope::kStatistics:
      return "statistics";
    case Scope::kRouting:
      return "routing";
    case Scope::kAdmin:
      return "admin";
  }
  return "";
}

std::optional<Scope> ParseScope(std::string_view name) {
  for (const Scope scope : kScopes) {
    if (name == Name(scope)) return scope;
  }
  return std::nullopt;
}

std::string ScopeSet::Text(std::string_view separator) const {
  std::string text;
  for (const Scope scope : kScopes) {
    if (!Has(scope)) continue;
    if (!text.empty()) text += separator;
    text += Name(scope);
  }
  return text;
}

}  // namespace moeserve::server
