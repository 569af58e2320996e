#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "base/error_text.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_latent_mma.h"
#include "kernels/cuda/cache/kv_cache.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/joined/joined_linear.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope.h"
#include "kernels/cuda/quantized/linear_fp8.h"
#include "kernels/cuda/quantized/linear_grouped.h"
#include "kernels/cuda/quantized/linear_int4.h"
#include "kernels/cuda/quantized/linear_mxfp4.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/rows/sampler.h"
#include "kernels/cuda/slots/expert_slots.h"

namespace moeserve::cuda {
namespace {

class CudaBuffer : public DeviceBuffer {
 public:
  explicit CudaBuffer(DeviceMemory memory) : memory_(std::move(memory)) {}
  void* data() const override { return memory_.data(); }
  size_t bytes() const override { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
};

class CudaNormBank : public NormBank {
 public:
  NormShape shape;
  DeviceMemory scales, shifts, group_begin;
  bool has_shifts = false;
  int width = 0, widest = 0;  // width of group 0; largest width of all groups
};

class CudaEmbeddingTable : public EmbeddingTable {
 public:
  DeviceMemory memory;
  TableView view;
  const CudaLinearBank* tied = nullptr;  // if set, rows of this bank's matrix are read instead of
                                         // `view`
};

// The paged cache, with the stream on which its blocks are copied.
class StreamKvCache : public KvCacheStorage {
 public:
  StreamKvCache(std::vector<KvLayerShape> layers, KvCacheType type, std::vector<int64_t> num_pages,
                CudaKvCache cache, cudaStream_t stream)
      : KvCacheStorage(std::move(layers), type, std::move(num_pages)),
        cache_(std::move(cache)),
        stream_(stream) {}
  void DoCopyPage(int table, int32_t from, int32_t to) override {
    cache_.CopyPage(table, from, to, stream_);
  }
  KvLayerView layer(int layer) const { return cache_.layer(layer); }

 private:
  CudaKvCache cache_;
  cudaStream_t stream_;
};

VectorNorm VectorNormOf(const NormBank* norm) {
  if (norm == nullptr) return {};
  const auto& bank = static_cast<const CudaNormBank&>(*norm);
  return {.layer = bank.shape.layer,
          .eps = bank.shape.eps,
          .scales = bank.scales.as<float>(),
          .shifts = bank.has_shifts ? bank.shifts.as<float>() : nullptr};
}

// Whether the kernel of LaunchNormRopeAppend() computes this: it normalises first and does not
// clamp.
bool IsOneLaunch(const NormRopeAppendArgs& args) { return !args.norm_last && args.clip == 0.0f; }

// Returns the view of the tokens [first, first + count).
StepView TokensOf(StepView view, int64_t first, int64_t count) {
  MOESERVE_CHECK(first >= 0 && first + count <= view.tokens, "tokens of the step");
  view.tokens = static_cast<int>(count);
  view.position += first;
  view.sequence += first;
  view.long_sequence += first;
  return view;
}

// Whether an attention rotates its queries as its `append` rotates keys, so that one kernel can do
// both.
bool PreparesAlike(const AttentionArgs& args) {
  if (args.append == nullptr || args.append->cache != args.cache ||
      args.append->layer != args.layer || !IsOneLaunch(*args.append)) {
    return false;
  }
  if (args.rope == nullptr) {
    return args.append->heads == 0 ||
           (args.append->heads == args.heads && args.append->rows.data == args.query.data &&
            args.append->rows.stride == args.query.stride);
  }
  const RopeSettings rope = args.append->query_rope();
  return args.append->heads == 0 && rope.dimensions > 0 && args.rope->first == 0 &&
         args.rope->dimensions == rope.dimensions && args.rope->interleaved == rope.interleaved &&
         args.rope->distance == rope.distance && SameAngles(*args.rope, rope);
}

}  // namespace

Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options) {
  return CudaBackend::Create(options);
}

Result<std::unique_ptr<Backend>> CudaBackend::Create(const BackendOptions& options) {
  MOESERVE_RETURN_IF_ERROR(CheckDevice());
  std::unique_ptr<CudaBackend> backend(new CudaBackend);
  cudaDeviceProp properties{};
  MOESERVE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  if (properties.major < 8) {
    return absl::UnavailableError("device cuda: " + std::string(properties.name) +
                                  ": expected compute capability 8.0 or later, found " +
                                  std::to_string(properties.major) + "." +
                                  std::to_string(properties.minor));
  }
  MOESERVE_ASSIGN_OR_RETURN(backend->stream_, Stream::Create());
  backend->description_ = "cuda, " + std::string(properties.name) + ", compute capability " +
                          std::to_string(properties.major) + "." + std::to_string(properties.minor);
  if (options.cuda_dense == "cublaslt") {
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<DenseLibrary> library, OpenDenseLibrary());
    backend->dense_ = std::make_unique<DenseLayers>(std::move(library));
    backend->description_ += ", dense layers by cuBLASLt";
  } else {
    backend->rank_ops_ = std::make_unique<CudaRankOps>(backend->stream_.get());
  }
  if (options.cuda_tune != "off") MOESERVE_RETURN_IF_ERROR(backend->OpenChoices(options));
  return std::unique_ptr<Backend>(std::move(backend));
}

