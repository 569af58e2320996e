// Choosing kernels by measuring them: the file of choices, the measurements, and products.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/quantized/linear_fp8.h"
#include "kernels/cuda/quantized/linear_grouped.h"
#include "kernels/cuda/quantized/linear_int4.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/quantized/linear_mxfp4.h"
#include "kernels/cuda/tuning/attention_tuning.h"
#include "kernels/cuda/tuning/choices.h"
#include "kernels/cuda/tuning/graph_device.h"
#include "kernels/cuda/tuning/product_tuning.h"
#include "kernels/cuda/tuning/tuner.h"
#include "kernels/cuda/tuning/tuning_key.h"
#include "tests/cuda/counting_device.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using cuda::Choices;
using cuda::TuneCase;

class ChoicesTest : public ::testing::Test {
 protected:
  ChoicesTest() {
    fs::create_directories(folder_);
    path_ = folder_ + "/made/choices";
  }
  ~ChoicesTest() override { fs::remove_all(folder_); }

  void Write(const std::string& text) {
    fs::create_directories(folder_ + "/made");
    std::ofstream(path_) << text;
  }

  std::string folder_ = ::testing::TempDir() + "choices." + std::to_string(getpid());
  std::string path_;
  const Choices::Names names_ = {"slow", "quick"};
};

TEST_F(ChoicesTest, FindsTheNearestNumberOfRows) {
  Choices choices;
  const int site = choices.Site("a", names_);
  EXPECT_EQ(choices.Find(site, 5), std::nullopt);
  choices.Choose(site, 4, 0);
  choices.Choose(site, 64, 1);
  for (const int rows : {1, 4, 15, 16}) EXPECT_EQ(choices.Find(site, rows), 0) << rows;
  for (const int rows : {17, 64, 1000}) EXPECT_EQ(choices.Find(site, rows), 1) << rows;
  EXPECT_TRUE(choices.Has(site, 4));
  EXPECT_FALSE(choices.Has(site, 5));
  EXPECT_EQ(choices.Site("a", names_), site);
  EXPECT_NE(choices.Site("b", names_), site);
}

TEST_F(ChoicesTest, AFileKeepsThem) {
  Choices saved;
  saved.Choose(saved.Site("a", names_), 4, 1);
  saved.Choose(saved.Site("b", names_), 8, 0);
  ASSERT_TRUE(saved.Save(path_, "key").ok());
  Choices loaded;
  ASSERT_TRUE(loaded.Load(path_, "key").ok());
  // A site that this program does not have stays in the file.
  EXPECT_EQ(loaded.Find(loaded.Site("a", names_), 4), 1);
  ASSERT_TRUE(loaded.Save(path_, "key").ok());
  Choices again;
  ASSERT_TRUE(again.Load(path_, "key").ok());
  EXPECT_EQ(again.Find(again.Site("b", names_), 8), 0);
  // A candidate that does not exist any more is dropped.
  EXPECT_EQ(again.Find(again.Site("a", {"slow"}), 4), std::nullopt);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ + "/made"), {}), 1);
}

