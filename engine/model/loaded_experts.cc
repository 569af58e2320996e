#include "engine/model/loaded_experts.h"

#include <chrono>
#include <thread>

#include "base/check.h"
#include "engine/model/block_stack.h"
#include "engine/model/model.h"

namespace moeserve {

Result<LoadedExperts> LoadedExperts::Load(const ModelSpec& spec, const ModelOptions& options,
                                          const ExpertPlacement::Blocks& missing,
                                          WeightSource& source, Backend& backend,
                                          int64_t bytes_per_second) {
  const ExpertPlacement placement(options.exchange->ranks(), missing);
  const RankShare share{.exchange = options.exchange, .placement = &placement};
  LoadedExperts loaded;
  for (const ModelSpec* stack : {&spec, spec.encoder.get(), spec.prediction.get()}) {
    if (stack == nullptr) continue;
    LoadContext load{
        .source = source,
        .backend = backend,
        .compute = options.compute,
        .norm = stack->norm,
        .quantization = options.quantization,
        .vocabulary = stack == spec.prediction.get() ? spec.vocab_size : stack->vocab_size,
        .ranks = &share,
        .keep_fp8 = options.keep_fp8};
    for (const auto& [key, holders] : missing) {
      if (key.first != stack->stack) continue;
      const auto begin = std::chrono::steady_clock::now();
      const int64_t bytes_before = backend.weight_bytes();
      MOESERVE_ASSIGN_OR_RETURN(loaded.branches_[key], LoadBranch(load, *stack, key.second));
      MOESERVE_CHECK(loaded.branches_[key]->routed() != nullptr, "a routed block");
      if (bytes_per_second == 0) continue;
      const auto bytes = static_cast<double>(backend.weight_bytes() - bytes_before);
      std::this_thread::sleep_until(
          begin +
          std::chrono::duration_cast<std::chrono::steady_clock::duration>(
              std::chrono::duration<double>(bytes / static_cast<double>(bytes_per_second))));
    }
  }
  MOESERVE_RETURN_IF_ERROR(source.Check());
  return loaded;
}

}  // namespace moeserve
