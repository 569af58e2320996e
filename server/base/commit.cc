#include "server/base/commit.h"

namespace moeserve::server {
namespace {

#include "commit.inc"

}  // namespace

std::string_view Commit() { return kCommit; }

}  // namespace moeserve::server
