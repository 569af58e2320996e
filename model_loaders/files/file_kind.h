// Recognises files that are not what their names promise, and files outside of the model's folder.
#pragma once

#include <filesystem>
#include <string_view>

#include "absl/status/status.h"

namespace moeserve {

// What the reader of a file can read, beside texts and its own format.
enum class OwnFormat { kOther, kGguf, kZip };

// The number of bytes that CheckFileKind() looks at.
inline constexpr size_t kFileKindBytes = 512;

// Returns InvalidArgument if a file that begins with `head` is a pointer of Git LFS or git-annex,
// an HTML page, a GGUF file or an archive in the place of another file. The message says what to
// do. `name` is the file's name; what begins with a tag is no fault in a chat template (*.jinja).
absl::Status CheckFileKind(std::string_view name, std::string_view head,
                           OwnFormat own = OwnFormat::kOther);

// Returns PermissionDenied unless the file at `path`, with all symbolic links resolved, lies in
// `directory`, or, if `directory` is in a snapshot of Hugging Face's cache
// (models--ORG--NAME/snapshots/REVISION), in the folder models--ORG--NAME/blobs. A file that does
// not exist is no error.
absl::Status CheckInsideModel(const std::filesystem::path& directory,
                              const std::filesystem::path& path);

}  // namespace moeserve
