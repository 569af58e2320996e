// Functions that the tests of model_loaders share.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace moeserve::testing {

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

// Succeeds if `status` is an error whose message contains every one of `parts`.
inline ::testing::AssertionResult Mentions(const absl::Status& status,
                                           const std::vector<std::string>& parts) {
  if (status.ok()) return ::testing::AssertionFailure() << "accepted";
  const std::string message = Message(status);
  for (const std::string& part : parts) {
    if (message.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "no <" << part << "> in <" << message << ">";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace moeserve::testing
