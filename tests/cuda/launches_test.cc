// The number of kernels that a decode step of a model launches. Launches take most of the time of
// small layers, so an additional one is a loss of speed.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/device/runtime.h"
#include "tests/cuda_emulator/launch_count.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// Returns the kernels of a step of one token.
int KernelsOfStep(ModelRunner& runner) {
  runner.Run({3, 1, 4}, 1);
  const uint64_t before = emulator::KernelsRun();
  runner.Run({1}, 1, 3);
  return static_cast<int>(emulator::KernelsRun() - before);
}

TEST(CudaLaunchesTest, DecodeSteps) {
  RegisterEmulatedDevice();
  struct Expected {
    std::string model;
    int per_layer, others;
  };
  for (const Expected& e :
       {Expected{"smoe", 7, 9}, Expected{"mh-moe", 9, 8}, Expected{"moa", 8, 9}}) {
    const std::vector<GoldenModel> models = GoldenModels();
    const auto model = std::find_if(models.begin(), models.end(),
                                    [&e](const GoldenModel& m) { return m.name == e.model; });
    ASSERT_NE(model, models.end()) << e.model;
    auto runner =
        ModelRunner::Load(model->model, {.compute = DType::kBF16, .device = "cuda_emulated"});
    ASSERT_TRUE(runner.ok()) << runner.status();
    const int layers = (*runner)->spec().num_blocks() / 2;
    EXPECT_EQ(KernelsOfStep(**runner), layers * e.per_layer + e.others)
        << e.model << ", " << layers << " layers";
  }
}

}  // namespace
}  // namespace moeserve::testing
