// Writes pickles, zip archives and PyTorch files for tests, also damaged and hostile ones.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/native_model.h"

namespace moeserve::testing {

// `size` bytes of a little-endian number.
std::string Number(uint64_t number, int size);

// Instructions of a pickle.
std::string PickleString(std::string_view text);
std::string PickleInt(int64_t number);
std::string PickleGlobal(std::string_view module, std::string_view name);
std::string PickleTuple(const std::vector<std::string>& items);
// A call of torch's rebuild function for a tensor in the storage `key` of `elements` elements.
std::string PickleTensor(std::string_view storage_class, std::string_view key, int64_t elements,
                         int64_t first, const std::vector<int64_t>& shape,
                         const std::vector<int64_t>& strides);
// A whole pickle of a dict. The items are names and instructions of values.
struct PickleItem {
  std::string name;
  std::string value;
};
std::string PickleDict(const std::vector<PickleItem>& items);

struct ZipPart {
  std::string name;
  std::string bytes;
};
// How an archive is written. PyTorch uses descriptors and zip64 records.
struct ZipStyle {
  bool descriptors = true;
  bool zip64 = true;
};
std::string ZipBytes(const std::vector<ZipPart>& parts, const ZipStyle& style = {});

// A file of torch.save(): `pickle` and the storages data/0, data/1, ...
std::string TorchBytes(std::string_view pickle, const std::vector<std::string>& storages);

// A state dict with one storage per tensor. The types must be F64, F32, F16, BF16, I64 or U8.
std::string StateDictBytes(const std::vector<RawTensor>& tensors);

}  // namespace moeserve::testing
