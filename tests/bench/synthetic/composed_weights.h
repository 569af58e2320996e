// Tensors that are made of the rows of others, as the formats of other programs have them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/weights.h"

namespace moeserve::testing {

struct ComposedTensor {
  struct Source {
    std::string name;
    std::vector<int64_t> shape;
  };
  // Adjacent rows of a source. A source of one dimension has rows of one element.
  struct Rows {
    size_t source;
    int64_t first;
    int64_t count;
  };

  std::vector<Source> sources;  // of one type
  std::vector<Rows> rows = {};  // empty: all rows of all sources, in their order
  // If not empty: rows consist of this many blocks of equal size, and block i of a row is this
  // block of the source's row.
  std::vector<int64_t> column_blocks = {};
  // If set, the tensor is f32, and its values are these functions of those of the sources.
  std::function<float(float)> value = nullptr;
};

// The tensors of another source, which must outlive this one, and composed ones. One thread.
class ComposedWeights : public WeightSource {
 public:
  explicit ComposedWeights(WeightSource& weights) : weights_(weights) {}

  void Add(std::string name, ComposedTensor tensor);

  // Returns a composed tensor or, if none has the name, one of the source. Errors are those of the
  // source; Internal if the sources have several types, or `shape` has another number of elements.
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  DType DominantDType() const override { return weights_.DominantDType(); }

 private:
  WeightSource& weights_;
  std::map<std::string, ComposedTensor, std::less<>> tensors_;
};

}  // namespace moeserve::testing
