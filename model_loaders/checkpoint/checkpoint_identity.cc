#include "model_loaders/checkpoint/checkpoint_identity.h"

#include <system_error>

#include "base/error_text.h"

namespace moeserve {

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

}  // namespace moeserve
