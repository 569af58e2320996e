// Parses the text of /metrics as a Prometheus scraper would.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

namespace moeserve::server::testing {

struct Exposition {
  std::map<std::string, std::string> types;  // by family name
  std::map<std::string, double> samples;     // by name with labels, as in the text

  bool HasSamples(const std::string& name) const {
    const auto first = samples.lower_bound(name);
    return first != samples.end() && first->first.starts_with(name);
  }
};

// Parses metrics. Fails the test for every rule of the text format that is violated.
inline Exposition ReadExposition(const std::string& text) {
  Exposition out;
  std::string family;
  double cumulative = 0.0;  // last cumulative count of the histogram series being read
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_FALSE(out.types.contains(family)) << "twice: " << family;
      EXPECT_LT(8 + family.size(), line.size()) << "no help: " << family;
    } else if (line.starts_with("# TYPE ")) {
      EXPECT_EQ(line.substr(7, line.find(' ', 7) - 7), family);
      out.types[family] = line.substr(line.rfind(' ') + 1);
      if (family.starts_with("moeserve_")) {
        EXPECT_EQ(line.ends_with(" counter"), family.ends_with("_total")) << family;
      }
    } else {
      const size_t space = line.rfind(' ');
      const std::string name = line.substr(0, space);
      const double value = std::stod(line.substr(space + 1));
      const std::string bare = name.substr(0, name.find('{'));
      if (out.types[family] == "histogram") {
        if (bare == family + "_bucket") {
          EXPECT_GE(value, cumulative) << name << " is less than the bucket before";
          cumulative = value;
        } else if (bare == family + "_count") {
          EXPECT_EQ(value, cumulative) << name;
          cumulative = 0.0;
        } else {
          EXPECT_EQ(bare, family + "_sum");
        }
      } else {
        EXPECT_EQ(bare, family);
      }
      EXPECT_TRUE(out.samples.emplace(name, value).second) << "twice: " << name;
    }
  }
  return out;
}

}  // namespace moeserve::server::testing