TEST_F(ChoicesTest, OtherFilesAreRefused) {
  Choices choices;
  EXPECT_EQ(choices.Load(path_, "key").code(), absl::StatusCode::kNotFound);
  const std::string head = "moeserve kernel choices 1\nkey\n";
  Write(head + "a\t4\tslow\n");
  EXPECT_EQ(choices.Load(path_, "other").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(choices.Load(path_, "key").ok());
  for (const std::string& bad :
       {std::string(), std::string("moeserve kernel choices 2\nkey\n"), head + "a\t4\tslow",
        head + "a\t4\n", head + "a\tfour\tslow\n", head + "a\t0\tslow\n", head + "a\t4 \tslow\n",
        head + "a\t99999999999999999999\tslow\n", head + "\n", std::string(5 << 20, 'x')}) {
    Write(bad);
    Choices fresh;
    EXPECT_EQ(fresh.Load(path_, "key").code(), absl::StatusCode::kInvalidArgument)
        << bad.substr(0, 60);
    EXPECT_EQ(fresh.Find(fresh.Site("a", names_), 4), std::nullopt);
  }
}

TEST_F(ChoicesTest, AFolderThatCannotBeWrittenIsAnError) {
  Choices choices;
  EXPECT_EQ(choices.Save("/proc/nowhere/choices", "key").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(choices.Save(folder_, "key").code(), absl::StatusCode::kUnavailable);
}

TEST(TuningKeyTest, IsOneLine) {
  const Result<std::string> key = cuda::TuningKey();
  ASSERT_TRUE(key.ok());
  EXPECT_EQ(key->find('\n'), std::string::npos);
  EXPECT_NE(key->find("build "), std::string::npos);
  EXPECT_EQ(*cuda::TuningKey(), *key);
}

// A device whose operations take the times of a list, in turn, and have numbers as results.
class ListedDevice : public cuda::TuneDevice {
 public:
  struct Operation {
    std::vector<double> times;
    int result = 0;
    int calls = 0;
  };

  Result<std::function<Result<double>()>> Prepare(
      const std::function<void(int)>& enqueue) override {
    enqueue(0);
    Operation* const own = last;
    return std::function<Result<double>()>([this, own]() -> Result<double> {
      order.push_back(own);
      return own->times[static_cast<size_t>(own->calls++) % own->times.size()];
    });
  }
  Status RunDefault(const std::function<void(int)>& enqueue) override {
    enqueue(0);
    expected_ = last->result;
    return absl::OkStatus();
  }
  Result<bool> EqualsDefault(const std::function<void(int)>& enqueue) override {
    enqueue(0);
    return last->result == expected_;
  }

  // Adds an operation to `tune_case`.
  void Add(TuneCase& tune_case, const std::string& name, Operation* operation) {
    tune_case.candidates.push_back(
        {.name = name, .enqueue = [this, operation](int) { last = operation; }});
  }

  Operation* last = nullptr;
  std::vector<Operation*> order;

 private:
  int expected_ = 0;
};

TEST(TunerTest, TakesTheFastestInTurn) {
  ListedDevice device;
  ListedDevice::Operation a{{10, 10, 11, 10, 10}}, b{{9, 9, 30, 9, 9}}, c{{20}};
  TuneCase tune_case{"case", {}};
  device.Add(tune_case, "a", &a);
  device.Add(tune_case, "b", &b);
  device.Add(tune_case, "c", &c);
  const auto result = cuda::Tune(tune_case, device);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->chosen, 1);
  EXPECT_EQ(result->microseconds, (std::vector<double>{10, 9, 20}));
  // One after another; the slow one only twice.
  const std::vector<ListedDevice::Operation*> order = {&a, &b, &c, &a, &b, &c,
                                                       &a, &b, &a, &b, &a, &b};
  EXPECT_EQ(device.order, order);
}

TEST(TunerTest, ADefaultStaysUnlessAnotherIsClearlyFaster) {
  const auto chosen = [](double a, double b, double c) {
    ListedDevice device;
    ListedDevice::Operation first{{a}}, second{{b}}, third{{c}};
    TuneCase tune_case{"case", {}};
    device.Add(tune_case, "a", &first);
    device.Add(tune_case, "b", &second);
    device.Add(tune_case, "c", &third);
    return cuda::Tune(tune_case, device)->chosen;
  };
  EXPECT_EQ(chosen(10, 10, 10), 0);
  EXPECT_EQ(chosen(10, 9.9, 9.9), 0);
  EXPECT_EQ(chosen(10, 9.7, 9.7), 1);  // of equal ones the first
  EXPECT_EQ(chosen(10, 9.7, 9.6), 2);
  EXPECT_EQ(chosen(100, 9.7, 9.8), 1);
}

TEST(TunerTest, WrongResultsAreNeverChosen) {
  ListedDevice device;
  ListedDevice::Operation a{{10}, 7}, b{{1}, 8}, c{{5}, 7};
  TuneCase tune_case{"case", {}};
  device.Add(tune_case, "a", &a);
  device.Add(tune_case, "wrong", &b);
  device.Add(tune_case, "c", &c);
  const auto result = cuda::Tune(tune_case, device);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->chosen, 2);
  EXPECT_EQ(result->different, std::vector<std::string>{"wrong"});
  EXPECT_EQ(b.calls, 0);
}

