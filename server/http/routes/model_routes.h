// POST /v1/models/load and /v1/models/unload: clients load, replace and unload models.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "server/context.h"
#include "server/http/router.h"

namespace moeserve::server::http {

// `context` must outlive the router.
void AddModelRoutes(Router& router, ServerContext& context);

// Makes the response when a model was loaded, or could not be.
using LoadedFormat = std::function<Response(const Result<ModelStatus>&)>;

// Begins to load a model: see ModelManager::Load(). The returned response waits for the result. If
// the client leaves, the model is loaded nevertheless. Request::wake describes `wake`.
Handled LoadModel(ModelManager& manager, const std::string& model, const std::string& path,
                  std::function<void()> wake, LoadedFormat format);

}  // namespace moeserve::server::http
