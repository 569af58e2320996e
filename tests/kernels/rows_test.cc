// Row operations compared with double arithmetic: embeddings, norms by expert, sums, conversions.
// Covers widths that fill vectors and warps partly, and strides larger than the width.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kRowWidths[] = {1, 3, 8, 24, 33, 128, 700};

double GateFactorOf(GateActivation activation, double z) {
  switch (activation) {
    case GateActivation::kNone:
      return z;
    case GateActivation::kSigmoid:
      return 1.0 / (1.0 + std::exp(-z));
    case GateActivation::kSilu:
      return z / (1.0 + std::exp(-z));
    case GateActivation::kSoftplus2:
      return std::log2(1.0 + std::exp2(z));
  }
  return 0.0;
}

class RowsTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }

  DeviceRows Make(int64_t rows, int64_t cols, DType dtype, const std::vector<float>* values) {
    return MakeRows(*backend_, rows, cols, (cols + 19) / 16 * 16, dtype, values);
  }
  DeviceRows Dense(int64_t rows, int64_t cols) {
    return MakeRows(*backend_, rows, cols, cols, DType::kF32, nullptr);
  }
  // Checks that the memory behind the columns of each row is unchanged.
  void ExpectUntouchedBehind(const DeviceRows& r) {
    if (r.view.stride == r.view.cols) return;
    for (int64_t i = 0; i < r.view.rows; ++i) {
      ASSERT_TRUE(std::isnan(RowOf(*backend_, r.view, i, r.view.cols + 1).back()));
    }
  }
  RoutingPlan Plan(const std::vector<std::vector<int>>& routes, int experts, Random& random) {
    GivenRoutes given;
    given.offsets.push_back(0);
    for (const auto& row : routes) {
      for (int e : row) {
        given.experts.push_back(e);
        given.weights.push_back(static_cast<float>(random.Normal()));
      }
      given.offsets.push_back(static_cast<int32_t>(given.experts.size()));
    }
    RouteSettings s;
    s.num_experts = experts;
    RouterTensors tensors;
    tensors.weight = MakeTensor(std::vector<float>(static_cast<size_t>(experts)), {experts, 1});
    router_ = std::move(backend_->NewRouter(s, tensors)).value();
    const DeviceRows input = MakeRows(*backend_, std::vector<float>(routes.size()), 1);
    return backend_->Route({.router = router_.get(), .input = input.view, .given = &given});
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Router> router_;
};

double RoundedRow(double v, DType t) {
  const auto f = static_cast<float>(v);
  return t == DType::kBF16 ? F32FromBf16(Bf16FromF32(f)) : f;
}

TEST_P(RowsTest, EmbedsTokensTypesAndPositions) {
  Random random(1);
  const std::vector<int32_t> tokens = {3, 0, 6, 6}, position = {0, 5, 2, 1}, none(4);
  const std::vector<uint8_t> types = {1, 0, 2, 1};
  enum { kNeither, kLearned, kSinusoids, kShiftedSinusoids, kHalfSpacing };
  enum { kNoTypes, kFirstType, kTypesOfStep };
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int width : {2, 6, 24, 300}) {
      const HostTensor table = MakeTensor(random.Normals(7 * width), {7, width}, dtype);
      const HostTensor learned = MakeTensor(random.Normals(6 * width), {6, width}, dtype);
      const HostTensor of_types = MakeTensor(random.Normals(3 * width), {3, width}, dtype);
      auto own = std::move(backend_->NewEmbeddingTable(table)).value();
      auto positions = std::move(backend_->NewEmbeddingTable(learned)).value();
      auto type_table = std::move(backend_->NewEmbeddingTable(of_types)).value();
      auto bank = std::move(backend_->NewLinearBank({{width}, {7}, false, false, dtype})).value();
      bank->LoadWeight(0, LinearBank::Half::kMain, 0, table);
      auto tied = std::move(backend_->NewTiedEmbeddingTable(*bank)).value();
      const auto expected = [&](int row, int kind, int typed) {
        std::vector<double> all;
        const int half = width / 2;
        for (int i = 0; i < width; ++i) {
          double v = 1.5 * ElementAsF32(table, int64_t{tokens[row]} * width + i);
          const int type = typed == kTypesOfStep ? types[row] : 0;
          if (typed != kNoTypes) v += ElementAsF32(of_types, int64_t{type} * width + i);
          if (kind == kLearned) v += ElementAsF32(learned, int64_t{position[row]} * width + i);
          if (kind >= kSinusoids) {
            const int steps = kind == kHalfSpacing ? half : half - 1;
            const int at = position[row] + (kind == kShiftedSinusoids ? 2 : 0);
            const double angle = at * std::pow(10000.0, -static_cast<double>(i % half) / steps);
            v += i < half ? std::sin(angle) : std::cos(angle);
          }
          all.push_back(v);
        }
        return all;
      };
      for (int i = 0; i < 30; ++i) {
        const EmbeddingTable* t = i % 2 == 0 ? own.get() : tied.get();
        const int kind = i / 2 % 5;
        const int typed = i / 10;
        if (kind >= kSinusoids && width < 4) continue;
        StepInputs inputs{.token_ids = tokens, .position = position, .sequence = none};
        if (typed == kTypesOfStep) inputs.token_types = types;
        backend_->BeginStep(inputs, nullptr, false);
        const DeviceRows out = Dense(4, width);
        backend_->Embed({.tokens = t,
                         .types = typed == kNoTypes ? nullptr : type_table.get(),
                         .positions = kind == kLearned ? positions.get() : nullptr,
                         .sinusoidal = kind >= kSinusoids,
                         .half_spacing = kind == kHalfSpacing,
                         .first_position = kind == kShiftedSinusoids ? 2 : 0,
                         .scale = 1.5f,
                         .output = out.view});
        for (int r = 0; r < 4; ++r) {
          ASSERT_TRUE(RowNear(RowOf(*backend_, out.view, r, width), expected(r, kind, typed), 3e-7))
              << Name(dtype) << ", width " << width << ", kind " << kind << ", types " << typed;
        }
      }
    }
  }
}

