// Result<T> and the two macros that pass an error on to the caller.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moeserve {

using absl::Status;
template <typename T>
using Result = absl::StatusOr<T>;

}  // namespace moeserve

#define MOESERVE_STATUS_CONCAT_INNER(a, b) a##b
#define MOESERVE_STATUS_CONCAT(a, b) MOESERVE_STATUS_CONCAT_INNER(a, b)

// Returns the status of `expr` from the enclosing function unless it is OK.
#define MOESERVE_RETURN_IF_ERROR(expr)                 \
  do {                                                 \
    if (absl::Status s_ = (expr); !s_.ok()) return s_; \
  } while (false)

// MOESERVE_ASSIGN_OR_RETURN(auto x, MakeX()) declares x, or returns the error of MakeX() from the
// enclosing function.
#define MOESERVE_ASSIGN_OR_RETURN(lhs, expr) \
  MOESERVE_ASSIGN_OR_RETURN_IMPL(MOESERVE_STATUS_CONCAT(result_, __LINE__), lhs, expr)
#define MOESERVE_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return std::move(tmp).status();       \
  lhs = std::move(tmp).value()
