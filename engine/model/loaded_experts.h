// Experts that a rank loads while its model runs.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "base/status.h"
#include "engine/layers/branch.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "engine/weights/expert_placement.h"
#include "kernels/backend.h"

namespace moeserve {

struct ModelOptions;

// The branches of some blocks, of which only the experts are used (Model::UsePlacement()).
class LoadedExperts {
 public:
  // Loads the experts of `missing`, holders without any for the others, as a model with these
  // options does. Any thread may call this while the model runs, if no other thread uses `source`
  // and `backend`. Sleeps between blocks so as not to read more than `bytes_per_second` of packed
  // weights; 0: it never sleeps.
  static Result<LoadedExperts> Load(const ModelSpec& spec, const ModelOptions& options,
                                    const ExpertPlacement::Blocks& missing, WeightSource& source,
                                    Backend& backend, int64_t bytes_per_second);

  std::map<std::pair<Stack, int>, std::unique_ptr<Branch>>& branches() { return branches_; }
  const std::map<std::pair<Stack, int>, std::unique_ptr<Branch>>& branches() const {
    return branches_;
  }

 private:
  std::map<std::pair<Stack, int>, std::unique_ptr<Branch>> branches_;
};

}  // namespace moeserve