// The order of the sum is a part of the contract: ((token * scale) + type) + position.
TEST_P(RowsTest, EmbeddingsAreAddedInOrder) {
  const auto table = [&](const std::vector<float>& row) {
    return std::move(backend_->NewEmbeddingTable(MakeTensor(row, {1, 2}))).value();
  };
  // Added to 1, half of its last bit is lost, because ties round to even. In the first column, the
  // sum of type and position would not be lost; in the second, the type would not be lost if it
  // were added last.
  const auto tokens = table({1.0f, 1.0f});
  const auto types = table({0x1p-24f, 0x1p-24f});
  const auto positions = table({0x1p-24f, 0x1.8p-24f});
  const std::vector<int32_t> zero(1);
  backend_->BeginStep({.token_ids = zero, .position = zero, .sequence = zero}, nullptr, false);
  const DeviceRows out = Dense(1, 2);
  backend_->Embed({.tokens = tokens.get(),
                   .types = types.get(),
                   .positions = positions.get(),
                   .output = out.view});
  EXPECT_EQ(HostRows(*backend_, out.view), (std::vector<float>{1.0f, 1.0f + 0x1p-23f}));
}

// A table with an owner must live as long as the embedding and is read in place where the device
// can do that. A table without an owner is freed after the call.
TEST_P(RowsTest, EmbeddingsKeepWhatTheyRead) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const HostTensor source = MakeTensor(values, {3, 2}, dtype);
    const size_t bytes = values.size() * SizeOf(dtype);
    for (const size_t shift : {0, 1, 2, 3}) {
      for (const bool owned : {true, false}) {
        auto memory = std::make_shared<std::vector<char>>(shift + bytes);
        char* const data = memory->data() + shift;
        std::memcpy(data, source.data, bytes);
        HostTensor tensor{data, dtype, {3, 2}, nullptr};
        if (owned) tensor.owner = memory;
        const int64_t before = backend_->weight_bytes();
        auto table = std::move(backend_->NewEmbeddingTable(tensor)).value();
        EXPECT_EQ(backend_->weight_bytes() - before, static_cast<int64_t>(bytes));
        const bool in_place = owned && GetParam().device == "cpu";
        tensor.owner = nullptr;
        EXPECT_EQ(memory.use_count(), in_place ? 2 : 1);
        if (in_place) {
          memory.reset();
        } else {
          std::fill(memory->begin(), memory->end(), '\x7f');
        }
        const std::vector<int32_t> tokens = {2, 0}, zeros(2);
        backend_->BeginStep({.token_ids = tokens, .position = zeros, .sequence = zeros}, nullptr,
                            false);
        const DeviceRows out = Dense(2, 2);
        backend_->Embed({.tokens = table.get(), .output = out.view});
        EXPECT_EQ(RowOf(*backend_, out.view, 0, 2), (std::vector<double>{5, 6}));
        EXPECT_EQ(RowOf(*backend_, out.view, 1, 2), (std::vector<double>{1, 2}));
      }
    }
  }
}

// Every expert has a norm with its own width.
TEST_P(RowsTest, NormsByExpert) {
  Random random(2);
  const std::vector<int> widths = {5, 40, 1, 33, 600};
  for (const bool layer : {false, true}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<HostTensor> scales, shifts;
      for (int w : widths) {
        scales.push_back(MakeTensor(random.Normals(w), {w}));
        if (layer) shifts.push_back(MakeTensor(random.Normals(w), {w}));
      }
      auto bank = std::move(backend_->NewNormBank({layer, 1e-5f}, scales, shifts)).value();
      const RoutingPlan plan = Plan({{0, 1, 4}, {1}, {3, 4}, {}, {1, 2, 3}}, 5, random);
      const RoutingPlan host = backend_->HostPlan(0);
      const std::vector<float> values = random.Normals(int64_t{plan.capacity} * 600, 2.0);
      const DeviceRows x = Make(plan.capacity, 600, DType::kF32, &values);
      const DeviceRows y = Make(plan.capacity, 600, dtype, nullptr);
      backend_->Norm({.bank = bank.get(), .plan = &plan, .input = x.view, .output = y.view});
      for (int a = 0; a < host.num_assignments; ++a) {
        const int e = host.expert_of_assignment[a];
        std::vector<double> scale, shift;
        for (int i = 0; i < widths[e]; ++i) {
          scale.push_back(ElementAsF32(scales[e], i));
          if (layer) shift.push_back(ElementAsF32(shifts[e], i));
        }
        const std::vector<double> in = RowOf(*backend_, x.view, a, widths[e]);
        ASSERT_TRUE(RowNear(RowOf(*backend_, y.view, a, widths[e]),
                            OracleNorm(in, layer, 1e-5, scale, shift),
                            3e-6 + 2 * (dtype == DType::kBF16 ? Epsilon(dtype) : 0.0)))
            << "expert " << e;
        ASSERT_TRUE(std::isnan(RowOf(*backend_, y.view, a, 601).back()));
      }
    }
  }
}

