#include "tests/support/family_cases.h"

#include <algorithm>
#include <cstring>

#include "model_loaders/files/safetensors.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

template <typename T>
std::vector<T> Values(const SafetensorsFile& file, const TensorEntry& entry) {
  const std::string_view bytes = file.Bytes(entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace

std::vector<FamilyCase> FamilyCases() {
  std::vector<FamilyCase> cases;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourcePath("tests/golden/families"))) {
    cases.push_back({entry.path().filename().string(), entry.path()});
  }
  std::sort(cases.begin(), cases.end(),
            [](const FamilyCase& a, const FamilyCase& b) { return a.name < b.name; });
  return cases;
}

std::string TestName(const FamilyCase& c) {
  std::string name = c.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

Result<FamilyAnswers> ReadFamilyAnswers(const std::filesystem::path& folder) {
  MOESERVE_ASSIGN_OR_RETURN(const std::shared_ptr<const SafetensorsFile> file,
                            SafetensorsFile::Open(folder / "golden.safetensors"));
  const TensorEntry* const tokens = file->Find("tokens");
  const TensorEntry* const logprobs = file->Find("logprobs");
  const TensorEntry* const greedy = file->Find("greedy");
  const TensorEntry* const margin = file->Find("margin");
  if (tokens == nullptr || logprobs == nullptr || greedy == nullptr || margin == nullptr ||
      logprobs->shape.size() != 3 || greedy->shape.size() != 2) {
    return absl::InvalidArgumentError(folder.string() + ": not the answers of a family");
  }
  const TensorEntry* const prediction = file->Find("prediction");
  return FamilyAnswers{.prompts = static_cast<int>(logprobs->shape[0]),
                       .length = static_cast<int>(logprobs->shape[1]),
                       .vocab = static_cast<int>(logprobs->shape[2]),
                       .continuation = static_cast<int>(greedy->shape[1]),
                       .tokens = Values<int32_t>(*file, *tokens),
                       .logprobs = Values<float>(*file, *logprobs),
                       .greedy = Values<int32_t>(*file, *greedy),
                       .margin = Values<float>(*file, *margin),
                       .prediction = prediction == nullptr ? std::vector<float>()
                                                           : Values<float>(*file, *prediction)};
}

}  // namespace moeserve::testing
