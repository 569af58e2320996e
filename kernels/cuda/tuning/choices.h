// Which of several kernels with equal results computes an operation.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve::cuda {

// The choices of one device, build and driver. A site is an operation with the shapes that decide
// its time, such as the products of one kind of layer; its name is unique. For each site there are
// choices for some numbers of rows.
//
// Only one thread at a time may use an object.
class Choices {
 public:
  // The names of a site's candidates. The index of a name is the candidate's id.
  using Names = std::vector<std::string>;

  // Returns the index of the site, which is added if it is new. Choices that Load() read for it and
  // that name none of the candidates are dropped.
  int Site(const std::string& name, const Names& candidates);

  // Returns the candidate that was chosen for the number of rows nearest to `rows` (nearest
  // logarithm, the smaller number of two), or nullopt if nothing was chosen for the site.
  std::optional<int> Find(int site, int64_t rows) const;
  // Returns whether a candidate was chosen for exactly these rows.
  bool Has(int site, int64_t rows) const;
  void Choose(int site, int64_t rows, int candidate);

  // Adds the choices of a file that Save() wrote with the same `key`. NotFound if there is no such
  // file; FailedPrecondition if its key differs, InvalidArgument if it has another format or is
  // larger than a file of choices can be. Then nothing is added.
  Status Load(const std::string& path, const std::string& key);
  // Writes all choices, also those that Load() read for sites that do not exist. Creates the folder
  // of the file if necessary. Readers see the old file or the new one, never a part.
  Status Save(const std::string& path, const std::string& key) const;

 private:
  struct SiteChoices {
    std::string name;
    Names candidates;
    std::map<int64_t, int> by_rows;
  };

  std::vector<SiteChoices> sites_;
  std::map<std::string, int> index_;
  // What Load() read for sites that do not exist: name of the site, rows, name of the candidate.
  std::map<std::string, std::map<int64_t, std::string>> loaded_;
};

}  // namespace moeserve::cuda