// Two of six experts have matrices; the others return zeros, their input, and two constants.
TEST_P(RowsTest, AssignsRowsWithoutProducts) {
  Random random(7);
  for (int width : kRowWidths) {
    const std::vector<float> constants = random.Normals(2 * width);
    const auto uploaded = std::move(backend_->Upload(constants)).value();
    const std::vector<int32_t> of_expert = {kAssignNothing, 1, kAssignZeros, kAssignNothing,
                                            kAssignInput,   0};
    const auto sources = std::move(backend_->Upload(of_expert)).value();
    for (DType in_type : {DType::kF32, DType::kBF16}) {
      for (DType out_type : {DType::kF32, DType::kBF16}) {
        const RoutingPlan plan = Plan({{0, 1, 2, 5}, {}, {3, 4}, {0, 3}, {1, 2, 4}}, 6, random);
        const RoutingPlan host = backend_->HostPlan(0);
        const std::vector<float> values = random.Normals(5 * width);
        const DeviceRows x = Make(5, width, in_type, &values);
        const DeviceRows y = Make(plan.capacity, width, out_type, nullptr);
        backend_->AssignRows({.plan = &plan,
                              .sources = static_cast<const int32_t*>(sources->data()),
                              .first = 1,
                              .constants = static_cast<const float*>(uploaded->data()),
                              .input = x.view,
                              .output = y.view});
        for (int a = 0; a < host.num_assignments; ++a) {
          const int e = host.expert_of_assignment[a];
          const std::vector<double> row = RowOf(*backend_, y.view, a, width);
          const int32_t source = of_expert[e];
          if (source == kAssignNothing) {
            ASSERT_TRUE(std::isnan(row[0])) << "the row of an expert with matrices was written";
            continue;
          }
          std::vector<double> expected(static_cast<size_t>(width));
          if (source == kAssignInput)
            expected = RowOf(*backend_, x.view, host.row_of_assignment[a], width);
          for (int c = 0; c < width; ++c) {
            if (source >= 0) expected[c] = constants[source * width + c];
            expected[c] = RoundedRow(expected[c], out_type);
          }
          ASSERT_EQ(row, expected) << "expert " << e << ", width " << width;
        }
        ExpectUntouchedBehind(y);
      }
    }
  }
}

// Weights may multiply the rows before an operation instead of its results in the sum.
TEST_P(RowsTest, WeightsOfRowsInsteadOfResults) {
  Random random(9);
  for (int width : kRowWidths) {
    for (DType type : {DType::kF32, DType::kBF16}) {
      const std::vector<std::vector<int>> routes = {{0, 1, 2}, {}, {2}, {0, 2}};
      const RoutingPlan plan = Plan(routes, 3, random);
      const RoutingPlan host = backend_->HostPlan(0);
      const std::vector<float> values = random.Normals(4 * width);
      const DeviceRows x = Make(4, width, type, &values);
      const DeviceRows y = Make(plan.capacity, width, type, nullptr);
      const DeviceRows sums = Make(4, width, DType::kF32, nullptr);
      backend_->AssignRows({.plan = &plan, .input = x.view, .output = y.view, .weighted = true});
      backend_->Combine({.plan = &plan, .results = y.view, .output = sums.view, .weighted = false});
      std::vector<std::vector<float>> expected(4, std::vector<float>(width));
      for (int a = 0; a < host.num_assignments; ++a) {
        const int r = host.row_of_assignment[a];
        const std::vector<double> row = RowOf(*backend_, x.view, r, width);
        const std::vector<double> product = RowOf(*backend_, y.view, a, width);
        for (int c = 0; c < width; ++c) {
          const float exact = host.weight_of_assignment[a] * static_cast<float>(row[c]);
          ASSERT_EQ(product[c], RoundedRow(exact, type)) << "width " << width;
          expected[r][c] += static_cast<float>(product[c]);
        }
      }
      for (int r = 0; r < 4; ++r) {
        const std::vector<double> sum = RowOf(*backend_, sums.view, r, width);
        for (int c = 0; c < width; ++c) ASSERT_NEAR(sum[c], expected[r][c], 1e-5);
      }
    }
  }
}