CudaBackend::~CudaBackend() {
  if (stream_.get() != nullptr) cudaStreamSynchronize(stream_.get());
}

void CudaBackend::CheckCall(cudaError_t error, const char* what) const {
  CheckStatus(CudaStatus(error, what), what);
}

void CudaBackend::CheckStatus(const absl::Status& status, const char* what) const {
  if (status.ok()) return;
  moeserve::internal::CheckFailed(__FILE__, __LINE__, what, std::string(status.message()).c_str());
}

void CudaBackend::Synchronize() {
  CheckStatus(stream_.Synchronize(), "wait for the device");
  waited_ = true;
}

void CudaBackend::DropRecordings() {
  Synchronize();
  recordings_.clear();
}

DeviceMemory CudaBackend::AllocateForStep(size_t bytes, const char* what) {
  Result<DeviceMemory> memory = DeviceMemory::Allocate(bytes);
  CheckStatus(memory.status(), what);
  return std::move(memory).value();
}

void CudaBackend::CopyIn(void* to, const void* from, size_t bytes) {
  CheckCall(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.get()),
            "copy to the device");
  Synchronize();
}

absl::Status CudaBackend::WithBudget(const absl::Status& status, const std::string& what) const {
  if (!absl::IsResourceExhausted(status)) return status;
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return status;
  return absl::ResourceExhaustedError("device cuda: " + what +
                                      " does not fit: " + std::to_string(free >> 20) + " MiB of " +
                                      std::to_string(total >> 20) + " are free, weights take " +
                                      std::to_string(weight_bytes_ >> 20) + " MiB");
}

Result<std::unique_ptr<DeviceBuffer>> CudaBackend::Allocate(size_t bytes) {
  Result<DeviceMemory> memory = DeviceMemory::Allocate(bytes);
  if (!memory.ok()) {
    return WithBudget(memory.status(), "a buffer of " + std::to_string(bytes >> 20) + " MiB");
  }
  return std::unique_ptr<DeviceBuffer>(std::make_unique<CudaBuffer>(std::move(memory).value()));
}

Result<std::unique_ptr<CudaLinearBank>> CudaBackend::MakeBank(LinearBankShape shape,
                                                              BankMemory memory) {
  Result<std::unique_ptr<CudaLinearBank>> bank = CudaLinearBank::Create(std::move(shape), memory);
  if (!bank.ok()) return WithBudget(bank.status(), "a layer of the model");
  weight_bytes_ += (*bank)->bytes();
  return bank;
}

Result<std::unique_ptr<LinearBank>> CudaBackend::NewLinearBank(LinearBankShape shape) {
  const bool moves = !shape.layer_out_features.empty();
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<CudaLinearBank> bank,
      MakeBank(std::move(shape), moves ? BankMemory::kSeparate : BankMemory::kTogether));
  if (moves) bank->MoveOn(stream_.get());
  return std::unique_ptr<LinearBank>(std::move(bank));
}

