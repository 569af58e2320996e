// Measures attention over the paged KV cache, for decode steps and for prompts.

#include "tests/bench/cuda/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

namespace moeserve::bench {
namespace {

constexpr uint64_t kQuerySeed = 4242;
constexpr int kMaxLayers = 32;

struct Cluster {
  std::string name;
  cuda::AttentionSplits splits;
};
const Cluster kNoCluster{"", cuda::AttentionSplits::kAuto};

class AttentionRun {
 public:
  AttentionRun(Bench& bench, const AttentionShape& shape, int sequences, int length, bool prompt,
               const Cluster& cluster = kNoCluster,
               cuda::AttentionTiles tiles = cuda::AttentionTiles::kAuto)
      : bench_(bench),
        shape_(shape),
        sequences_(sequences),
        length_(length),
        prompt_(prompt),
        cluster_(cluster) {
    launch_.tiles = tiles;
  }

  Result<Measured> Run() {
    const double bytes = shape_.kv_bytes_per_token() * sequences_ * length_;
    int layers = 2;
    if (!bench_.tiny() && !prompt_) {
      layers = static_cast<int>(std::clamp(
          std::ceil(4.0 * static_cast<double>(bench_.rates().l2_bytes) / bytes), 2.0,
          std::clamp(static_cast<double>(bench_.weight_budget()) / bytes, 2.0, 1.0 * kMaxLayers)));
    }
    MOESERVE_ASSIGN_OR_RETURN(cache_,
                              RandomCache::Create(bench_, shape_, layers, sequences_, length_));
    MOESERVE_ASSIGN_OR_RETURN(launch_.step, cache_->Step(bench_, prompt_));
    tokens_ = launch_.step.tokens;
    MOESERVE_ASSIGN_OR_RETURN(launch_.rows, cache_->Rows(bench_, tokens_));
    const int64_t rows = int64_t{tokens_} * shape_.rows_per_token;
    const int64_t width = int64_t{shape_.heads} * shape_.head_dim;
    const int64_t output_width = int64_t{shape_.heads} * shape_.value_dim();
    MOESERVE_ASSIGN_OR_RETURN(query_, bench_.Random(DType::kF32, rows * width, kQuerySeed, 1.0f));
    MOESERVE_ASSIGN_OR_RETURN(output_,
                              bench_.Poisoned(static_cast<size_t>(rows * output_width) * 2));
    launch_.query = query_.as<float>();
    launch_.query_stride = width;
    launch_.output_stride = output_width;
    launch_.output = output_.data();
    launch_.output_dtype = DType::kBF16;
    launch_.heads = shape_.heads;
    launch_.tile_order = shape_.tile_order;
    launch_.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    launch_.tiled_from = prompt_ ? 0 : tokens_;
    launch_.cache = cache_->layer(0);
    if (const int64_t sums = prompt_ ? cuda::TileSumsBytes(launch_) : 0; sums > 0) {
      MOESERVE_ASSIGN_OR_RETURN(sums_, cuda::DeviceMemory::Allocate(static_cast<size_t>(sums)));
      launch_.tile_sums = static_cast<float*>(sums_.data());
    }
    const int64_t partial = cuda::PartialFloats(shape_.query_heads(), shape_.value_dim());
    const int slots = cuda::AttentionSlots(partial);
    MOESERVE_ASSIGN_OR_RETURN(work_, cuda::DeviceMemory::Allocate(static_cast<size_t>(
                                         cuda::AttentionWorkBytes(tokens_, slots, partial))));
    if (!prompt_) {
      launch_.work = cuda::LayOutAttentionWork(work_.data(), tokens_, slots);
      cuda::LaunchAttentionWork(launch_.step, tokens_, {},
                                cuda::SplitTokens(shape_.query_heads() / shape_.kv_heads),
                                launch_.work, bench_.stream());
    }
    const bool clusters = cuda::CanUseSplits(launch_, cluster_.splits);
    if (clusters) launch_.splits = cluster_.splits;
    for (int i = 0; i < layers; ++i) Enqueue(i);
    MOESERVE_RETURN_IF_ERROR(bench_.Synchronize());
    Enqueue(0);
    MOESERVE_RETURN_IF_ERROR(Check());
    Measured m;
    MOESERVE_ASSIGN_OR_RETURN(m.timing, bench_.Time(layers, [this](int i) { Enqueue(i); }));
    m.work.bytes = bytes + static_cast<double>(4 * rows * width + 2 * rows * output_width);
    m.work.written = static_cast<double>(2 * rows * output_width);
    const double pairs =
        prompt_ ? 0.5 * length_ * (length_ + 1.0) : static_cast<double>(sequences_) * length_;
    m.work.flops = 2.0 * shape_.query_heads() * (shape_.head_dim + shape_.value_dim()) * pairs;
    m.rotated_bytes = prompt_ ? 0 : bytes * layers;
    m.more = {{"batch", sequences_},
              {"context", length_},
              {"kv_mb", bytes / 1e6},
              {"query_dtype", "f32"}};
    if (!clusters) m.more["without_clusters"] = true;
    return m;
  }