// Operations on a part of a plan must compute the assignments of its experts alone.
TEST_P(RowsTest, FirstExpertsOfAPlan) {
  Random random(8);
  const int width = 24;
  const std::vector<HostTensor> scales(2, MakeTensor(std::vector<float>(width, 1.0f), {width}));
  auto bank = std::move(backend_->NewNormBank({false, 1e-5f}, scales, {})).value();
  const RoutingPlan plan = Plan({{0, 1, 3}, {2}, {1, 2}, {0}}, 4, random);
  const RoutingPlan host = backend_->HostPlan(0);
  const RoutingPlan part = backend_->FirstExperts(plan, 2);
  EXPECT_EQ(part.num_experts, 2);
  EXPECT_EQ(part.capacity, plan.capacity);
  EXPECT_TRUE(part.num_assignments == -1 || part.num_assignments == 4);
  const std::vector<float> values = random.Normals(int64_t{plan.capacity} * width);
  const DeviceRows x = Make(plan.capacity, width, DType::kF32, &values);
  const DeviceRows whole = Make(plan.capacity, width, DType::kF32, nullptr);
  const DeviceRows y = Make(plan.capacity, width, DType::kF32, nullptr);
  backend_->Norm({.bank = bank.get(), .plan = &part, .input = x.view, .output = y.view});
  backend_->Norm({.bank = bank.get(), .input = x.view, .output = whole.view});
  for (int a = 0; a < host.num_assignments; ++a) {
    const std::vector<double> row = RowOf(*backend_, y.view, a, width);
    if (host.expert_of_assignment[a] < 2) {
      EXPECT_EQ(row, RowOf(*backend_, whole.view, a, width));
    } else {
      EXPECT_TRUE(std::isnan(row[0]));
    }
  }
}

// The fused operation must have the same bits as the two operations that it replaces.
TEST_P(RowsTest, PartsOfAVectorAreNormalisedByThemselves) {
  Random random(29);
  for (const bool layer : {false, true}) {
    for (const int size : {1, 5, 24, 130, 600}) {
      for (const int parts : {2, 3}) {
        const int width = size * parts;
        const std::vector<float> scales = random.Normals(width), shift = random.Normals(width);
        const HostTensor scale = MakeTensor(scales, {width});
        std::vector<HostTensor> shifts;
        if (layer) shifts.push_back(MakeTensor(shift, {width}));
        const NormShape shape{.layer = layer, .eps = 1e-5f, .parts = parts};
        auto bank = std::move(backend_->NewNormBank(shape, {&scale, 1}, shifts)).value();
        const std::vector<float> values = random.Normals(4 * width, 2.0);
        const DeviceRows x = Make(4, width, DType::kF32, &values);
        const DeviceRows y = Make(4, width, DType::kF32, nullptr);
        backend_->Norm({.bank = bank.get(), .input = x.view, .output = y.view});
        for (int r = 0; r < 4; ++r) {
          std::vector<double> expected;
          for (int begin = 0; begin < width; begin += size) {
            const auto part = [&](const std::vector<float>& from, int at) {
              return std::vector<double>(from.begin() + at, from.begin() + at + size);
            };
            const std::vector<double> none;
            for (const double v :
                 OracleNorm(part(values, r * width + begin), layer, 1e-5, part(scales, begin),
                            layer ? part(shift, begin) : none)) {
              expected.push_back(v);
            }
          }
          ASSERT_TRUE(RowNear(RowOf(*backend_, y.view, r, width), expected, 1e-5));
        }
      }
    }
  }
}

TEST_P(RowsTest, AddNormIsASumAndANorm) {
  Random random(5);
  for (int width : kRowWidths) {
    for (const bool layer : {false, true}) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        const HostTensor scale = MakeTensor(random.Normals(width), {width});
        std::vector<HostTensor> shifts;
        if (layer) shifts.push_back(MakeTensor(random.Normals(width), {width}));
        auto bank = std::move(backend_->NewNormBank({layer, 1e-5f}, {&scale, 1}, shifts)).value();
        const std::vector<float> a = random.Normals(5 * width), b = random.Normals(5 * width);
        const auto bias = std::move(backend_->Upload(random.Normals(width))).value();
        const auto* const bias_data = static_cast<const float*>(bias->data());
        const DeviceRows branch = Make(5, width, DType::kF32, &b);
        const DeviceRows x = Make(5, width, DType::kF32, &a), y = Make(5, width, DType::kF32, &a);
        const DeviceRows one = Make(5, width, dtype, nullptr), two = Make(5, width, dtype, nullptr);
        backend_->AddNorm({.x = x.view,
                           .branch = branch.view,
                           .bias = bias_data,
                           .scale = 0.75f,
                           .norm = bank.get(),
                           .output = one.view});
        backend_->AddScaled(y.view, branch.view, bias_data, 0.75f);
        backend_->Norm({.bank = bank.get(), .input = y.view, .output = two.view});
        EXPECT_EQ(HostRows(*backend_, x.view), HostRows(*backend_, y.view)) << "width " << width;
        EXPECT_EQ(HostRows(*backend_, one.view), HostRows(*backend_, two.view))
            << "width " << width;
        ExpectUntouchedBehind(x);
        ExpectUntouchedBehind(one);
      }
    }
  }
}