std::unique_ptr<ExpertSlots> CudaBackend::NewExpertSlots() {
  return std::make_unique<CudaExpertSlots>(
      stream_.get(),
      [this](LinearBankShape shape) { return MakeBank(std::move(shape), BankMemory::kHost); },
      [this](int64_t bytes) { weight_bytes_ += bytes; });
}

int64_t CudaBackend::FreeBytes() const {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  return static_cast<int64_t>(free);
}

Result<std::unique_ptr<NormBank>> CudaBackend::NewNormBank(NormShape shape,
                                                           std::span<const HostTensor> scales,
                                                           std::span<const HostTensor> shifts) {
  auto bank = std::make_unique<CudaNormBank>();
  bank->shape = shape;
  bank->has_shifts = !shifts.empty();
  std::vector<float> all_scales, all_shifts;
  std::vector<int32_t> begin = {0};
  for (const HostTensor& t : scales) {
    const std::vector<float> values = Widened(t);
    all_scales.insert(all_scales.end(), values.begin(), values.end());
    begin.push_back(static_cast<int32_t>(all_scales.size()));
    if (begin.size() == 2) bank->width = begin.back();
    bank->widest = std::max(bank->widest, static_cast<int>(values.size()));
  }
  for (const HostTensor& t : shifts) {
    const std::vector<float> values = Widened(t);
    all_shifts.insert(all_shifts.end(), values.begin(), values.end());
  }
  const auto upload = [&](const void* data, size_t bytes, DeviceMemory& to) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(to, DeviceMemory::Allocate(bytes));
    CopyIn(to.data(), data, bytes);
    return absl::OkStatus();
  };
  MOESERVE_RETURN_IF_ERROR(
      upload(all_scales.data(), all_scales.size() * sizeof(float), bank->scales));
  if (bank->has_shifts) {
    MOESERVE_RETURN_IF_ERROR(
        upload(all_shifts.data(), all_shifts.size() * sizeof(float), bank->shifts));
  }
  MOESERVE_RETURN_IF_ERROR(upload(begin.data(), begin.size() * sizeof(int32_t), bank->group_begin));
  return std::unique_ptr<NormBank>(std::move(bank));
}

Result<std::unique_ptr<EmbeddingTable>> CudaBackend::NewEmbeddingTable(const HostTensor& table) {
  auto copy = std::make_unique<CudaEmbeddingTable>();
  const size_t bytes = static_cast<size_t>(table.size()) * SizeOf(table.dtype);
  MOESERVE_ASSIGN_OR_RETURN(copy->memory, DeviceMemory::Allocate(bytes));
  CopyIn(copy->memory.data(), table.data, bytes);
  copy->view = {copy->memory.data(), table.dtype};
  weight_bytes_ += static_cast<int64_t>(bytes);
  return std::unique_ptr<EmbeddingTable>(std::move(copy));
}

Result<std::unique_ptr<EmbeddingTable>> CudaBackend::NewTiedEmbeddingTable(const LinearBank& bank) {
  auto table = std::make_unique<CudaEmbeddingTable>();
  table->tied = &static_cast<const CudaLinearBank&>(bank);
  return std::unique_ptr<EmbeddingTable>(std::move(table));
}

Result<std::unique_ptr<Router>> CudaBackend::NewRouter(const RouteSettings& settings,
                                                       const RouterTensors& tensors) {
  return CudaRouter::Create(settings, tensors);
}