 private:
  void Enqueue(int layer) {
    launch_.cache = cache_->layer(layer);
    cuda::LaunchAttention(launch_, bench_.stream());
  }

  // Compares one head of some output rows with a plain computation on the host. The queries are in
  // the order of the routing plan's assignments, so the plan determines the token of each output
  // row.
  absl::Status Check() {
    const int64_t width = int64_t{shape_.heads} * shape_.head_dim;
    std::vector<int32_t> token_of;
    const int64_t rows = int64_t{tokens_} * shape_.rows_per_token;
    if (launch_.rows.row_of_assignment != nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(token_of,
                                bench_.Download<int32_t>(launch_.rows.row_of_assignment, rows));
    } else {
      token_of.resize(static_cast<size_t>(rows));
      std::iota(token_of.begin(), token_of.end(), 0);
    }
    for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
      const int head = static_cast<int>(row * 7 % shape_.heads);
      const int kv =
          shape_.tile_order ? head % shape_.kv_heads : head / (shape_.heads / shape_.kv_heads);
      const int token = token_of[row];
      const int sequence = prompt_ ? 0 : token;
      const int position = prompt_ ? token : length_ - 1;
      const int d = shape_.head_dim, values = shape_.value_dim();
      std::vector<double> q(static_cast<size_t>(d)), expected(static_cast<size_t>(values));
      for (int c = 0; c < d; ++c) {
        q[c] = RandomRounded(kQuerySeed, row * width + int64_t{head} * d + c, 1.0f, DType::kBF16);
      }
      double total = 0;
      for (int p = 0; p <= position; ++p) {
        double score = 0;
        for (int c = 0; c < d; ++c) score += q[c] * cache_->key(0, sequence, p, kv, c);
        const double weight = std::exp(score * launch_.scale);  // scores are of order 1
        total += weight;
        for (int c = 0; c < values; ++c) {
          expected[c] += weight * cache_->value(0, sequence, p, kv, c);
        }
      }
      MOESERVE_ASSIGN_OR_RETURN(
          const std::vector<float> output,
          bench_.DownloadRow(output_.data(), DType::kBF16,
                             (row * shape_.heads + head) * int64_t{values}, values));
      double squares = 0;
      for (const double e : expected) squares += e / total * (e / total);
      const double spread = std::sqrt(squares / values);
      for (int c = 0; c < values; ++c) {
        MOESERVE_RETURN_IF_ERROR(
            CheckValue(output[c], expected[c] / total, spread,
                       "column " + std::to_string(c) + " of row " + std::to_string(row)));
      }
    }
    return absl::OkStatus();
  }

  Bench& bench_;
  const AttentionShape& shape_;
  const int sequences_, length_;
  const bool prompt_;
  const Cluster cluster_;
  int tokens_ = 0;
  std::unique_ptr<RandomCache> cache_;
  cuda::DeviceMemory query_, output_, work_, sums_;
  cuda::AttentionLaunch launch_;
};

}  // namespace

std::vector<AttentionShape> AttentionShapes(bool tiny) {
  if (tiny) {
    return {{.name = "gqa", .kv_heads = 2, .heads = 4, .head_dim = 32},
            {.name = "moa", .kv_heads = 1, .heads = 1, .head_dim = 32, .rows_per_token = 4},
            {.name = "latent", .kv_heads = 1, .heads = 4, .head_dim = 80, .latent_dim = 64},
            {.name = "gqa_int8",
             .kv_heads = 2,
             .heads = 4,
             .head_dim = 64,
             .cache = KvCacheType::kInt8}};
  }
  return {
      {.name = "moa", .kv_heads = 1, .heads = 1, .head_dim = 256, .rows_per_token = 16},
      {.name = "jetmoe",
       .kv_heads = 16,
       .heads = 16,
       .head_dim = 128,
       .rows_per_token = 2,
       .tile_order = true},
      {.name = "gqa", .kv_heads = 8, .heads = 32, .head_dim = 128},   // Mixtral
      {.name = "mha", .kv_heads = 16, .heads = 16, .head_dim = 128},  // OLMoE
      {.name = "gqa_int8",
       .kv_heads = 8,
       .heads = 32,
       .head_dim = 128,
       .cache = KvCacheType::kInt8},
      {.name = "latent16", .heads = 16, .head_dim = 576, .latent_dim = 512},    // DeepSeek-V2-Lite
      {.name = "latent128", .heads = 128, .head_dim = 576, .latent_dim = 512},  // DeepSeek-V3
  };
}

