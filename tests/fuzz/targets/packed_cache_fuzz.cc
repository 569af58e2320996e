// Files of --packed-cache. The first byte chooses the bank, the second one how its file is changed:
// by the following bytes as a list of changes (offset, 2 bytes, and value) and a new length, or by
// replacing the file. Checksums can be made right again, so that what they cover is reached.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/weights/packed_cache.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/weights/packed_bank.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHeaderBytes = 4096;  // of all banks here
constexpr size_t kTable = 32;
constexpr size_t kExperts = 2;  // of all banks here
constexpr size_t kKey = kTable + kExperts * sizeof(PackedPart);

// The part of the CPU backend that keeps packed banks. No model runs on it.
class PackingBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override { return "cpu"; }
  std::string_view packed_layout() const override { return cpu::kPackedLayout; }
  int64_t PackedExpertBytes(const LinearBankShape& shape, int expert) const override {
    return cpu::CpuLinearBank::Bytes(shape, expert);
  }
  Result<std::unique_ptr<LinearBank>> NewPackedBank(LinearBankShape shape,
                                                    PackedBytes packed) override {
    return cpu::CpuLinearBank::View(std::move(shape), std::move(packed), &pool_);
  }
  Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) override {
    return cpu::CpuLinearBank::Create(std::move(shape), weight_memory_, &pool_);
  }

  Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t) override { return None(); }
  Result<std::unique_ptr<NormBank>> NewNormBank(NormShape, std::span<const HostTensor>,
                                                std::span<const HostTensor>) override {
    return None();
  }
  Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor&) override {
    return None();
  }
  Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank&) override {
    return None();
  }
  Result<std::unique_ptr<Router>> NewRouter(const RouteSettings&, const RouterTensors&) override {
    return None();
  }
  Result<std::unique_ptr<DeviceBuffer>> UploadBytes(std::span<const std::byte>) override {
    return None();
  }
  Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape>, KvCacheType,
                                                     std::vector<int64_t>) override {
    return None();
  }
  Result<std::unique_ptr<StateStorage>> NewStates(std::vector<StateShape>, int, int) override {
    return None();
  }
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings&) override {
    return None();
  }
  Result<double> MeasureReadBandwidth(int64_t, int) override { return None(); }
  int64_t PageBytes(std::span<const KvLayerShape>, KvCacheType) const override { return 0; }
  StepRows BeginStep(const StepInputs&, const void*, bool) override { return {}; }
  void RunStep(const std::function<void()>&) override {}
  void ForgetSteps(const void*) override {}
  void Embed(const EmbedArgs&) override {}
  void Norm(const NormArgs&) override {}
  void Linear(const LinearArgs&) override {}
  void Rope(const RopeArgs&) override {}
  void ScaleByPosition(const PositionScaleArgs&) override {}
  void AppendKv(const AppendKvArgs&) override {}
  void Attention(const AttentionArgs&) override {}
  void ShortConvolution(const ShortConvolutionArgs&) override {}
  void Recurrence(const RecurrenceArgs&) override {}
  RoutingPlan Route(const RouteArgs&) override { return {}; }
  void AssignRows(const AssignRowsArgs&) override {}
  void Combine(const CombineArgs&) override {}
  void Convert(const RowsView&, const RowsView&) override {}
  void AddScaled(const RowsView&, const RowsView&, const float*, float) override {}
  void ScaleBySigmoid(const RowsView&, const RowsView&) override {}
  void MultiplyByGate(const RowsView&, const RowsView&, GateActivation) override {}
  void GatherOutputRows(const RowsView&, const RowsView&) override {}
  void GatherSourceRows(const RowsView&, const RowsView&) override {}
  void PoolRows(const PoolArgs&) override {}
  void Scale(const RowsView&, float) override {}
  void SoftCapRows(const RowsView&, float) override {}
  void Clamp(const RowsView&, float) override {}
  void CopyToHost(const RowsView&, std::span<float>) override {}
  void Exchange(const ExchangeArgs&) override {}
  void CopyFromHost(std::span<const float>, const RowsView&) override {}
  RoutingPlan HostPlan(int) override { return {}; }
  StepOutcome FinishStep() override { return {}; }
  std::span<const TokenRoutes> CountStep(std::span<const uint8_t>) override { return {}; }
  int64_t weight_bytes() const override { return 0; }

 private:
  static absl::Status None() { return absl::UnimplementedError("no model runs here"); }
  cpu::ThreadPool pool_{1};
  cpu::WeightMemory weight_memory_;
};

PackedBankKey KeyOf(uint8_t choice) {
  PackedBankKey key;
  key.tensors = {"layers.0.up", "layers.0.gate"};
  key.shape.in_features = {8};
  key.shape.out_features = {3, 20};
  key.shape.gated = (choice & 1) != 0;
  key.shape.bias = (choice & 2) != 0;
  key.compute = (choice & 4) != 0 ? DType::kBF16 : DType::kF32;
  key.shape.weight_dtype = key.compute;
  if ((choice & 12) == 12) {
    constexpr Quantization kTypes[] = {Quantization::kInt8, Quantization::kInt4,
                                       Quantization::kInt8Channel, Quantization::kInt4K};
    key.shape.quantization = kTypes[choice >> 4 & 3];
    key.shape.in_features = {64};
  }
  return key;
}

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct StoredBank {
  fs::path path;
  std::string file;
};