Result<std::unique_ptr<DeviceBuffer>> CudaBackend::UploadBytes(std::span<const std::byte> bytes) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBuffer> buffer, Allocate(bytes.size()));
  CopyIn(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

Result<std::unique_ptr<KvCacheStorage>> CudaBackend::NewKvCache(std::vector<KvLayerShape> layers,
                                                                KvCacheType type,
                                                                std::vector<int64_t> num_pages) {
  // Attention with heads above 128 elements needs more shared memory than the smaller chips of a
  // generation have; that with heads above 256 elements does not.
  constexpr int kHeadDimEverywhere = 128;
  constexpr size_t kSharedForWideHeads = 163 << 10;
  for (const KvLayerShape& layer : layers) {
    if (layer.latent_dim > 0) {
      if (type == KvCacheType::kInt8) {
        return absl::UnimplementedError(
            Concat(description_,
                   ": kv-cache-dtype: expected f32 or bf16, found int8, which caches "
                   "of latent vectors do not support"));
      }
      const KvLayerView view{.head_dim = layer.head_dim, .latent_dim = layer.latent_dim};
      const int64_t shared = std::max(WideSharedBytes(view), LatentMmaSharedBytes(view));
      if (shared > static_cast<int64_t>(SharedMemoryLimit())) {
        return absl::UnavailableError(Concat(description_, ": attention over latent vectors of ",
                                             layer.latent_dim, ": expected ", shared >> 10,
                                             " KiB of shared memory in a thread block, found ",
                                             SharedMemoryLimit() >> 10, " KiB"));
      }
      continue;
    }
    const int widest = std::max(layer.head_dim, layer.value_dim());
    if (widest > kMaxHeadDim) {
      return absl::InvalidArgumentError("heads of " + std::to_string(widest) +
                                        " dimensions; the CUDA backend takes at most " +
                                        std::to_string(kMaxHeadDim));
    }
    const bool tiled = widest <= kMaxTiledDim;
    if (tiled && widest > kHeadDimEverywhere && SharedMemoryLimit() < kSharedForWideHeads) {
      return absl::UnavailableError(
          description_ + ": attention heads of dimension " + std::to_string(widest) +
          ": expected " + std::to_string(kSharedForWideHeads >> 10) +
          " KiB of shared memory in a thread block, found " +
          std::to_string(SharedMemoryLimit() >> 10) + " KiB; dimensions up to " +
          std::to_string(kHeadDimEverywhere) + " can be used");
    }
  }
  Result<CudaKvCache> cache = CudaKvCache::Allocate(layers, type, num_pages);
  if (!cache.ok()) {
    int64_t bytes = 0;
    for (const KvLayerShape& s : layers) bytes += PageBytes({&s, 1}, type) * num_pages[s.table];
    return WithBudget(cache.status(), "a KV cache of " + std::to_string(bytes >> 20) +
                                          " MiB (kv-cache-memory, max-num-seqs, max-model-len)");
  }
  return std::unique_ptr<KvCacheStorage>(std::make_unique<StreamKvCache>(
      std::move(layers), type, std::move(num_pages), std::move(cache).value(), stream_.get()));
}

int64_t CudaBackend::PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const {
  return CudaKvCache::BytesPerBlock({layers.begin(), layers.end()}, type);
}

void CudaBackend::Embed(const EmbedArgs& args) {
  const auto& tokens = static_cast<const CudaEmbeddingTable&>(*args.tokens);
  if (tokens.tied != nullptr) {
    LaunchReadRows(*tokens.tied, step_.token_ids, static_cast<int>(args.output.rows), args.scale,
                   args.output, stream_.get());
  } else {
    LaunchEmbed(tokens.view, step_.token_ids, args.scale, args.output, stream_.get());
  }
  if (args.types != nullptr) {
    const auto& types = static_cast<const CudaEmbeddingTable&>(*args.types);
    LaunchAddEmbedding(types.view, step_.token_types, args.output, stream_.get());
  }
  if (args.positions != nullptr) {
    const auto& learned = static_cast<const CudaEmbeddingTable&>(*args.positions);
    LaunchAddEmbedding(learned.view, step_.position, args.output, stream_.get());
  }
  if (args.sinusoidal) {
    LaunchAddSinusoids(step_.position, args.first_position, args.half_spacing, args.output,
                       stream_.get());
  }
}

void CudaBackend::Norm(const NormArgs& args) {
  const auto& bank = static_cast<const CudaNormBank&>(*args.bank);
  LaunchNorm({.shape = bank.shape,
              .scales = bank.scales.as<float>(),
              .shifts = bank.has_shifts ? bank.shifts.as<float>() : nullptr,
              .group_begin = bank.group_begin.as<int32_t>(),
              .width = args.plan == nullptr ? bank.width : bank.widest,
              .plan = args.plan,
              .segments = args.segments,
              .input = args.input,
              .output = args.output},
             stream_.get());
}

bool CudaBackend::JoinsLinear(const LinearArgs& args) {
  if ((args.norm == nullptr) == (args.sum == nullptr)) return false;
  // The results of the library would differ, so the number of rows must not decide.
  if (dense_ != nullptr && DenseLayers::Fits(args)) return false;
  NormLaunch norm;
  JoinedLinear joined{.linear = args, .sum = args.sum};
  if (args.norm != nullptr) {
    norm = LaunchOf(*args.norm);
    joined.norm = &norm;
  }
  if (!CanJoin(joined, stream_.get())) return false;
  LaunchJoinedLinear(joined, stream_.get());
  return true;
}

void CudaBackend::Linear(const LinearArgs& args) {
  if (JoinsLinear(args)) return;
  PrepareLinear(args);
  const Quantization type = args.bank->shape().quantization;
  if (type != Quantization::kNone) {
    if (int8_rows_.MustGrow(args)) {
      DropRecordings();
      CheckStatus(int8_rows_.Reserve(args), "memory for rounded rows");
    }
    const LinearTile tile = products_ == nullptr ? LinearTile::kAuto : products_->Tile(args);
    if (type == Quantization::kInt8Channel) {
      return LaunchLinearInt8(args, tile, int8_rows_, stream_.get());
    }
    const auto launch = type == Quantization::kInt4K ? LaunchLinearInt4 : LaunchLinearGrouped;
    return launch(args, tile, int8_rows_, stream_.get());
  }
  if (dense_ != nullptr && DenseLayers::Fits(args)) {
    if (args.input.rows == 0) return;
    if (!dense_->Ready(args)) {
      DropRecordings();
      CheckStatus(dense_->Prepare(args, stream_.get()), "prepare a dense layer for cuBLASLt");
    }
    if (dense_->Run(args, stream_.get())) return;
  }
  const LinearTile tile = products_ == nullptr ? LinearTile::kAuto : products_->Tile(args);
  if (args.bank->shape().fp8) return LaunchLinearFp8(args, tile, stream_.get());
  if (args.bank->shape().mxfp4) return LaunchLinearMxfp4(args, tile, stream_.get());
  LaunchLinear(args, tile, stream_.get());
}

bool CudaBackend::FusesFeedForward(const FeedForwardArgs& args) const {
  // The results of the library would differ, so the number of rows must not decide.
  const DType dtype = args.input.dtype;
  if (dense_ != nullptr &&
      (DenseLayers::Fits(*args.up, dtype) || DenseLayers::Fits(*args.down, dtype))) {
    return false;
  }
  if (dtype != DType::kBF16 || !FusedExpertFits(*args.up, *args.down)) return false;
  const std::optional<FusedTile> tile =
      products_ == nullptr ? FusedTileThatPays(args) : products_->Fused(args);
  return tile.has_value();
}

void CudaBackend::FusedFeedForward(const FeedForwardArgs& args) {
  const std::optional<FusedTile> tile =
      products_ == nullptr ? FusedTileThatPays(args) : products_->Fused(args);
  LaunchFusedExpert(args, tile.value_or(FusedTile::kAuto), stream_.get());
}

StepView CudaBackend::View() const {
  return {.tokens = static_cast<int>(shape_.rows.tokens),
          .position = step_.position,
          .sequence = step_.sequence,
          .page_tables = step_.page_tables,
          .table_stride = shape_.table_stride,
          .max_context = static_cast<int>(shape_.context),
          .long_sequence = step_.long_sequence,
          .lengths = step_.page_tables + shape_.table_stride - 1};
}

StepView CudaBackend::ViewOf(const KvCacheStorage& cache, int layer) const {
  StepView view = View();
  const int64_t first = int64_t{cache.shape(layer).table} * view.table_stride;
  view.page_tables += first;
  view.lengths += first;
  view.table_stride *= cache.num_tables();
  return view;
}

const float2* CudaBackend::RopeAngles(const RopeSettings& settings) {
  if (rope_tables_.MustGrow(settings, shape_.rows.tokens)) {
    DropRecordings();
    CheckStatus(rope_tables_.Reserve(settings, shape_.rows.tokens, stream_.get()),
                "memory for rotary positions");
  }
  return rope_tables_.Angles(settings, View(), stream_.get());
}

void CudaBackend::Rope(const RopeArgs& args) {
  if (args.settings.dimensions == 0) return;
  const RoutingPlan* plan = args.plan;
  MOESERVE_CHECK(plan == nullptr || args.first_token == 0, "rows of tokens or of a plan");
  LaunchRope(
      {.head_dim = args.settings.head_dim,
       .first = args.settings.first,
       .dimensions = args.settings.dimensions,
       .interleaved = args.settings.interleaved,
       .distance = args.settings.distance,
       .angles = RopeAngles(args.settings) + args.first_token * (args.settings.dimensions / 2),
       .step = plan == nullptr ? TokensOf(View(), args.first_token, args.rows.rows) : View(),
       .token_of_row = plan == nullptr ? nullptr : plan->row_of_assignment,
       .valid_rows = plan == nullptr ? nullptr : plan->expert_offsets + plan->num_experts,
       .rows = static_cast<float*>(args.rows.data),
       .num_rows = static_cast<int>(args.rows.rows),
       .heads = static_cast<int>(args.rows.cols / args.settings.head_dim),
       .stride = args.rows.stride},
      stream_.get());
}

void CudaBackend::ScaleByPosition(const PositionScaleArgs& args) {
  if (args.rows.rows == 0) return;
  LaunchPositionScale(TokensOf(View(), args.first_token, args.rows.rows), args.scale,
                      static_cast<float*>(args.rows.data), args.rows.cols, args.rows.stride,
                      stream_.get());
}

void CudaBackend::AppendKv(const AppendKvArgs& args) {
  LaunchNormRopeAppend({.cache = static_cast<StreamKvCache&>(*args.cache).layer(args.layer),
                        .step = ViewOf(*args.cache, args.layer),
                        .keys = static_cast<const float*>(args.keys.data),
                        .values = static_cast<const float*>(args.values.data),
                        .key_stride = args.keys.stride,
                        .value_stride = args.values.stride},
                       stream_.get());
}

NormRopeAppendLaunch CudaBackend::LaunchOf(const NormRopeAppendArgs& args) {
  const QkvColumns columns = args.columns();
  const bool xpos = args.rope.dimensions > 0 && args.rope.xpos_base > 0.0;
  return {.cache = static_cast<StreamKvCache&>(*args.cache).layer(args.layer),
          .step = ViewOf(*args.cache, args.layer),
          .query = static_cast<float*>(columns.query.data),
          .keys = static_cast<const float*>(columns.keys.data),
          .values = static_cast<const float*>(columns.values.data),
          .query_stride = args.rows.stride,
          .key_stride = args.rows.stride,
          .value_stride = args.rows.stride,
          .heads = args.heads,
          .query_norm = VectorNormOf(args.query_norm),
          .key_norm = VectorNormOf(args.key_norm),
          .norm_heads = args.norm_heads,
          .dimensions = args.rope.dimensions,
          .interleaved = args.rope.interleaved,
          .distance = args.rope.distance,
          .angles = args.rope.dimensions == 0 ? nullptr : RopeAngles(args.query_rope()),
          .key_angles = xpos ? RopeAngles(args.key_rope()) : nullptr};
}

void CudaBackend::NormRopeAppend(const NormRopeAppendArgs& args) {
  if (!IsOneLaunch(args)) return Backend::NormRopeAppend(args);
  LaunchNormRopeAppend(LaunchOf(args), stream_.get());
}

AttentionWork CudaBackend::WorkFor(const StepView& view, int first_token, int tiled_from,
                                   const WorkKey& key, int64_t row_floats) {
  WorkSlot& slot = work_[key];
  const int tokens = static_cast<int>(shape_.rows.tokens);
  if (tokens > slot.max_tokens || row_floats > slot.row_floats) {
    DropRecordings();
    slot.max_tokens = std::max(slot.max_tokens, tokens);
    slot.row_floats = std::max(slot.row_floats, row_floats);
    slot.memory = {};
    const int splits = AttentionSlots(slot.row_floats);
    slot.memory =
        AllocateForStep(static_cast<size_t>(AttentionWorkBytes(slot.max_tokens, splits, 0)),
                        "memory for attention");
    slot.work = LayOutAttentionWork(slot.memory.data(), slot.max_tokens, splits);
    slot.laid_out = false;
    const auto bytes = static_cast<size_t>(splits * slot.row_floats) * sizeof(float);
    if (partial_results_.bytes() < bytes) {
      partial_results_ = {};
      partial_results_ = AllocateForStep(bytes, "memory for attention");
    }
  }
  if (!slot.laid_out || slot.first_token != first_token || slot.tokens != tiled_from) {
    LaunchAttentionWork(view, tiled_from, {key.table < 0, key.window, key.chunks}, key.split_tokens,
                        slot.work, stream_.get());
    slot.laid_out = true;
    slot.first_token = first_token;
    slot.tokens = tiled_from;
  }
  AttentionWork work = slot.work;
  work.partial = partial_results_.as<float>();
  return work;
}

void CudaBackend::Attention(const AttentionArgs& args) {
  const int first = static_cast<int>(args.first_token);
  MOESERVE_CHECK(args.plan == nullptr || first == 0, "rows of tokens or of a plan");
  const KvLayerView cache = static_cast<const StreamKvCache&>(*args.cache).layer(args.layer);
  AttentionLaunch launch;
  launch.cache = cache;
  launch.step = ViewOf(*args.cache, args.layer);
  const bool all_tokens = args.plan != nullptr || args.query.rows == launch.step.tokens;
  if (!all_tokens) {
    MOESERVE_CHECK(args.append == nullptr, "keys of all tokens");
    if (args.query.rows == 0) return;
    launch.step = TokensOf(launch.step, first, args.query.rows);
  }
  launch.query = static_cast<const float*>(args.query.data);
  launch.query_stride = args.query.stride;
  launch.output = args.output.data;
  launch.output_stride = args.output.stride;
  launch.output_dtype = args.output.dtype;
  launch.heads = args.heads;
  launch.tile_order = args.order == HeadOrder::kTile;
  launch.scale = args.scale;
  launch.soft_cap = args.soft_cap;
  launch.sinks = args.sinks;
  launch.bias = args.bias;
  launch.bias_distances = args.bias_distances;
  launch.seen = {args.causal, args.window, args.chunks};
  launch.tiled_from = std::clamp(tiled_from_ - first, 0, launch.step.tokens);
  if (args.plan != nullptr) {
    launch.rows = {args.plan->row_offsets, args.plan->assignments_of_row,
                   args.plan->row_of_assignment, args.plan->MostOfRow()};
  }
  launch.rows.by_shape = args.rows_per_token;
  if (attention_tuning_ != nullptr) {
    launch.tiles = attention_tuning_->Tiles(launch);
    launch.splits = attention_tuning_->Splits(launch);
  }
  if (launch.tiles == AttentionTiles::kWarpgroup) {
    const auto bytes = static_cast<size_t>(TileSumsBytes(launch));
    if (tile_sums_.bytes() < bytes) {
      DropRecordings();
      tile_sums_ = {};
      tile_sums_ = AllocateForStep(bytes, "memory for attention");
    }
    if (bytes > 0) launch.tile_sums = tile_sums_.as<float>();
  }
  const bool splits_by_work =
      launch.splits == AttentionSplits::kAuto || launch.splits == AttentionSplits::kMerged;
  if (launch.tiled_from > 0 && splits_by_work && !IsWide(cache, launch.output_dtype)) {
    const int heads = args.heads * launch.rows.max_per_token;
    const WorkKey key{
        .window = args.window,
        .chunks = args.chunks,
        .split_tokens = SplitTokens(args.heads / cache.num_kv_heads * args.rows_per_token),
        .table = args.causal ? -1 : args.cache->shape(args.layer).table};
    launch.work =
        WorkFor(launch.step, first, launch.tiled_from, key,
                PartialFloats(heads, cache.latent_dim > 0 ? cache.latent_dim : cache.widest_dim()));
  }
  NormRopeAppendLaunch prepare;
  if (args.append != nullptr || args.rope != nullptr) {
    // Tokens without a row in a part of a plan have keys, too.
    const bool part = args.plan != nullptr && args.plan->most_of_row > 0;
    const bool alike = all_tokens && !part && PreparesAlike(args);
    if (alike) {
      prepare = LaunchOf(*args.append);
      if (args.rope != nullptr) prepare.heads = args.heads;
      launch.prepare = &prepare;
    }
    if (!alike || !CanPrepare(launch)) {
      launch.prepare = nullptr;
      PrepareAttention(args);
    }
    if (part && args.query.rows == 0) return;
  }
  LaunchAttention(launch, stream_.get());
}

void CudaBackend::AssignRows(const AssignRowsArgs& args) { LaunchAssignRows(args, stream_.get()); }
void CudaBackend::Combine(const CombineArgs& args) { LaunchCombine(args, stream_.get()); }
void CudaBackend::Convert(const RowsView& input, const RowsView& output) {
  LaunchConvert(input, output, stream_.get());
}
void CudaBackend::AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                            float scale) {
  LaunchAddScaled(x, branch, bias, scale, stream_.get());
}
NormLaunch CudaBackend::LaunchOf(const AddNormArgs& args) {
  const auto& bank = static_cast<const CudaNormBank&>(*args.norm);
  return {.shape = bank.shape,
          .scales = bank.scales.as<float>(),
          .shifts = bank.has_shifts ? bank.shifts.as<float>() : nullptr,
          .group_begin = bank.group_begin.as<int32_t>(),
          .width = bank.width,
          .input = args.x,
          .output = args.output,
          .branch = args.branch,
          .sum = args.sum,
          .bias = args.bias,
          .scale = args.scale};
}
void CudaBackend::AddNorm(const AddNormArgs& args) { LaunchNorm(LaunchOf(args), stream_.get()); }
void CudaBackend::ScaleBySigmoid(const RowsView& x, const RowsView& gate) {
  LaunchScaleBySigmoid(x, gate, stream_.get());
}
void CudaBackend::GatherOutputRows(const RowsView& input, const RowsView& output) {
  LaunchGather(input, step_.output_rows, output, stream_.get());
}
void CudaBackend::GatherSourceRows(const RowsView& input, const RowsView& output) {
  LaunchGather(input, step_.source_rows, output, stream_.get());
}
void CudaBackend::PoolRows(const PoolArgs& args) {
  MOESERVE_CHECK(args.output.rows == static_cast<int64_t>(inputs_.pool_ranges.size()),
                 "rows of pools");
  LaunchPool(args, step_.pool_ranges, stream_.get());
}
void CudaBackend::Sample(const RowsView& logits) {
  const size_t bytes = static_cast<size_t>(logits.rows) * sizeof(SampleResult);
  if (sampled_.bytes() < bytes) {
    DropRecordings();
    sampled_ = {};
    sampled_ = AllocateForStep(bytes, "memory for drawn tokens");
  }
  SampleLaunch launch{.rows = step_.samples,
                      .results = sampled_.as<SampleResult>(),
                      .count = static_cast<int>(logits.rows),
                      .logits = static_cast<const float*>(logits.data),
                      .stride = logits.stride,
                      .vocabulary = static_cast<int>(logits.cols)};
  if (sampler_tuning_ != nullptr) launch.blocks = sampler_tuning_->Blocks(launch);
  LaunchSample(launch, stream_.get());
}
void CudaBackend::Scale(const RowsView& x, float factor) { LaunchScale(x, factor, stream_.get()); }

void CudaBackend::MultiplyByGate(const RowsView& x, const RowsView& gate,
                                 GateActivation activation) {
  LaunchMultiplyByGate(x, gate, activation, stream_.get());
}

void CudaBackend::SoftCapRows(const RowsView& x, float cap) {
  LaunchSoftCap(x, cap, stream_.get());
}

void CudaBackend::Clamp(const RowsView& x, float limit) { LaunchClamp(x, limit, stream_.get()); }

}  // namespace moeserve::cuda