AttentionShape AttentionShapeOf(const std::string& name, bool tiny) {
  for (const AttentionShape& s : AttentionShapes(tiny)) {
    if (s.name == name) return s;
  }
  std::abort();
}

Result<std::unique_ptr<RandomCache>> RandomCache::Create(Bench& bench, const AttentionShape& shape,
                                                         int layers, int sequences, int length) {
  auto cache = std::make_unique<RandomCache>();
  cache->shape_ = shape;
  cache->layers_ = layers;
  cache->sequences_ = sequences;
  cache->length_ = length;
  cache->stride_ = (length + kPageTokens - 1) / kPageTokens;
  const int64_t blocks = int64_t{sequences} * cache->stride_;
  MOESERVE_ASSIGN_OR_RETURN(
      cache->cache_,
      cuda::CudaKvCache::Allocate(
          std::vector<KvLayerShape>(static_cast<size_t>(layers),
                                    KvLayerShape{shape.kv_heads, shape.head_dim, shape.latent_dim}),
          shape.cache, {blocks}));
  for (int i = 0; i < layers; ++i) {
    const cuda::KvLayerView view = cache->cache_.layer(i);
    if (view.padded_dim != shape.head_dim) return absl::InternalError("padded heads");
    const int64_t count = view.block_stride * blocks;
    if (shape.cache == KvCacheType::kInt8) {
      for (const bool values : {false, true}) {
        LaunchFillInt8Cache(values ? view.values : view.keys, count, view.head_stride,
                            cuda::kCacheScaleBytes, cache->seed(i, values), bench.stream());
      }
      continue;
    }
    LaunchFill(view.keys, DType::kBF16, count, cache->seed(i, false), 1.0f, bench.stream());
    if (shape.latent_dim > 0) continue;
    LaunchFill(view.values, DType::kBF16, count, cache->seed(i, true), 1.0f, bench.stream());
  }
  cache->tables_.resize(static_cast<size_t>(blocks));
  std::iota(cache->tables_.begin(), cache->tables_.end(), 0);
  uint64_t state = 12345;
  for (int64_t i = blocks - 1; i > 0; --i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::swap(cache->tables_[i],
              cache->tables_[static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(i + 1))]);
  }
  MOESERVE_ASSIGN_OR_RETURN(cache->device_tables_, bench.Upload(cache->tables_));
  return cache;
}

int64_t RandomCache::Element(int sequence, int position, int head, int column) const {
  const cuda::KvLayerView view = cache_.layer(0);
  const int64_t block = tables_[int64_t{sequence} * stride_ + position / kPageTokens];
  const int row = position % kPageTokens;
  return block * view.block_stride + head * view.head_stride +
         (shape_.cache == KvCacheType::kInt8 ? view.ByteOf(row, column)
                                             : view.ElementOf(row, column));
}

float RandomCache::Value(uint64_t seed, int64_t element) const {
  if (shape_.cache == KvCacheType::kInt8) return kInt8CacheScale * RandomByte(seed, element);
  return RandomRounded(seed, element, 1.0f, DType::kBF16);
}

float RandomCache::key(int layer, int sequence, int position, int head, int column) const {
  return Value(seed(layer, false), Element(sequence, position, head, column));
}

float RandomCache::value(int layer, int sequence, int position, int head, int column) const {
  return Value(seed(layer, shape_.latent_dim == 0), Element(sequence, position, head, column));
}

