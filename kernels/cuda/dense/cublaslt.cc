// cuBLASLt behind the interface of dense_library.h. The library (about 0.5 GB) is opened at run
// time, so that the server needs it only if it is used.

#include <array>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/error_text.h"
#include "kernels/cuda/dense/dense_library.h"

#if __has_include(<cublasLt.h>)

#include <cublasLt.h>
#include <dlfcn.h>

namespace moeserve::cuda {
namespace {

constexpr int kMaxAlgorithms = 32;
constexpr uint32_t kAlignment = 16;  // bytes

// The functions of the library that are used.
struct Functions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmulDescCreate) descriptor_create;
  decltype(&cublasLtMatmulDescDestroy) descriptor_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) descriptor_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algorithm_get;
  decltype(&cublasLtMatmul) multiply;
};

// The library of the same major version as the headers.
std::string FileName() { return Concat("libcublasLt.so.", std::to_string(CUBLAS_VER_MAJOR)); }

template <typename F>
bool Find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

// The library stays open, because it registers code with the driver.
Result<Functions> OpenFunctions() {
  const std::string file = FileName();
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    return absl::UnavailableError(
        Concat("device cuda: dense products by cuBLASLt: ", file,
               " could not be opened (it is part of NVIDIA's package libcublas): ",
               reason == nullptr ? "no reason was given" : reason));
  }
  Functions f{};
  const bool complete = Find(library, "cublasLtCreate", f.create) &&
                        Find(library, "cublasLtDestroy", f.destroy) &&
                        Find(library, "cublasLtGetStatusString", f.status_string) &&
                        Find(library, "cublasLtMatmulDescCreate", f.descriptor_create) &&
                        Find(library, "cublasLtMatmulDescDestroy", f.descriptor_destroy) &&
                        Find(library, "cublasLtMatmulDescSetAttribute", f.descriptor_set) &&
                        Find(library, "cublasLtMatrixLayoutCreate", f.layout_create) &&
                        Find(library, "cublasLtMatrixLayoutDestroy", f.layout_destroy) &&
                        Find(library, "cublasLtMatrixLayoutSetAttribute", f.layout_set) &&
                        Find(library, "cublasLtMatmulPreferenceCreate", f.preference_create) &&
                        Find(library, "cublasLtMatmulPreferenceDestroy", f.preference_destroy) &&
                        Find(library, "cublasLtMatmulPreferenceSetAttribute", f.preference_set) &&
                        Find(library, "cublasLtMatmulAlgoGetHeuristic", f.heuristic) &&
                        Find(library, "cublasLtMatmulAlgoConfigGetAttribute", f.algorithm_get) &&
                        Find(library, "cublasLtMatmul", f.multiply);
  if (!complete) {
    return absl::UnavailableError(
        Concat("device cuda: dense products by cuBLASLt: ", file, " lacks a function"));
  }
  return f;
}

class CublasLt : public DenseLibrary {
 public:
  explicit CublasLt(const Functions& functions) : f_(functions) {}
  ~CublasLt() override {
    for (auto& [shape, product] : products_) Release(product);
    if (handle_ != nullptr) static_cast<void>(f_.destroy(handle_));
  }

  absl::Status Open() { return Check(f_.create(&handle_), "cublasLtCreate"); }

  Result<int> FindAlgorithms(const DenseShape& shape, int64_t rows) override {
    auto [at, created] = products_.try_emplace(shape);
    Product& product = at->second;
    if (!created) return static_cast<int>(product.algorithms.size());
    absl::Status status = Describe(shape, product);
    if (status.ok()) status = Rank(product, rows);
    if (!status.ok()) {
      Release(product);
      products_.erase(at);
      return status;
    }
    return static_cast<int>(product.algorithms.size());
  }

  absl::Status Multiply(const DenseShape& shape, int algorithm, const void* weights,
                        const void* input, int64_t rows, float* output,
                        cudaStream_t stream) override {
    const auto at = products_.find(shape);
    MOESERVE_CHECK(at != products_.end(), "FindAlgorithms() was called for the shape");
    Product& product = at->second;
    MOESERVE_RETURN_IF_ERROR(SetRows(product, rows));
    const float one = 1.0f, zero = 0.0f;
    return Check(f_.multiply(handle_, product.descriptor, &one, weights, product.weights, input,
                             product.input, &zero, output, product.output, output, product.output,
                             &product.algorithms[static_cast<size_t>(algorithm)],
                             /*workspace=*/nullptr, /*workspaceSizeInBytes=*/0, stream),
                 "cublasLtMatmul");
  }

 private:
  struct Product {
    cublasLtMatmulDesc_t descriptor = nullptr;
    cublasLtMatrixLayout_t weights = nullptr, input = nullptr, output = nullptr;
    std::vector<cublasLtMatmulAlgo_t> algorithms;
  };

  absl::Status Check(cublasStatus_t status, const char* call) const {
    if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
    return absl::InternalError(Concat(call, ": ", f_.status_string(status)));
  }