// For any width, a row's bits must depend neither on its address nor on other rows.
TEST_P(RowsTest, NormsAreTheSameAtEveryPlace) {
  Random random(6);
  for (int width : {3, 33, 511, 512, 513, 1030, 2048, 4099, 5000}) {
    for (const bool layer : {false, true}) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        const std::vector<float> row = random.Normals(width, 2.0), scales = random.Normals(width),
                                 shift = random.Normals(width), b = random.Normals(width),
                                 bias = random.Normals(width);
        const HostTensor scale = MakeTensor(scales, {width});
        std::vector<HostTensor> shifts;
        if (layer) shifts.push_back(MakeTensor(shift, {width}));
        auto bank = std::move(backend_->NewNormBank({layer, 1e-5f}, {&scale, 1}, shifts)).value();
        const auto device_bias = std::move(backend_->Upload(bias)).value();
        const int rows = 5;
        std::vector<float> x, branch;
        for (int r = 0; r < rows; ++r) {
          x.insert(x.end(), row.begin(), row.end());
          branch.insert(branch.end(), b.begin(), b.end());
        }
        // Only the first row begins at a multiple of 64 bytes.
        const auto make = [&](const std::vector<float>* values, int64_t more, DType type) {
          return MakeRows(*backend_, rows, width, width + more, type, values);
        };
        const DeviceRows input = make(&x, 1, DType::kF32);
        const DeviceRows added = make(&branch, 3, DType::kF32);
        const DeviceRows one = make(nullptr, 1, dtype), two = make(nullptr, 3, dtype);
        backend_->Norm({.bank = bank.get(), .input = input.view, .output = one.view});
        backend_->AddNorm({.x = input.view,
                           .branch = added.view,
                           .bias = static_cast<const float*>(device_bias->data()),
                           .scale = 0.5f,
                           .norm = bank.get(),
                           .output = two.view});
        std::vector<double> plain(row.begin(), row.end()), sum, wide_shift;
        for (int i = 0; i < width; ++i) sum.push_back(row[i] + 0.5 * (double{b[i]} + bias[i]));
        if (layer) wide_shift.assign(shift.begin(), shift.end());
        const std::vector<double> wide_scale(scales.begin(), scales.end());
        const double tolerance = 3e-6 + 2 * (dtype == DType::kBF16 ? Epsilon(dtype) : 0.0);
        for (const auto& [out, in] : {std::pair{&one, &plain}, std::pair{&two, &sum}}) {
          const std::vector<double> first = RowOf(*backend_, out->view, 0, width);
          ASSERT_TRUE(
              RowNear(first, OracleNorm(*in, layer, 1e-5, wide_scale, wide_shift), tolerance))
              << "width " << width;
          for (int r = 1; r < rows; ++r) {
            ASSERT_EQ(RowOf(*backend_, out->view, r, width), first)
                << "width " << width << ", row " << r;
          }
          ExpectUntouchedBehind(*out);
        }
        ExpectUntouchedBehind(input);
      }
    }
  }
}

TEST_P(RowsTest, CombinesByWeight) {
  Random random(3);
  for (int width : kRowWidths) {
    for (DType results_type : {DType::kF32, DType::kBF16}) {
      for (DType out_type : {DType::kF32, DType::kBF16}) {
        for (const bool residual : {false, true}) {
          const RoutingPlan plan = Plan({{0, 2}, {}, {1}, {0, 1, 2}, {2}}, 3, random);
          const RoutingPlan host = backend_->HostPlan(0);
          const std::vector<float> values = random.Normals(int64_t{plan.capacity} * width);
          const std::vector<float> own = random.Normals(5 * width);
          const DeviceRows results = Make(plan.capacity, width, results_type, &values);
          const DeviceRows before = Make(5, width, results_type, &own);
          const DeviceRows out = Make(5, width, out_type, nullptr);
          backend_->Combine({.plan = &plan,
                             .results = results.view,
                             .residual = residual ? &before.view : nullptr,
                             .output = out.view});
          for (int r = 0; r < 5; ++r) {
            std::vector<double> expected(static_cast<size_t>(width));
            if (residual) expected = RowOf(*backend_, before.view, r, width);
            for (int i = host.row_offsets[r]; i < host.row_offsets[r + 1]; ++i) {
              const int a = host.assignments_of_row[i];
              const std::vector<double> row = RowOf(*backend_, results.view, a, width);
              for (int c = 0; c < width; ++c) expected[c] += host.weight_of_assignment[a] * row[c];
            }
            ASSERT_TRUE(RowNear(RowOf(*backend_, out.view, r, width), expected,
                                1e-6 + 2 * (out_type == DType::kBF16 ? Epsilon(out_type) : 0.0)))
                << "width " << width << ", row " << r;
          }
          ExpectUntouchedBehind(out);
        }
      }
    }
  }
}

