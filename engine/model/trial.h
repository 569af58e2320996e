// Tries a model before it is served.
#pragma once

#include "absl/status/status.h"
#include "engine/model/model.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// Runs one step with a few tokens over the first block of `cache`, whose content is lost, and
// counts nothing. InvalidArgument if router scores or logits are not finite, Internal if a mapped
// file is damaged (Model::CheckFiles()). To be called after Model::Reserve() and before requests
// run.
absl::Status TryModel(Model& model, KvCacheStorage& cache, StateStorage* states);

}  // namespace moeserve