// Operations that do not write to the output have another function that does.
TEST(TunerTest, ComparesWhatIsBroughtToTheOutput) {
  ListedDevice device;
  ListedDevice::Operation a{{10}, 7}, b{{1}, 7}, output_of_a{{0}, 3}, output_of_b{{0}, 4};
  TuneCase tune_case{"case", {}};
  device.Add(tune_case, "a", &a);
  device.Add(tune_case, "b", &b);
  for (size_t i = 0; i < 2; ++i) {
    tune_case.candidates[i].enqueue_to_output = [&, i](int) {
      device.last = i == 0 ? &output_of_a : &output_of_b;
    };
  }
  const auto result = cuda::Tune(tune_case, device);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->different, std::vector<std::string>{"b"});
  EXPECT_EQ(device.order, (std::vector<ListedDevice::Operation*>(5, &a)));
  output_of_b.result = 3;
  EXPECT_EQ(cuda::Tune(tune_case, device)->chosen, 1);
}

TEST(GraphDeviceTest, ComparesEveryWord) {
  const cuda::Stream stream = std::move(cuda::Stream::Create()).value();
  const cuda::DeviceMemory output = std::move(cuda::DeviceMemory::Allocate(1000)).value();
  cuda::GraphTuneDevice device(stream.get(), output.data(), output.bytes());
  const auto fill = [&](size_t bytes) {
    return [&, bytes](int) {
      ASSERT_EQ(cudaMemsetAsync(output.data(), 1, bytes, stream.get()), cudaSuccess);
    };
  };
  ASSERT_TRUE(device.RunDefault(fill(999)).ok());
  EXPECT_TRUE(*device.EqualsDefault(fill(999)));
  EXPECT_FALSE(*device.EqualsDefault(fill(998)));
  EXPECT_FALSE(*device.EqualsDefault(fill(1000)));
  auto measure = device.Prepare(fill(999));
  ASSERT_TRUE(measure.ok());
  const Result<double> time = (*measure)();
  ASSERT_TRUE(time.ok());
  EXPECT_GE(*time, 0.0);
}

struct ProductScene {
  Random random{3};
  BankCase up{{64}, {24, 72, 40}, false, true, DType::kBF16, random};
  BankCase other_up{{64}, {24, 72, 40}, false, true, DType::kBF16, random};
  BankCase down{{24, 72, 40}, {64, 64, 64}, false, false, DType::kBF16, random};
  DevicePlan plan{3, std::vector<std::vector<int>>(20, {0, 2}), 0};
  DeviceRows x{20, 64, 64, DType::kBF16, random.Normals(20 * 64)};
  DeviceRows hidden{40, 80, 80, DType::kBF16};
  DeviceRows y{40, 64, 64, DType::kF32};

  LinearArgs Up(const BankCase& bank) const {
    return {.bank = bank.bank.get(),
            .plan = &plan.plan,
            .gather = true,
            .input = x.view(),
            .output = hidden.view(),
            .activation = ActivationKind::kGelu,
            .pad_output = true};
  }
  LinearArgs Down() const {
    return {
        .bank = down.bank.get(), .plan = &plan.plan, .input = hidden.view(), .output = y.view()};
  }
  cuda::FusedExpertArgs Both() const {
    return {.up = up.bank.get(),
            .down = down.bank.get(),
            .plan = &plan.plan,
            .gather = true,
            .input = x.view(),
            .output = y.view(),
            .activation = ActivationKind::kGelu};
  }
};