// A cache in a folder of its own.
class Cache {
 public:
  Cache() {
    const char* const parent = fs::exists("/dev/shm") ? "/dev/shm" : "/tmp";
    folder_ = fs::path(parent) / ("moeserve-fuzz-" + std::to_string(getpid()) + "-packed");
    fs::remove_all(folder_);
    auto cache = PackedCache::Open({.folder = folder_,
                                    .place = "/models/m",
                                    .state = "state",
                                    .warn =
                                        [](const std::string& line) {
                                          MOESERVE_CHECK(!line.empty(), "a warning has a text");
                                        }},
                                   backend_);
    MOESERVE_CHECK(cache.ok(), "the folder is made");
    cache_ = *std::move(cache);
  }
  ~Cache() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  CachedBank Find(const PackedBankKey& key, bool verify) { return cache_->Find(key, verify); }

  // Returns the file of a bank whose weights are numbers.
  const StoredBank& Stored(uint8_t choice) {
    const auto [place, is_new] = stored_.try_emplace(choice);
    if (is_new) place->second = Store(KeyOf(choice));
    return place->second;
  }

 private:
  StoredBank Store(const PackedBankKey& key) {
    auto bank = backend_.NewLinearBank(key.shape);
    MOESERVE_CHECK(bank.ok(), "there is memory");
    for (int e = 0; e < (*bank)->num_experts(); ++e) {
      const int rows = key.shape.out_features[static_cast<size_t>(e)];
      const int columns = key.shape.in_features_of(e);
      std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(columns));
      for (size_t i = 0; i < values.size(); ++i) values[i] = 0.25f * static_cast<float>(i);
      const HostTensor weight{.data = values.data(), .shape = {rows, columns}, .owner = nullptr};
      (*bank)->LoadWeight(e, LinearBank::Half::kMain, 0, weight);
      if (key.shape.gated) (*bank)->LoadWeight(e, LinearBank::Half::kGate, 0, weight);
    }
    // Banks that differ in their shape alone have the same file.
    for (const auto& entry : fs::directory_iterator(folder_)) fs::remove(entry.path());
    cache_->Store(key, **bank);
    MOESERVE_CHECK(!fs::is_empty(folder_), "the bank is stored");
    const fs::path path = fs::directory_iterator(folder_)->path();
    return {path, ReadFile(path)};
  }

  PackingBackend backend_;
  fs::path folder_;
  std::unique_ptr<PackedCache> cache_;
  std::map<uint8_t, StoredBank> stored_;
};

// Returns the bytes of expert e, cut at the end of the file.
std::string_view ExpertOf(std::string_view file, size_t e) {
  PackedPart part;
  std::memcpy(&part, file.data() + kTable + e * sizeof part, sizeof part);
  if (part.offset > file.size() - kHeaderBytes) return {};
  return file.substr(kHeaderBytes + part.offset, part.bytes);
}

void PutChecksum(std::string& file, size_t at, std::string_view covered) {
  const uint64_t sum = PackedChecksum(covered);
  std::memcpy(file.data() + at, &sum, sizeof sum);
}

std::string Changed(std::string file, uint8_t mode, testing::Input input) {
  if ((mode & 1) != 0) {
    file = std::string(input.rest());
  } else {
    while (input.rest().size() >= 3) {
      const size_t low = input.Byte();
      const size_t at = low + 256 * size_t{input.Byte()};
      file[at % file.size()] = static_cast<char>(input.Byte());
    }
    // What is left says how the length changes.
    if (!input.empty()) file.resize(file.size() + input.Byte() % 32 - 16);
  }
  if (file.size() < kHeaderBytes) return file;
  const std::string_view bytes = file;
  for (size_t e = 0; (mode & 2) != 0 && e < kExperts; ++e) {
    PutChecksum(file, kTable + e * sizeof(PackedPart) + 16, ExpertOf(bytes, e));
  }
  if ((mode & 4) != 0) PutChecksum(file, kHeaderBytes - 8, bytes.substr(0, kHeaderBytes - 8));
  return file;
}

}  // namespace
}  // namespace moeserve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  static Cache cache;
  testing::Input input(data, size);
  const uint8_t choice = input.Byte() % 32;
  const PackedBankKey key = KeyOf(choice);
  const auto& [path, original] = cache.Stored(choice);
  const uint8_t mode = input.Byte();
  const std::string file = Changed(original, mode, input);
  {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(file.data(), static_cast<std::streamsize>(file.size()));
  }
  // Without a check at once, each expert is checked when it is used.
  const bool verify = (mode & 8) != 0;
  const auto [bank, experts] = cache.Find(key, verify);
  MOESERVE_CHECK(bank != nullptr || file != original, "what is stored is found");
  if (bank == nullptr) return 0;
  testing::CountAccepted();
  const std::string_view bytes = file;
  MOESERVE_CHECK(file.size() == original.size(), "the file has the size of its bank");
  const size_t key_bytes = kHeaderBytes - 8 - kKey;
  MOESERVE_CHECK(
      bytes.substr(kKey, key_bytes) == std::string_view(original).substr(kKey, key_bytes),
      "the file is of this bank");
  for (int e = 0; e < bank->num_experts(); ++e) {
    const std::span<const char> packed = bank->packed_bytes(e);
    const std::string_view expert(packed.data(), packed.size());
    MOESERVE_CHECK(expert == ExpertOf(bytes, static_cast<size_t>(e)),
                   "the bank has the bytes of the file");
    uint64_t checksum;
    std::memcpy(&checksum, bytes.data() + kTable + e * sizeof(PackedPart) + 16, sizeof checksum);
    const bool matches = PackedChecksum(packed) == checksum;
    MOESERVE_CHECK(experts->Verify(e).ok() == matches, "a damaged expert is refused");
    MOESERVE_CHECK(matches || !verify, "a file with a damaged expert is refused");
  }
  MOESERVE_CHECK(bank->shape().out_features == key.shape.out_features, "the shape of the bank");
  return 0;
}
