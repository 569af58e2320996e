#include "kernels/cuda/tuning/choices.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/error_text.h"

namespace moeserve::cuda {
namespace {

constexpr std::string_view kFormat = "moeserve kernel choices 1";
constexpr int64_t kMostBytes = 4 << 20;

// Returns the text before the first `separator` and removes both from `text`; nullopt if there is
// no separator.
std::optional<std::string_view> Cut(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view part = text.substr(0, at);
  text.remove_prefix(at + 1);
  return part;
}

}  // namespace

int Choices::Site(const std::string& name, const Names& candidates) {
  const auto [at, added] = index_.try_emplace(name, static_cast<int>(sites_.size()));
  if (!added) return at->second;
  SiteChoices site{name, candidates, {}};
  if (const auto loaded = loaded_.find(name); loaded != loaded_.end()) {
    for (const auto& [rows, candidate] : loaded->second) {
      const auto found = std::find(candidates.begin(), candidates.end(), candidate);
      if (found == candidates.end()) continue;
      site.by_rows[rows] = static_cast<int>(found - candidates.begin());
    }
    loaded_.erase(loaded);
  }
  sites_.push_back(std::move(site));
  return at->second;
}

std::optional<int> Choices::Find(int site, int64_t rows) const {
  const std::map<int64_t, int>& by_rows = sites_[site].by_rows;
  if (by_rows.empty()) return std::nullopt;
  const auto above = by_rows.lower_bound(rows);
  if (above == by_rows.end()) return by_rows.rbegin()->second;
  if (above == by_rows.begin()) return above->second;
  const auto below = std::prev(above);
  // rows / below <= above / rows, without logarithms.
  const bool nearer_below = static_cast<double>(rows) * static_cast<double>(rows) <=
                            static_cast<double>(below->first) * static_cast<double>(above->first);
  return nearer_below ? below->second : above->second;
}

bool Choices::Has(int site, int64_t rows) const { return sites_[site].by_rows.contains(rows); }

void Choices::Choose(int site, int64_t rows, int candidate) {
  sites_[site].by_rows[rows] = candidate;
}

Status Choices::Load(const std::string& path, const std::string& key) {
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(Concat(path, ": ", error.message()));
  if (bytes > kMostBytes) {
    return absl::InvalidArgumentError(
        Concat(path, ": expected at most ", kMostBytes, " bytes, found ", bytes));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file) return absl::NotFoundError(Concat(path, ": cannot be read"));
  std::string_view left = text;
  if (Cut(left, '\n') != kFormat) {
    return absl::InvalidArgumentError(Concat(path, ": expected the first line \"", kFormat, "\""));
  }
  if (const auto found = Cut(left, '\n'); found != key) {
    return absl::FailedPreconditionError(Concat(path, ": the choices are those of \"",
                                                found.value_or(""), "\", not of \"", key, "\""));
  }
  std::map<std::string, std::map<int64_t, std::string>> loaded;
  for (int line = 3; !left.empty(); ++line) {
    std::optional<std::string_view> of_line = Cut(left, '\n');
    int64_t rows = 0;
    bool good = of_line.has_value();
    if (good) {
      const auto site = Cut(*of_line, '\t'), number = Cut(*of_line, '\t');
      good = site && number && !of_line->empty();
      if (good) {
        const auto [end, failed] =
            std::from_chars(number->data(), number->data() + number->size(), rows);
        good = failed == std::errc() && end == number->data() + number->size() && rows > 0;
      }
      if (good) loaded[std::string(*site)][rows] = std::string(*of_line);
    }
    if (!good) {
      return absl::InvalidArgumentError(
          Concat(path, ", line ", line, ": expected a site, a number of rows and a kernel"));
    }
  }
  loaded_ = std::move(loaded);
  return absl::OkStatus();
}

Status Choices::Save(const std::string& path, const std::string& key) const {
  std::string text = Concat(kFormat, "\n", key, "\n");
  for (const SiteChoices& site : sites_) {
    for (const auto& [rows, candidate] : site.by_rows) {
      text += Concat(site.name, "\t", rows, "\t", site.candidates[candidate], "\n");
    }
  }
  for (const auto& [name, choices] : loaded_) {
    for (const auto& [rows, candidate] : choices) {
      text += Concat(name, "\t", rows, "\t", candidate, "\n");
    }
  }
  const std::filesystem::path target(path);
  std::error_code error;
  if (target.has_parent_path()) std::filesystem::create_directories(target.parent_path(), error);
  const std::string temporary = Concat(path, ".", getpid(), ".new");
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.flush();
    if (!file) {
      std::filesystem::remove(temporary, error);
      return absl::UnavailableError(Concat(path, ": cannot be written"));
    }
  }
  std::filesystem::rename(temporary, target, error);
  if (error) {
    const std::string reason = error.message();
    std::filesystem::remove(temporary, error);
    return absl::UnavailableError(Concat(path, ": ", reason));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
