#include "server/rpc/router.h"

#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "server/base/request_id.h"
#include "server/rpc/error_details.h"

namespace moeserve::server::rpc {
namespace {

std::string RoutePath(const Method& method) {
  return Concat('/', method.service, '/', method.name);
}

// A call that has failed before it began.
class FailedCall final : public grpc::ServerGenericBidiReactor {
 public:
  explicit FailedCall(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

void Router::Add(const Method& method, Starter starter) {
  const bool added = starters_.emplace(RoutePath(method), std::move(starter)).second;
  MOESERVE_CHECK(added, "every call is added once");
}

bool Router::Has(const Method& method) const { return starters_.contains(RoutePath(method)); }

grpc::ServerGenericBidiReactor* Router::CreateReactor(grpc::GenericCallbackServerContext* context) {
  if (const auto found = starters_.find(context->method()); found != starters_.end()) {
    return found->second(context);
  }
  const std::string id = NewRequestId();
  context->AddTrailingMetadata("x-request-id", id);
  context->AddTrailingMetadata("x-error-code", "not_found");
  return new FailedCall(DetailedStatus(grpc::StatusCode::UNIMPLEMENTED,
                                       Concat("there is no call ", Quoted(context->method())),
                                       "not_found", id));
}

}  // namespace moeserve::server::rpc