Result<cuda::StepView> RandomCache::Step(Bench& bench, bool all_tokens) {
  const int tokens = all_tokens ? length_ : sequences_;
  std::vector<int32_t> position, sequence;
  for (int t = 0; t < tokens; ++t) {
    position.push_back(all_tokens ? t : length_ - 1);
    sequence.push_back(all_tokens ? 0 : t);
  }
  MOESERVE_ASSIGN_OR_RETURN(position_, bench.Upload(position));
  MOESERVE_ASSIGN_OR_RETURN(sequence_, bench.Upload(sequence));
  return cuda::StepView{.tokens = tokens,
                        .position = position_.as<int32_t>(),
                        .sequence = sequence_.as<int32_t>(),
                        .page_tables = device_tables_.as<int32_t>(),
                        .table_stride = stride_,
                        .max_context = length_};
}

Result<cuda::QueryRows> RandomCache::Rows(Bench& bench, int tokens) {
  const int k = shape_.rows_per_token;
  if (k == 1) return cuda::QueryRows{};
  // Row j of token t is assignment j * tokens + t, as if each of k experts had every token.
  std::vector<int32_t> offsets, assignments, row_of(static_cast<size_t>(tokens) * k);
  for (int t = 0; t < tokens; ++t) {
    offsets.push_back(t * k);
    for (int j = 0; j < k; ++j) {
      assignments.push_back(j * tokens + t);
      row_of[static_cast<size_t>(j) * tokens + t] = t;
    }
  }
  offsets.push_back(tokens * k);
  MOESERVE_ASSIGN_OR_RETURN(row_offsets_, bench.Upload(offsets));
  MOESERVE_ASSIGN_OR_RETURN(assignments_, bench.Upload(assignments));
  MOESERVE_ASSIGN_OR_RETURN(row_of_, bench.Upload(row_of));
  return cuda::QueryRows{row_offsets_.as<int32_t>(), assignments_.as<int32_t>(),
                         row_of_.as<int32_t>(), k, k};
}

void AddAttentionCases(bool tiny, std::vector<Case>& cases) {
  const std::vector<int> contexts =
      tiny ? std::vector<int>{5, 40} : std::vector<int>{128, 1024, 4096, 16384, 32768};
  const std::vector<int> batches = tiny ? std::vector<int>{2} : std::vector<int>{1, 8, 32, 128};
  for (const AttentionShape& shape : AttentionShapes(tiny)) {
    for (const int batch : batches) {
      for (const int context : contexts) {
        // At least two layers of the cache must fit into memory in addition to the other data.
        if (shape.kv_bytes_per_token() * batch * context > 16e9) continue;
        const bool first = context == 4096 || (batch == 32 && context == 1024);
        for (const Cluster& cluster :
             {kNoCluster, Cluster{"/cluster4", cuda::AttentionSplits::kCluster4},
              Cluster{"/cluster8", cuda::AttentionSplits::kCluster8},
              Cluster{"/cluster16", cuda::AttentionSplits::kCluster16}}) {
          const bool candidate = !cluster.name.empty();
          // Clusters take no latent vectors.
          if (candidate && (shape.latent_dim > 0 || (!tiny && !first))) continue;
          cases.push_back(
              {"attention/" + shape.name + "/B" + std::to_string(batch) + "L" +
                   std::to_string(context) + cluster.name,
               tiny || (first && !candidate) ? 0 : 1,
               [shape, batch, context, cluster](Bench& bench) {
                 bench.Forget();
                 return AttentionRun(bench, shape, batch, context, false, cluster).Run();
               }});
        }
      }
    }
    for (const int length : tiny ? std::vector<int>{37} : std::vector<int>{512, 2048, 4096, 8192}) {
      cases.push_back({"prompt/" + shape.name + "/L" + std::to_string(length),
                       tiny || length == 4096 ? 0 : 1, [shape, length](Bench& bench) {
                         bench.Forget();
                         return AttentionRun(bench, shape, 1, length, true).Run();
                       }});
      // What kAuto does not choose.
      const bool latent = shape.latent_dim > 0;
      if (!latent && shape.head_dim != 64 && shape.head_dim != 128) continue;
      const cuda::AttentionTiles tiles =
          latent ? cuda::AttentionTiles::kWarpgroup : cuda::AttentionTiles::kPingPong;
      cases.push_back(
          {"prompt/" + shape.name + "/L" + std::to_string(length) +
               (latent ? "/warpgroup" : "/pingpong"),
           tiny || length == 4096 ? 0 : 1, [shape, length, tiles](Bench& bench) {
             bench.Forget();
             return AttentionRun(bench, shape, 1, length, true, kNoCluster, tiles).Run();
           }});
    }
  }
}

}  // namespace moeserve::bench
