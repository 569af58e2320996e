// The number of kernels that a decode step of a model launches. Launches take most of the time of
// small layers, so an additional one is a loss of speed.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/cuda/device/runtime.h"
#include "nlohmann/json.hpp"
#include "tests/cuda_emulator/launch_count.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

// Returns the kernels of a step of one token.
int KernelsOfStep(ModelRunner& runner) {
  runner.Run({3, 1, 4}, 1);
  const uint64_t before = emulator::KernelsRun();
  runner.Run({1}, 1, 3);
  return static_cast<int>(emulator::KernelsRun() - before);
}

// Returns a golden model's folder.
std::filesystem::path GoldenFolder(const std::string& name) {
  const std::vector<GoldenModel> models = GoldenModels();
  const auto model = std::ranges::find(models, name, &GoldenModel::name);
  return model == models.end() ? std::filesystem::path() : model->model;
}

RunnerOptions Bf16OnDevice() { return {.compute = DType::kBF16, .device = "cuda_emulated"}; }

TEST(CudaLaunchesTest, DecodeSteps) {
  RegisterEmulatedDevice();
  struct Expected {
    std::string model;
    int per_layer, others;
  };
  for (const Expected& e :
       {Expected{"smoe", 6, 10}, Expected{"mh-moe", 8, 9}, Expected{"moa", 8, 9}}) {
    auto runner = ModelRunner::Load(GoldenFolder(e.model), Bf16OnDevice());
    ASSERT_TRUE(runner.ok()) << runner.status();
    const int layers = (*runner)->spec().num_blocks() / 2;
    EXPECT_EQ(KernelsOfStep(**runner), layers * e.per_layer + e.others)
        << e.model << ", " << layers << " layers";
  }
}

// The weights of the QKV projection do not fit into one cluster of blocks. Steps of one token must
// have the bits of a step of many, whose norms are launches of their own.
TEST(CudaLaunchesTest, DecodeStepsOfAWideModel) {
  RegisterEmulatedDevice();
  nlohmann::json config = nlohmann::json::parse(ReadFile(GoldenFolder("smoe") / "config.json"));
  config["vocab_size"] = 288;
  config["hidden_size"] = 1024;
  config["num_hidden_layers"] = 3;
  config["attention"]["num_heads"] = 16;
  config["attention"]["num_kv_heads"] = 4;
  config["attention"]["head_dim"] = 64;
  config["feed_forward"]["routing"]["widths"] = 64;
  const TempFolder folder;
  WriteNativeModel(folder.path(), config, DType::kBF16);
  auto runner = ModelRunner::Load(folder.path(), Bf16OnDevice());
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_EQ(KernelsOfStep(**runner), 3 * 6 + 10);
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3};
  const std::vector<float> together = (*runner)->Run(tokens, 10, 0, {}, 1);
  for (const int chunk : {1, 3}) {
    EXPECT_TRUE((*runner)->Run(tokens, chunk, 0, {}, 2) == together) << "steps of " << chunk;
  }
}

}  // namespace
}  // namespace moeserve::testing