// The sum of experts' results as a branch, computed at once, has the bits of the steps one by one.
TEST_P(RowsTest, AddNormOfAWeightedSum) {
  Random random(7);
  std::vector<int> widths(std::begin(kRowWidths), std::end(kRowWidths));
  widths.insert(widths.end(), {510, 513, 4099});
  for (const int width : widths) {
    for (const bool residual : {false, true}) {
      for (const bool weighted : {false, true}) {
        const DType dtype = residual ? DType::kBF16 : DType::kF32;
        const DType results_type = weighted ? DType::kBF16 : DType::kF32;
        const RoutingPlan plan = Plan({{0, 2}, {}, {1}, {0, 1, 2}, {2}}, 3, random);
        const HostTensor scale = MakeTensor(random.Normals(width), {width});
        auto bank = std::move(backend_->NewNormBank({residual, 1e-5f}, {&scale, 1}, {})).value();
        const std::vector<float> a = random.Normals(5 * width), own = random.Normals(5 * width),
                                 values = random.Normals(int64_t{plan.capacity} * width);
        const auto bias = std::move(backend_->Upload(random.Normals(width))).value();
        const DeviceRows results = Make(plan.capacity, width, results_type, &values);
        const DeviceRows before = Make(5, width, dtype, &own);
        const auto run = [&](bool at_once) {
          const DeviceRows branch = Make(5, width, DType::kF32, nullptr);
          const DeviceRows x = Make(5, width, DType::kF32, &a);
          const DeviceRows y = Make(5, width, dtype, &own);
          // The normed rows may replace the rows that were added.
          const CombineArgs sum{.plan = &plan,
                                .results = results.view,
                                .residual = residual ? &y.view : nullptr,
                                .output = branch.view,
                                .weighted = weighted};
          if (!at_once) backend_->Combine(sum);
          backend_->AddNorm({.x = x.view,
                             .branch = branch.view,
                             .sum = at_once ? &sum : nullptr,
                             .bias = static_cast<const float*>(bias->data()),
                             .scale = 0.75f,
                             .norm = bank.get(),
                             .output = y.view});
          ExpectUntouchedBehind(x);
          ExpectUntouchedBehind(y);
          return std::pair(HostRows(*backend_, x.view), HostRows(*backend_, y.view));
        };
        EXPECT_EQ(run(true), run(false)) << "width " << width << ", residual " << residual;
      }
    }
  }
}

// A linear layer whose rows are the norm of a sum, or a sum of experts' results, has the bits of
// the operations one by one. The layers are small enough for one cluster of blocks, for one launch,
// or not, and so are the rows.
TEST_P(RowsTest, LinearOfRowsThatComeFirst) {
  struct Shape {
    int rows, width, outputs;
    DType dtype;
    int parts = 1;  // sub-tokens of a row, which are sums of experts' results
    bool bias = false, layer = false, from_experts = false;
    ActivationKind activation = ActivationKind::kNone;
  };
  Random random(11);
  for (const Shape& s :
       {Shape{1, 768, 768, DType::kBF16}, Shape{8, 72, 70, DType::kBF16, 1, true, true, true},
        Shape{9, 64, 32, DType::kBF16},
        Shape{3, 520, 100, DType::kBF16, 1, false, true, false, ActivationKind::kRelu},
        Shape{2, 1032, 17, DType::kBF16, 1, true, false, true}, Shape{2, 64, 64, DType::kF32},
        Shape{1, 768, 384, DType::kBF16, 4, true},
        Shape{5, 40, 200, DType::kBF16, 5, false, false, false, ActivationKind::kRelu},
        Shape{8, 96, 96, DType::kBF16, 2}, Shape{3, 64, 64, DType::kF32, 4},
        Shape{1, 64, 4096, DType::kBF16, 4},
        Shape{4, 1032, 2000, DType::kBF16, 1, true, false, true},
        Shape{1, 264, 12000, DType::kBF16, 1, true}}) {
    const int part = s.width / s.parts, sums = s.rows * s.parts;
    std::vector<std::vector<int>> routes;
    for (int r = 0; r < sums; ++r) {
      routes.push_back(r % 3 == 0   ? std::vector{1}
                       : r % 3 == 1 ? std::vector{0, 2}
                                    : std::vector<int>{});
    }
    const RoutingPlan plan = Plan(routes, 3, random);
    LinearBankShape shape{{s.width}, {s.outputs}, false, s.bias, s.dtype};
    auto bank = std::move(backend_->NewLinearBank(shape)).value();
    const HostTensor weight =
        MakeTensor(random.Normals(int64_t{s.outputs} * s.width, 0.1), {s.outputs, s.width});
    bank->LoadWeight(0, LinearBank::Half::kMain, 0, weight);
    const HostTensor bias = MakeTensor(random.Normals(s.outputs), {s.outputs});
    if (s.bias) bank->LoadBias(0, LinearBank::Half::kMain, 0, bias);
    const HostTensor scale = MakeTensor(random.Normals(s.width), {s.width});
    const auto norm = std::move(backend_->NewNormBank({s.layer, 1e-5f}, {&scale, 1}, {})).value();
    const std::vector<float> a = random.Normals(s.rows * s.width),
                             b = random.Normals(s.rows * s.width),
                             values = random.Normals(int64_t{plan.capacity} * part);
    const DeviceRows results = Make(plan.capacity, part, s.dtype, &values);
    const auto dense = [&](int64_t rows, int64_t cols, DType dtype,
                           const std::vector<float>* from) {
      return MakeRows(*backend_, rows, cols, cols, dtype, from);
    };
    const auto run = [&](bool at_once, DType output) {
      const DeviceRows x = dense(s.rows, s.width, DType::kF32, &a);
      const DeviceRows branch = dense(s.rows, s.width, DType::kF32, s.from_experts ? nullptr : &b);
      const DeviceRows y = dense(s.rows, s.width, s.dtype, s.parts > 1 ? &a : nullptr);
      const DeviceRows before = dense(sums, part, s.dtype, &b);
      const DeviceRows out = Make(s.rows, s.outputs, output, nullptr);
      RowsView to = y.view;
      if (s.parts > 1) to.rows = sums, to.cols = to.stride = part;
      const bool routed = s.parts > 1;
      const CombineArgs sum{.plan = &plan,
                            .results = results.view,
                            .residual = routed ? &before.view : nullptr,
                            .output = routed ? to : branch.view};
      const AddNormArgs first{.x = x.view,
                              .branch = branch.view,
                              .sum = s.from_experts ? &sum : nullptr,
                              .scale = 0.5f,
                              .norm = norm.get(),
                              .output = y.view};
      if (!at_once && routed) backend_->Combine(sum);
      if (!at_once && !routed) backend_->AddNorm(first);
      backend_->Linear({.bank = bank.get(),
                        .input = y.view,
                        .output = out.view,
                        .activation = s.activation,
                        .norm = at_once && !routed ? &first : nullptr,
                        .sum = at_once && routed ? &sum : nullptr});
      ExpectUntouchedBehind(out);
      return std::tuple(HostRows(*backend_, x.view), HostRows(*backend_, y.view),
                        HostRows(*backend_, out.view));
    };
    for (const DType output : {DType::kF32, DType::kBF16}) {
      if (output == DType::kBF16 && s.dtype == DType::kF32) continue;
      EXPECT_EQ(run(true, output), run(false, output))
          << "width " << s.width << ", outputs " << s.outputs << ", rows " << s.rows;
    }
  }
}

