#include "server/bench/synthetic_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

namespace moeserve {
namespace {

uint64_t NextRandom(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Returns a table of standard normal numbers. Weights are random entries of the table, because
// computing billions of normal numbers would take minutes.
const std::vector<float>& NormalTable() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    uint64_t state = 88172645463325252ULL;
    for (float& v : t) {
      const double u = (static_cast<double>(NextRandom(state) >> 11) + 0.5) * 0x1p-53;
      const double w = static_cast<double>(NextRandom(state) >> 11) * 0x1p-53;
      v = static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * w));
    }
    return t;
  }();
  return table;
}

// Reuses the memory of released tensors, because allocating new pages takes longer than writing the
// weights. Not thread-safe.
class Spares : public std::enable_shared_from_this<Spares> {
 public:
  std::shared_ptr<std::vector<char>> Take(size_t size) {
    auto found = std::find_if(free_.begin(), free_.end(),
                              [size](const auto& v) { return v->size() == size; });
    std::unique_ptr<std::vector<char>> memory;
    if (found == free_.end()) {
      memory = std::make_unique<std::vector<char>>(size);
    } else {
      memory = std::move(*found);
      free_.erase(found);
    }
    return {memory.release(),
            [self = shared_from_this()](std::vector<char>* v) { self->free_.emplace_back(v); }};
  }

 private:
  std::vector<std::unique_ptr<std::vector<char>>> free_;
};

class SyntheticWeights : public WeightSource {
 public:
  explicit SyntheticWeights(DType dtype) : dtype_(dtype) {}

  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override {
    HostTensor t;
    t.shape = shape;
    const bool router = name.find(".router.") != std::string_view::npos;
    t.dtype = router || shape.size() == 1 ? DType::kF32 : dtype_;
    const int64_t n = t.size();
    const std::shared_ptr<std::vector<char>> bytes =
        spares_->Take(static_cast<size_t>(n) * SizeOf(t.dtype));
    t.data = bytes->data();
    t.owner = bytes;
    if (shape.size() == 1) {
      // Biases are 0. Biases of 1 would dominate the inputs of the routers, and nearly all tokens
      // would select the same experts. The logarithms of the rates of decays are 0, too: a rate of
      // 1 is exact in every format.
      const bool bias = name.ends_with("bias") || name.ends_with("decay_log");
      std::fill_n(reinterpret_cast<float*>(bytes->data()), n, bias ? 0.0f : 1.0f);
      return t;
    }
    const float scale =
        name == "embed.weight" ? 1.0f : 1.0f / std::sqrt(static_cast<float>(shape[1]));
    const std::vector<float>& normals = NormalTable();
    uint64_t state = std::hash<std::string_view>{}(name) | 1;
    for (int64_t i = 0; i < n; i += 4) {
      uint64_t bits = NextRandom(state);
      for (int64_t j = i; j < std::min(n, i + 4); ++j, bits >>= 16) {
        const float v = normals[bits & 0xffff] * scale;
        if (t.dtype == DType::kF32) {
          reinterpret_cast<float*>(bytes->data())[j] = v;
        } else {
          reinterpret_cast<Bf16*>(bytes->data())[j] = Bf16FromF32(v);
        }
      }
    }
    return t;
  }

  DType DominantDType() const override { return dtype_; }

 private:
  DType dtype_;
  std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

ModelSpec MixtralSpec() {
  ModelSpec spec;
  spec.vocab_size = 32000;
  spec.hidden_size = 4096;
  spec.max_position_embeddings = 32768;
  spec.norm.eps = 1e-5f;
  AttentionSpec attention;
  attention.num_heads = 32;
  attention.num_kv_heads = 8;
  attention.head_dim = 128;
  attention.scale = 1.0 / std::sqrt(128.0);
  RoutedLayerSpec routing;
  routing.num_experts = 8;
  routing.widths.assign(8, 14336);
  routing.select.k = 2;
  routing.renormalize = true;
  FeedForwardSpec feed_forward;
  feed_forward.routing = routing;
  spec.AddLayers(8, {attention, feed_forward});
  return spec;
}

}  // namespace

bool IsHybridName(std::string_view name) { return name.ends_with("-hybrid"); }

void MakeHybrid(ModelSpec& spec) {
  DeltaSpec delta;
  delta.key_dim = delta.value_dim = 128;
  delta.num_key_heads = std::max(spec.hidden_size / 128, 1);
  delta.num_heads = 2 * delta.num_key_heads;
  for (BlockSpec& block : spec.blocks) {
    if (block.attention() == nullptr) continue;
    if ((block.layer + 1) % 4 == 0) {
      spec.attention(block.layer).gate = !block.attention()->routed();
    } else {
      block.mixer = delta;
    }
  }
  for (BlockSpec& block : spec.blocks) {
    auto* const feed_forward = std::get_if<FeedForwardSpec>(&block.mixer);
    if (feed_forward == nullptr || !feed_forward->routed()) continue;
    feed_forward->shared_width = feed_forward->routing->widths[0];
    feed_forward->shared_gate = true;
  }
}

Result<ModelSpec> SyntheticSpec(std::string_view name) {
  if (name == "mixtral") return MixtralSpec();
  const bool dense = name.ends_with("-dense");
  const std::string_view size = name.substr(0, name.find('-'));
  const bool medium = size == "medium";
  if (std::ranges::find(kSyntheticNames, name) == std::end(kSyntheticNames)) {
    std::string expected;
    for (const std::string_view known : kSyntheticNames) {
      expected += (expected.empty() ? "" : ", ") + std::string(known);
    }
    return absl::InvalidArgumentError("synthetic model: expected one of " + expected + ", found " +
                                      std::string(name));
  }
  ModelSpec spec;
  spec.vocab_size = 32000;
  spec.hidden_size = medium ? 1536 : 768;
  spec.max_position_embeddings = 32768;
  spec.norm.eps = 1e-6f;
  AttentionSpec attention;
  attention.num_heads = attention.num_kv_heads = 12;
  attention.head_dim = medium ? 128 : 64;
  attention.scale = 1.0 / std::sqrt(static_cast<double>(attention.head_dim));
  attention.qk_norm = QkNorm::kHead;
  RoutedLayerSpec routing;
  routing.num_experts = medium ? 64 : 32;
  routing.widths.assign(static_cast<size_t>(routing.num_experts), medium ? 768 : 640);
  routing.select.k = medium ? 8 : 2;
  routing.renormalize = true;
  FeedForwardSpec feed_forward;
  if (dense) {
    feed_forward.width = routing.select.k * routing.widths[0];
  } else {
    feed_forward.routing = routing;
  }
  spec.AddLayers(12, {attention, feed_forward});
  if (IsHybridName(name)) MakeHybrid(spec);
  return spec;
}

std::unique_ptr<WeightSource> MakeSyntheticWeights(DType dtype) {
  return std::make_unique<SyntheticWeights>(dtype);
}

}  // namespace moeserve
