// Runs a fuzz target once for every file in the given folders:
//
//   fuzz_replay TARGET FILE_OR_FOLDER...
//
// A broken invariant ends the process. replay.py finds the input that breaks it.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace fs = std::filesystem;

// replay_targets.inc has a line FUZZ_TARGET(name) for each target.
#define FUZZ_TARGET(name) extern "C" int Fuzz_##name(const uint8_t* data, size_t size);
#include "replay_targets.inc"
#undef FUZZ_TARGET

namespace {

struct Target {
  std::string_view name;
  int (*run)(const uint8_t* data, size_t size);
};
constexpr Target kTargets[] = {
#define FUZZ_TARGET(name) {#name, Fuzz_##name},
#include "replay_targets.inc"
#undef FUZZ_TARGET
};

std::vector<fs::path> FilesIn(const fs::path& path) {
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const Target* target = nullptr;
  for (const Target& t : kTargets) {
    if (!words.empty() && t.name == words.front()) target = &t;
  }
  if (target == nullptr || words.size() < 2) {
    std::fprintf(stderr, "fuzz_replay TARGET FILE_OR_FOLDER..., with one of these targets:\n");
    for (const Target& t : kTargets) std::fprintf(stderr, "%s\n", std::string(t.name).c_str());
    return 2;
  }
  int inputs = 0;
  for (size_t i = 1; i < words.size(); ++i) {
    for (const fs::path& file : FilesIn(words[i])) {
      std::ifstream in(file, std::ios::binary);
      if (!in) {
        std::fprintf(stderr, "%s cannot be read\n", file.c_str());
        return 2;
      }
      const std::string bytes{std::istreambuf_iterator<char>(in), {}};
      target->run(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++inputs;
    }
  }
  std::printf("%d inputs\n", inputs);
  return 0;
}