TEST_P(RowsTest, ElementsOneByOne) {
  Random random(4);
  for (int width : kRowWidths) {
    const int rows = 6;
    const std::vector<float> a = random.Normals(rows * width), b = random.Normals(rows * width),
                             bias = random.Normals(width), g = random.Normals(rows);
    const auto device_bias = std::move(backend_->Upload(bias)).value();
    const auto expect = [&](const DeviceRows& out, double tolerance, auto value) {
      for (int r = 0; r < rows; ++r) {
        std::vector<double> expected;
        for (int c = 0; c < width; ++c) expected.push_back(value(r * width + c, r, c));
        ASSERT_TRUE(RowNear(RowOf(*backend_, out.view, r, width), expected, tolerance))
            << "width " << width << ", row " << r;
      }
      ExpectUntouchedBehind(out);
    };
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const DeviceRows x = Make(rows, width, DType::kF32, &a);
      const DeviceRows y = Make(rows, width, dtype, nullptr);
      backend_->Convert(x.view, y.view);
      expect(y, 0.0, [&](int i, int, int) { return RoundedRow(a[i], dtype); });
      const DeviceRows z = Make(rows, width, DType::kF32, &b);
      backend_->Convert(y.view, z.view);
      expect(z, 0.0, [&](int i, int, int) { return RoundedRow(a[i], dtype); });
    }
    for (const bool with_bias : {false, true}) {
      const DeviceRows x = Make(rows, width, DType::kF32, &a);
      const DeviceRows y = Make(rows, width, DType::kF32, &b);
      backend_->AddScaled(x.view, y.view,
                          with_bias ? static_cast<const float*>(device_bias->data()) : nullptr,
                          0.75f);
      expect(x, 3e-6, [&](int i, int, int c) {
        return a[i] + 0.75 * (b[i] + (with_bias ? static_cast<double>(bias[c]) : 0.0));
      });
    }
    const DeviceRows x = Make(rows, width, DType::kF32, &a);
    const DeviceRows gate = Make(rows, 1, DType::kF32, &g);
    backend_->ScaleBySigmoid(x.view, gate.view);
    // On some devices, the exponential has an error of two units in the last place, and the
    // division adds one.
    expect(x, 6e-7, [&](int i, int r, int) { return a[i] / (1.0 + std::exp(-double{g[r]})); });
    const DeviceRows z = Make(rows, width, DType::kF32, &a);
    backend_->Scale(z.view, -2.5f);
    expect(z, 1e-7, [&](int i, int, int) { return -2.5 * a[i]; });
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const GateActivation activation : AllKinds<GateActivation>()) {
        for (const int share : {1, 4}) {
          const int gate_width = width / share;
          if (gate_width * share != width) continue;
          const DeviceRows product = Make(rows, width, DType::kF32, &a);
          const DeviceRows rounded = Make(rows, width, dtype, nullptr);
          const DeviceRows gates = Make(rows, gate_width, DType::kF32, &b);
          backend_->Convert(product.view, rounded.view);
          backend_->MultiplyByGate(rounded.view, gates.view, activation);
          const double f32 = activation == GateActivation::kSigmoid ? 1e-6 : 2e-6;
          expect(rounded, dtype == DType::kF32 ? f32 : 5e-3, [&](int i, int r, int c) {
            const double z = b[static_cast<size_t>(r * gate_width + c / share)];
            return RoundedRow(a[i], dtype) * GateFactorOf(activation, z);
          });
        }
      }
    }
    for (const double cap : {0.5, 30.0}) {
      const DeviceRows capped = Make(rows, width, DType::kF32, &a);
      backend_->SoftCapRows(capped.view, static_cast<float>(cap));
      expect(capped, 3e-7 * cap, [&](int i, int, int) { return cap * std::tanh(a[i] / cap); });
    }
    std::vector<float> with_nan = a;
    with_nan[1] = std::numeric_limits<float>::quiet_NaN();
    const DeviceRows clamped = Make(rows, width, DType::kF32, &with_nan);
    backend_->Clamp(clamped.view, 0.75f);
    const std::vector<float> limited = HostRows(*backend_, clamped.view);
    for (size_t i = 0; i < limited.size(); ++i) {
      if (i == 1) {
        EXPECT_TRUE(std::isnan(limited[i]));
      } else {
        EXPECT_EQ(limited[i], std::clamp(with_nan[i], -0.75f, 0.75f));
      }
    }
    ExpectUntouchedBehind(clamped);

    const std::vector<int32_t> tokens(rows), wanted = {5, 0, 3};
    backend_->BeginStep(
        {.token_ids = tokens, .position = tokens, .sequence = tokens, .output_rows = wanted},
        nullptr, false);
    const DeviceRows some = Make(3, width, DType::kF32, nullptr);
    backend_->GatherOutputRows(z.view, some.view);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(RowOf(*backend_, some.view, r, width), RowOf(*backend_, z.view, wanted[r], width));
    }
    ExpectUntouchedBehind(some);

    std::vector<int32_t> from(rows);
    for (int r = 0; r < rows; ++r) from[static_cast<size_t>(r)] = (3 * r + 1) % rows;
    backend_->BeginStep(
        {.token_ids = tokens, .position = tokens, .sequence = tokens, .source_rows = from}, nullptr,
        false);
    const DeviceRows sources = Make(rows, width, DType::kF32, nullptr);
    backend_->GatherSourceRows(z.view, sources.view);
    for (int r = 0; r < rows; ++r) {
      EXPECT_EQ(RowOf(*backend_, sources.view, r, width), RowOf(*backend_, z.view, from[r], width));
    }
    ExpectUntouchedBehind(sources);
  }
}

