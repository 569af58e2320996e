#include "model_loaders/checkpoint/checkpoint_identity.h"

#include <algorithm>
#include <cstdint>
#include <system_error>

#include "base/error_text.h"
#include "base/sha256.h"

namespace moeserve {
namespace {

// The elements of a sample, which lie on one page or two.
constexpr int64_t kSampleElements = 16;

}  // namespace

std::string LastComponent(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path absolute = std::filesystem::absolute(path, error).lexically_normal();
  if (!absolute.has_filename()) absolute = absolute.parent_path();
  return absolute.filename().string();
}

CheckpointIdentity Identify(const std::filesystem::path& place, std::string_view config,
                            const WeightFiles& files) {
  std::error_code error;
  CheckpointIdentity identity;
  identity.place = std::filesystem::canonical(place, error).string();
  // Every text is preceded by its length, so that different lists of files have different states.
  identity.state = Concat(config.size(), ' ', config, files.files().size(), '\n');
  for (const auto& file : files.files()) {
    const FileStamp& stamp = file->stamp();
    identity.state += Concat(file->file_name().size(), ' ', file->file_name(), ' ', stamp.size, ' ',
                             stamp.modified_ns, ' ', stamp.changed_ns, '\n');
  }
  return identity;
}

Result<std::string> ContentDigest(std::string_view config, const WeightFiles& files) {
  std::string digest = Sha256(config);
  for (const WeightFiles::Location& tensor : files.tensors()) {
    const TensorEntry& entry = *tensor.entry;
    const int64_t elements = static_cast<int64_t>(entry.end - entry.begin) / SizeOf(entry.type);
    const int64_t count = std::min(kSampleElements, elements);
    std::string text = Concat(entry.name.size(), ' ', entry.name, ' ', Name(entry.type), ' ',
                              entry.converted_from);
    for (const int64_t size : entry.shape) text += Concat(' ', size);
    text += '\n';
    if (count > 0) {
      // The middle, because the beginning of a tensor may be padding.
      MOESERVE_ASSIGN_OR_RETURN(const TensorData sample,
                                tensor.file->ReadPart(entry, (elements - count) / 2, count));
      text += sample.bytes;
    }
    digest = Sha256(digest + text);
  }
  std::string digits;
  for (const char c : digest) {
    const auto byte = static_cast<unsigned char>(c);
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

}  // namespace moeserve