// Every plausible kernel is run with the bits of the default, and the choices are used afterwards.
TEST(ProductTuningTest, MeasuresWhatWasRecorded) {
  ProductScene scene;
  Choices choices;
  cuda::ProductTuning tuning(&choices);
  EXPECT_EQ(tuning.Tile(scene.Up(scene.up)), cuda::LinearTile::kAuto);
  EXPECT_EQ(tuning.Fused(scene.Both()), cuda::FusedTileThatPays(scene.Both()));
  tuning.Record(true);
  EXPECT_EQ(tuning.Fused(scene.Both()), std::nullopt);
  EXPECT_EQ(tuning.Tile(scene.Up(scene.up)), cuda::LinearTile::kAuto);
  tuning.Tile(scene.Up(scene.other_up));
  tuning.Tile(scene.Down());
  const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
  ASSERT_TRUE(messages.ok());
  EXPECT_EQ(*messages, std::vector<std::string>());
  // 1, 4, 16 and 20 rows of two products and of the pair.
  EXPECT_EQ(tuning.measured(), 12);
  EXPECT_EQ(tuning.left_out(), 0);
  // The candidate that is prepared last seems to be the fastest.
  EXPECT_NE(tuning.Tile(scene.Up(scene.up)), cuda::LinearTile::kAuto);
  EXPECT_EQ(tuning.Tile(scene.Up(scene.up)), tuning.Tile(scene.Up(scene.other_up)));
  EXPECT_EQ(tuning.Fused(scene.Both()), cuda::FusedTilesThatFit(scene.Both()).back());
  // What is known is not measured again.
  tuning.Record(true);
  tuning.Tile(scene.Up(scene.up));
  ASSERT_TRUE(tuning.Measure({}, NewCountingDevice, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 0);
}

// The choices of a product in segments, in which every expert computes all rows, are found again.
TEST(ProductTuningTest, ProductsInSegments) {
  Random random(4);
  const BankCase bank({64}, {16, 16, 16}, false, false, DType::kBF16, random);
  DeviceRows x(5, 3 * 64, 3 * 64, DType::kBF16, random.Normals(5 * 3 * 64));
  DeviceRows y(5, 3 * 16, 3 * 16, DType::kF32);
  const LinearArgs args{
      .bank = bank.bank.get(), .input = x.view(), .output = y.view(), .segments = true};
  Choices choices;
  cuda::ProductTuning tuning(&choices);
  tuning.Record(true);
  tuning.Tile(args);
  ASSERT_TRUE(tuning.Measure(kNoLimit, NewCountingDevice, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 3);  // 1, 4 and 5 rows of 3 experts
  for (const int rows : {3, 12, 15}) EXPECT_TRUE(choices.Has(0, rows)) << rows;
  const cuda::LinearTile chosen = tuning.Tile(args);
  EXPECT_NE(chosen, cuda::LinearTile::kAuto);
  tuning.Record(true);
  tuning.Tile(args);
  ASSERT_TRUE(tuning.Measure(kNoLimit, NewCountingDevice, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 0);
  LaunchLinear(args, chosen, nullptr);
  const std::vector<double> row = RowOf(y.Fetch(), 4, 48);
  const std::vector<double> input = RowOf(x.Fetch(), 4, 192);
  for (int e = 0; e < 3; ++e) {
    const std::vector<double> expected = bank.Expected(
        e, {input.begin() + e * 64, input.begin() + (e + 1) * 64}, ActivationKind::kNone);
    for (int c = 0; c < 16; ++c) EXPECT_NEAR(row[e * 16 + c], expected[c], 1e-4);
  }
}

// A type of weights that are not stored as bf16.
struct StoredType {
  Quantization quantization = Quantization::kNone;
  bool mxfp4 = false, fp8 = false;
  cuda::LinearTile (*usual)(const LinearArgs& args) =
      nullptr;  // the tile that is chosen unmeasured
};

// Returns a bank of random weights that the type can store.
std::unique_ptr<cuda::CudaLinearBank> BankOfType(const StoredType& type, std::vector<int> in,
                                                 std::vector<int> out, Random& random) {
  LinearBankShape shape{std::move(in), std::move(out),    false,      false,
                        DType::kBF16,  type.quantization, type.mxfp4, type.fp8};
  auto bank = std::move(cuda::CudaLinearBank::Create(shape)).value();
  for (int e = 0; e < bank->num_experts(); ++e) {
    const int rows = shape.out_features[e], columns = shape.in_features_of(e);
    const int64_t size = int64_t{rows} * columns;
    if (type.fp8) {
      std::vector<uint8_t> codes;
      for (int64_t i = 0; i < size; ++i) codes.push_back(static_cast<uint8_t>(random.Below(127)));
      const Fp8Matrix matrix{.rows = rows,
                             .columns = columns,
                             .values = codes.data(),
                             .row_stride = columns,
                             .scales = std::vector<float>(static_cast<size_t>(rows), 0.01f),
                             .owner = nullptr};
      bank->LoadFp8(e, LinearBank::Half::kMain, 0, matrix);
      continue;
    }
    std::vector<float> values = random.Normals(size);
    if (type.mxfp4) {
      for (float& v : values) v = v < 0.0f ? -0.5f : 1.5f;
    }
    bank->LoadWeight(e, LinearBank::Half::kMain, 0, MakeTensor(values, {rows, columns}));
  }
  EXPECT_TRUE(bank->holds_weights());
  return bank;
}

// Products with other weights than bf16, both those of gathered rows and others. Each plausible
// tile is run and has the bits of the default, or there would be a message.
TEST(ProductTuningTest, ProductsOfEachStoredType) {
  const StoredType types[] = {
      {.quantization = Quantization::kInt8Channel, .usual = cuda::DefaultInt8Tile},
      {.quantization = Quantization::kInt4K, .usual = cuda::DefaultInt4Tile},
      {.quantization = Quantization::kInt8, .usual = cuda::DefaultGroupedTile},
      {.quantization = Quantization::kInt4, .usual = cuda::DefaultGroupedTile},
      {.mxfp4 = true, .usual = cuda::DefaultMxfp4Tile},
      {.fp8 = true, .usual = cuda::DefaultFp8Tile}};
  for (const StoredType& type : types) {
    Random random(5);
    const std::vector<int> widths = {24, 72, 40};
    const auto up = BankOfType(type, {64}, widths, random);
    const auto down = BankOfType(type, widths, {64, 64, 64}, random);
    SCOPED_TRACE(up->signature());
    const DevicePlan plan(3, std::vector<std::vector<int>>(60, {0, 2}), 0);
    DeviceRows x(60, 64, 64, DType::kBF16, random.Normals(60 * 64));
    DeviceRows hidden(120, 80, 80, DType::kBF16), y(120, 64, 64, DType::kF32);
    const LinearArgs args[] = {
        {.bank = up.get(),
         .plan = &plan.plan,
         .gather = true,
         .input = x.view(),
         .output = hidden.view(),
         .activation = ActivationKind::kGelu,
         .pad_output = true},
        {.bank = down.get(), .plan = &plan.plan, .input = hidden.view(), .output = y.view()}};
    Choices choices;
    cuda::ProductTuning tuning(&choices);
    tuning.Record(true);
    for (const LinearArgs& a : args) EXPECT_EQ(tuning.Tile(a), cuda::LinearTile::kAuto);
    const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
    ASSERT_TRUE(messages.ok()) << messages.status();
    EXPECT_EQ(*messages, std::vector<std::string>());
    EXPECT_EQ(tuning.measured(), 8);  // 1, 4, 16 and 60 rows
    for (const LinearArgs& a : args) {
      EXPECT_NE(tuning.Tile(a), cuda::LinearTile::kAuto);
      EXPECT_NE(tuning.Tile(a), type.usual(a));
    }
  }
}

TEST(ProductTuningTest, EndsWhenItsTimeIsOver) {
  ProductScene scene;
  Choices choices;
  cuda::ProductTuning tuning(&choices);
  tuning.Record(true);
  tuning.Tile(scene.Up(scene.up));
  const auto device = [](cudaStream_t, void*, size_t) -> std::unique_ptr<cuda::TuneDevice> {
    ADD_FAILURE() << "nothing is measured";
    return nullptr;
  };
  ASSERT_TRUE(
      tuning.Measure({.limit = std::chrono::seconds(-1), .rows_factor = 4}, device, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 0);
  EXPECT_EQ(tuning.left_out(), 4);
}

// Returns a launch as a step that is recorded has: its pointers are not read.
cuda::AttentionLaunch RecordedAttention(int tokens, int tiled_from) {
  cuda::AttentionLaunch a;
  a.cache = {.num_kv_heads = 2,
             .head_dim = 64,
             .padded_dim = 64,
             .head_stride = 1024,
             .block_stride = 2048};
  a.step.tokens = tokens;
  a.query_stride = a.output_stride = 4 * 64;
  a.output_dtype = DType::kBF16;
  a.heads = 4;
  a.scale = 0.125f;
  a.tiled_from = tiled_from;
  return a;
}

// The kernels for tiles of tokens are run with the bits of the default, for every kind of launch,
// and the choices are used afterwards.
TEST(AttentionTuningTest, MeasuresWhatWasRecorded) {
  if (!cuda::TiledWgmmaFits()) GTEST_SKIP() << "one kernel only";
  using cuda::AttentionTiles;
  const int32_t some = 0;
  cuda::AttentionLaunch window = RecordedAttention(100, 100), routed = window, both = window,
                        int8 = window;
  window.seen.window = 30;
  routed.rows = {&some, &some, &some, 3};
  routed.query_stride = routed.output_stride = 2 * 64;
  routed.heads = 2;
  both.seen.causal = false;
  int8.cache.type = KvCacheType::kInt8;
  int8.cache.head_stride += cuda::kCacheScaleBytes;
  int8.cache.block_stride += 2 * cuda::kCacheScaleBytes;
  Choices choices;
  cuda::AttentionTuning tuning(&choices);
  EXPECT_EQ(tuning.Tiles(RecordedAttention(50, 0)), AttentionTiles::kAuto);
  tuning.Record(true);
  for (const cuda::AttentionLaunch& a : {RecordedAttention(100, 100), window, routed, both, int8}) {
    EXPECT_EQ(tuning.Tiles(a), AttentionTiles::kAuto);
  }
  const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
  ASSERT_TRUE(messages.ok()) << messages.status();
  EXPECT_EQ(*messages, std::vector<std::string>());
  EXPECT_EQ(tuning.measured(), 15);  // 16, 64 and 100 tokens
  EXPECT_EQ(tuning.left_out(), 0);
  // The candidate that is prepared last seems to be the fastest.
  EXPECT_EQ(tuning.Tiles(RecordedAttention(50, 0)), AttentionTiles::kPingPong);
  EXPECT_EQ(tuning.Tiles(RecordedAttention(50, 50)), AttentionTiles::kAuto);
  cuda::AttentionLaunch other = RecordedAttention(50, 0);
  other.heads = 2;
  EXPECT_EQ(tuning.Tiles(other), AttentionTiles::kAuto);
  int8.step.tokens = 50;
  int8.tiled_from = 0;
  EXPECT_EQ(tuning.Tiles(int8), AttentionTiles::kPingPong);
  // What is known is not measured again, and f32 caches have one kernel.
  tuning.Record(true);
  tuning.Tiles(RecordedAttention(100, 0));
  other.cache.type = KvCacheType::kF32;
  tuning.Tiles(other);
  ASSERT_TRUE(tuning.Measure({}, NewCountingDevice, nullptr).ok());
  EXPECT_EQ(tuning.measured(), 0);
}

// The kernels for single tokens are run with the bits of the default, plain and routed, and the
// choices are used for contexts within the bound that was measured.
TEST(AttentionTuningTest, MeasuresSingleTokens) {
  using cuda::AttentionSplits;
  const int32_t some = 0;
  cuda::AttentionLaunch plain = RecordedAttention(5, 0);
  plain.step.max_context = 600;
  cuda::AttentionLaunch routed = plain, window = plain, both = plain, int8 = plain;
  routed.rows = {&some, &some, &some, 2, 2};
  routed.query_stride = routed.output_stride = 2 * 64;
  routed.heads = 2;
  window.seen.window = 30;
  both.seen.causal = false;
  int8.cache.type = KvCacheType::kInt8;
  int8.cache.head_stride += cuda::kCacheScaleBytes;
  int8.cache.block_stride += 2 * cuda::kCacheScaleBytes;
  if (!cuda::CanUseSplits(plain, AttentionSplits::kCluster8)) GTEST_SKIP() << "no clusters";
  Choices choices;
  cuda::AttentionTuning tuning(&choices);
  tuning.Record(true);
  for (const cuda::AttentionLaunch& a : {plain, routed, window, both, int8}) {
    EXPECT_EQ(tuning.Splits(a), AttentionSplits::kAuto);
  }
  const auto messages = tuning.Measure(kNoLimit, NewCountingDevice, nullptr);
  ASSERT_TRUE(messages.ok()) << messages.status();
  EXPECT_EQ(*messages, std::vector<std::string>());
  // 1, 4 and 5 tokens; encoders have no single tokens.
  EXPECT_EQ(tuning.measured(), 12);
  plain.tiled_from = window.tiled_from = both.tiled_from = int8.tiled_from = 5;
  EXPECT_EQ(tuning.Splits(plain), AttentionSplits::kCluster16);
  EXPECT_EQ(tuning.Splits(window), AttentionSplits::kCluster16);
  EXPECT_EQ(tuning.Splits(int8), AttentionSplits::kCluster16);
  EXPECT_EQ(tuning.Splits(both), AttentionSplits::kAuto);
  plain.step.max_context = 1025;
  EXPECT_EQ(tuning.Splits(plain), AttentionSplits::kAuto);
  plain.step.max_context = 1024;
  plain.tiled_from = 0;
  EXPECT_EQ(tuning.Splits(plain), AttentionSplits::kAuto);
}

}  // namespace
}  // namespace moeserve::testing
