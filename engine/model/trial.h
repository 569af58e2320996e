// Tries a model before it is served.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/model/model.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// Runs one step with a few tokens over the first block of `cache`, whose content is lost, and
// counts nothing. InvalidArgument if router scores or logits are not finite, Internal if a mapped
// file is damaged (Model::CheckFiles()). To be called after Model::Reserve() and before requests
// run.
absl::Status TryModel(Model& model, KvCacheStorage& cache, StateStorage* states);

// Returns about how long a step of `rows` tokens takes, rather too long: the time of a step of one
// text with some tokens, multiplied by the ratio of the rows. The step runs twice, and the first
// time does not count, because weights and memory are then touched for the first time. Otherwise as
// TryModel(); results are not looked at.
absl::Duration PredictLongStep(Model& model, KvCacheStorage& cache, StateStorage* states, int rows);

}  // namespace moeserve
