// Benchmarks end when something fails.
#pragma once

#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace moeserve {

template <typename T>
T Must(Result<T> result) {
  MOESERVE_CHECK(result.ok(), std::string(result.status().message()).c_str());
  return *std::move(result);
}

}  // namespace moeserve