  void Release(Product& product) {
    for (cublasLtMatrixLayout_t layout : {product.weights, product.input, product.output}) {
      if (layout != nullptr) static_cast<void>(f_.layout_destroy(layout));
    }
    if (product.descriptor != nullptr) static_cast<void>(f_.descriptor_destroy(product.descriptor));
  }

  // cuBLAS stores matrices by columns. A row-major matrix is its own transpose there, so the
  // product is output^T [N, rows] = weights [N, K] * input^T [K, rows], where the weights are
  // stored as [K, N] and transposed.
  absl::Status Describe(const DenseShape& shape, Product& product) {
    MOESERVE_RETURN_IF_ERROR(
        Check(f_.descriptor_create(&product.descriptor, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate"));
    const cublasOperation_t transpose = CUBLAS_OP_T;
    MOESERVE_RETURN_IF_ERROR(
        Check(f_.descriptor_set(product.descriptor, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                sizeof(transpose)),
              "cublasLtMatmulDescSetAttribute"));
    const auto n = static_cast<uint64_t>(shape.out_features);
    const auto k = static_cast<uint64_t>(shape.in_features);
    MOESERVE_RETURN_IF_ERROR(
        Check(f_.layout_create(&product.weights, CUDA_R_16BF, k, n, shape.in_features),
              "cublasLtMatrixLayoutCreate"));
    MOESERVE_RETURN_IF_ERROR(
        Check(f_.layout_create(&product.input, CUDA_R_16BF, k, 1, shape.input_stride),
              "cublasLtMatrixLayoutCreate"));
    return Check(f_.layout_create(&product.output, CUDA_R_32F, n, 1, shape.output_stride),
                 "cublasLtMatrixLayoutCreate");
  }

  absl::Status SetRows(Product& product, int64_t rows) {
    for (cublasLtMatrixLayout_t layout : {product.input, product.output}) {
      const auto columns = static_cast<uint64_t>(rows);
      MOESERVE_RETURN_IF_ERROR(
          Check(f_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof(columns)),
                "cublasLtMatrixLayoutSetAttribute"));
    }
    return absl::OkStatus();
  }

  // Fills product.algorithms. Algorithms without a workspace and without a reduction keep the sum
  // of an output in one place.
  absl::Status Rank(Product& product, int64_t rows) {
    MOESERVE_RETURN_IF_ERROR(SetRows(product, rows));
    cublasLtMatmulPreference_t preference = nullptr;
    MOESERVE_RETURN_IF_ERROR(
        Check(f_.preference_create(&preference), "cublasLtMatmulPreferenceCreate"));
    const uint64_t no_workspace = 0;
    const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    std::array<cublasLtMatmulHeuristicResult_t, kMaxAlgorithms> found{};
    int count = 0;
    absl::Status status = [&]() -> absl::Status {
      const auto set = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
        return Check(f_.preference_set(preference, name, &value, sizeof(value)),
                     "cublasLtMatmulPreferenceSetAttribute");
      };
      MOESERVE_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, no_workspace));
      MOESERVE_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, no_reduction));
      for (const auto name :
           {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        MOESERVE_RETURN_IF_ERROR(set(name, kAlignment));
      }
      return Check(
          f_.heuristic(handle_, product.descriptor, product.weights, product.input, product.output,
                       product.output, preference, kMaxAlgorithms, found.data(), &count),
          "cublasLtMatmulAlgoGetHeuristic");
    }();
    static_cast<void>(f_.preference_destroy(preference));
    MOESERVE_RETURN_IF_ERROR(status);
    for (int i = 0; i < count; ++i) {
      const cublasLtMatmulHeuristicResult_t& result = found[static_cast<size_t>(i)];
      int32_t parts = 0;  // into which the sum over K is split
      size_t written = 0;
      if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize == 0 &&
          f_.algorithm_get(&result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts),
                           &written) == CUBLAS_STATUS_SUCCESS &&
          parts <= 1) {
        product.algorithms.push_back(result.algo);
      }
    }
    return absl::OkStatus();
  }

  const Functions f_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<DenseShape, Product> products_;
};

}  // namespace

Result<std::unique_ptr<DenseLibrary>> OpenDenseLibrary() {
  MOESERVE_ASSIGN_OR_RETURN(const Functions functions, OpenFunctions());
  auto library = std::make_unique<CublasLt>(functions);
  MOESERVE_RETURN_IF_ERROR(library->Open());
  return std::unique_ptr<DenseLibrary>(std::move(library));
}

}  // namespace moeserve::cuda

#else

namespace moeserve::cuda {

Result<std::unique_ptr<DenseLibrary>> OpenDenseLibrary() {
  return absl::UnavailableError(
      "device cuda: dense products by cuBLASLt: this build does not support them (its header "
      "cublasLt.h was not found when it was compiled)");
}

}  // namespace moeserve::cuda

#endif
