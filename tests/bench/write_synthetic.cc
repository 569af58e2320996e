// Writes the weights of a synthetic model as a native folder, a GGUF file or both, so that other
// engines can run the same model as `moeserve bench --synthetic`, which generates it in memory.
//
//   write_synthetic --synthetic small --native DIR --gguf FILE
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/synthetic_options.h"
#include "tests/bench/synthetic_files.h"

namespace moeserve {
namespace {

absl::Status Run(const server::SyntheticOptions& options, const std::string& native,
                 const std::string& gguf) {
  MOESERVE_ASSIGN_OR_RETURN(const ModelSpec spec, server::BuildSyntheticSpec(options));
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  if (!native.empty()) MOESERVE_RETURN_IF_ERROR(testing::WriteNative(spec, *weights, native));
  if (gguf.empty()) return absl::OkStatus();
  return testing::WriteGguf(spec, *weights, server::Describe(options), gguf);
}

}  // namespace
}  // namespace moeserve

int main(int argc, char** argv) {
  CLI::App app("Writes the weights of a synthetic model");
  moeserve::server::SyntheticOptions options;
  std::string native, gguf;
  moeserve::server::AddSyntheticOptions(app, options)->required();
  app.add_option("--native", native, "Folder for config.json, model.safetensors, tokenizer.json");
  app.add_option("--gguf", gguf, "File; shapes that qwen3moe and qwen3 can express");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = moeserve::Run(options, native, gguf);
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}