// Answers each float with its double and counts the calls.
class DoublingExchange final : public HostExchange {
 public:
  void Run(std::span<const std::byte> sent, std::span<std::byte> received) override {
    ++runs;
    ASSERT_EQ(sent.size(), received.size());
    for (size_t i = 0; i < sent.size(); i += sizeof(float)) {
      float value;
      std::memcpy(&value, sent.data() + i, sizeof(value));
      value *= 2.0f;
      std::memcpy(received.data() + i, &value, sizeof(value));
    }
  }
  int runs = 0;
};

// Rows leave a step for the host and come back between its operations, also if the step is recorded
// and replayed with other values.
TEST_P(RowsTest, AStepExchangesRowsWithTheHost) {
  constexpr int kRows = 4, kCols = 33;
  Random random(3);
  DoublingExchange exchange;
  const DeviceRows input = Make(kRows, kCols, DType::kF32, nullptr);
  const DeviceRows sent = Make(kRows, kCols, DType::kF32, nullptr);
  const DeviceRows received = Make(kRows, kCols, DType::kF32, nullptr);
  const std::vector<int32_t> zeros(kRows, 0), positions{0, 1, 2, 3};
  int owner = 0;
  for (int step = 0; step < 4; ++step) {
    std::vector<float> values(kRows * kCols);
    for (float& v : values) v = static_cast<float>(random.Normal());
    backend_->CopyFromHost(values, input.view);
    backend_->BeginStep({.token_ids = zeros, .position = positions, .sequence = zeros}, &owner,
                        true);
    backend_->RunStep([&] {
      backend_->Convert(input.view, sent.view);
      backend_->Scale(sent.view, 3.0f);
      backend_->Exchange({.send = sent.view, .receive = received.view, .exchange = &exchange});
      backend_->Scale(received.view, 0.5f);
    });
    backend_->FinishStep();
    EXPECT_EQ(exchange.runs, step + 1);
    std::vector<float> result(values.size());
    backend_->CopyToHost(received.view, result);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(result[i], values[i] * 3.0f) << i;
    ExpectUntouchedBehind(received);
  }
  backend_->ForgetSteps(&owner);
}

INSTANTIATE_TEST_SUITE_P(Backends, RowsTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
