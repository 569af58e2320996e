#include "tests/model_loaders/patched_folder.h"

#include <cstring>

#include "nlohmann/json.hpp"
#include "tests/support/native_model.h"

namespace moeserve::testing {

namespace fs = std::filesystem;

void CopyPatched(const fs::path& folder, const std::string& patch, const fs::path& to) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    std::string bytes = ReadFile(entry.path());
    if (entry.path().filename() == "config.json") {
      nlohmann::json config = nlohmann::json::parse(bytes);
      config.merge_patch(nlohmann::json::parse(patch));
      bytes = config.dump();
    }
    WriteFile(to / entry.path().filename(), bytes);
  }
}

void ZeroTensors(const fs::path& folder, const std::string& suffix) {
  std::string bytes = ReadFile(folder / "model.safetensors");
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  const auto header = nlohmann::json::parse(bytes.substr(sizeof(size), size));
  for (const auto& [name, tensor] : header.items()) {
    if (!name.ends_with(suffix)) continue;
    const auto begin = tensor["data_offsets"][0].get<size_t>();
    const auto end = tensor["data_offsets"][1].get<size_t>();
    std::memset(bytes.data() + sizeof(size) + size + begin, 0, end - begin);
  }
  WriteFile(folder / "model.safetensors", bytes);
}

void RenameTensors(const fs::path& folder,
                   const std::function<std::string(const std::string&)>& rename) {
  const std::string bytes = ReadFile(folder / "model.safetensors");
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  const auto stored = nlohmann::json::parse(bytes.substr(sizeof(size), size));
  for (const auto& [name, tensor] : stored.items()) {
    const std::string other = name == "__metadata__" ? "" : rename(name);
    if (other.empty()) continue;
    const auto begin = tensor["data_offsets"][0].get<size_t>();
    const auto end = tensor["data_offsets"][1].get<size_t>();
    header[other] = tensor;
    header[other]["data_offsets"] = {data.size(), data.size() + end - begin};
    data += bytes.substr(sizeof(size) + size + begin, end - begin);
  }
  WriteFile(folder / "model.safetensors", SafetensorsBytes(header.dump(), data));
}

}  // namespace moeserve::testing
