#include "tests/model_loaders/torch_bytes.h"

#include <map>

#include "base/error_text.h"

namespace moeserve::testing {
namespace {

// Computes the checksum bit by bit, as the standard defines it.
uint32_t Crc(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

}  // namespace

std::string Number(uint64_t number, int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i, number >>= 8) bytes.push_back(static_cast<char>(number));
  return bytes;
}

std::string PickleString(std::string_view text) {
  return Concat('X', Number(text.size(), 4), text);
}

std::string PickleInt(int64_t number) {
  return Concat("\x8a\x08", Number(static_cast<uint64_t>(number), 8));
}

std::string PickleGlobal(std::string_view module, std::string_view name) {
  return Concat('c', module, '\n', name, '\n');
}

std::string PickleTuple(const std::vector<std::string>& items) {
  std::string bytes = "(";
  for (const std::string& item : items) bytes += item;
  return bytes + "t";
}

std::string PickleTensor(std::string_view storage_class, std::string_view key, int64_t elements,
                         int64_t first, const std::vector<int64_t>& shape,
                         const std::vector<int64_t>& strides) {
  const auto integers = [](const std::vector<int64_t>& numbers) {
    std::vector<std::string> items;
    for (const int64_t number : numbers) items.push_back(PickleInt(number));
    return PickleTuple(items);
  };
  const std::string storage =
      PickleTuple({PickleString("storage"), PickleGlobal("torch", storage_class), PickleString(key),
                   PickleString("cpu"), PickleInt(elements)}) +
      "Q";
  const std::string hooks = PickleGlobal("collections", "OrderedDict") + ")R";
  return PickleGlobal("torch._utils", "_rebuild_tensor_v2") +
         PickleTuple(
             {storage, PickleInt(first), integers(shape), integers(strides), "\x89", hooks}) +
         "R";
}

std::string PickleDict(const std::vector<PickleItem>& items) {
  std::string bytes = "\x80\x02}(";
  for (const PickleItem& item : items) bytes += PickleString(item.name) + item.value;
  return bytes + "u.";
}

std::string ZipBytes(const std::vector<ZipPart>& parts, const ZipStyle& style) {
  std::string bytes, directory;
  for (const ZipPart& part : parts) {
    const uint64_t size = part.bytes.size();
    const std::string flags = Number(style.descriptors ? 8 : 0, 2);
    const std::string sums = Number(Crc(part.bytes), 4) + Number(size, 4) + Number(size, 4);
    const std::string begin = Number(0, 2) + flags + Number(0, 2) + Number(0, 4);
    const std::string header =
        Concat("PK\x03\x04", begin, style.descriptors ? std::string(12, '\0') : sums,
               Number(part.name.size(), 2), Number(5, 2), part.name,
               // an extra field pads the header, as PyTorch does
               "FB", Number(1, 2), "Z");
    directory += Concat("PK\x01\x02", Number(0, 2), begin, sums, Number(part.name.size(), 2),
                        Number(0, 12), Number(bytes.size(), 4), part.name);
    bytes += header + part.bytes;
    if (style.descriptors) bytes += "PK\x07\x08" + sums;
  }
  const uint64_t begin = bytes.size();
  const uint64_t end = begin + directory.size();
  bytes += directory;
  if (style.zip64) {
    bytes +=
        Concat("PK\x06\x06", Number(44, 8), Number(45, 4), Number(0, 8), Number(parts.size(), 8),
               Number(parts.size(), 8), Number(directory.size(), 8), Number(begin, 8));
    bytes += Concat("PK\x06\x07", Number(0, 4), Number(end, 8), Number(1, 4));
  }
  return bytes + Concat("PK\x05\x06", Number(0, 4), Number(parts.size(), 2),
                        Number(parts.size(), 2), Number(directory.size(), 4), Number(begin, 4),
                        Number(0, 2));
}

std::string TorchBytes(std::string_view pickle, const std::vector<std::string>& storages) {
  std::vector<ZipPart> parts = {{"archive/data.pkl", std::string(pickle)},
                                {"archive/byteorder", "little"}};
  for (size_t i = 0; i < storages.size(); ++i) {
    parts.push_back({Concat("archive/data/", i), storages[i]});
  }
  parts.push_back({"archive/version", "3\n"});
  return ZipBytes(parts);
}

std::string StateDictBytes(const std::vector<RawTensor>& tensors) {
  static const std::map<std::string, std::string> classes = {
      {"F64", "DoubleStorage"},    {"F32", "FloatStorage"}, {"F16", "HalfStorage"},
      {"BF16", "BFloat16Storage"}, {"I64", "LongStorage"},  {"U8", "ByteStorage"}};
  std::vector<PickleItem> items;
  std::vector<std::string> storages;
  for (const RawTensor& tensor : tensors) {
    std::vector<int64_t> strides(tensor.shape.size());
    int64_t elements = 1;
    for (size_t i = strides.size(); i > 0; --i) {
      strides[i - 1] = elements;
      elements *= tensor.shape[i - 1];
    }
    items.push_back({tensor.name, PickleTensor(classes.at(tensor.dtype), Concat(storages.size()),
                                               elements, 0, tensor.shape, strides)});
    storages.push_back(tensor.bytes);
  }
  return TorchBytes(PickleDict(items), storages);
}

}  // namespace moeserve::testing
