// The entry point of the test programs, each of which has the tests of one folder:
//
//   PROGRAM [FILE...] [--list_files] [options of GoogleTest]
//
// runs the tests in the source files with these names (linear_test for linear_test.cc), by default
// in all. --list_files prints the names. Fails if no test is selected.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace {

std::string FileName(const testing::TestInfo& test) {
  std::string_view path = test.file();
  path.remove_prefix(path.rfind('/') + 1);
  return std::string(path.substr(0, path.rfind('.')));
}

// Returns the full names of the tests of every file.
std::map<std::string, std::vector<std::string>> TestsByFile() {
  std::map<std::string, std::vector<std::string>> tests;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      tests[FileName(test)].push_back(std::string(suite.name()) + "." + test.name());
    }
  }
  return tests;
}

// Excludes the tests of other files from GoogleTest's filter.
void SelectFiles(const std::map<std::string, std::vector<std::string>>& tests,
                 const std::vector<std::string>& files) {
  std::string filter = GTEST_FLAG_GET(filter);
  bool negative = filter.find('-') != std::string::npos;
  for (const auto& [file, names] : tests) {
    if (std::find(files.begin(), files.end(), file) != files.end()) continue;
    for (const std::string& name : names) {
      filter += (negative ? ":" : "-") + name;
      negative = true;
    }
  }
  GTEST_FLAG_SET(filter, filter);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto tests = TestsByFile();
  std::vector<std::string> files(argv + 1, argv + argc);
  if (files == std::vector<std::string>{"--list_files"}) {
    for (const auto& [file, names] : tests) std::printf("%s\n", file.c_str());
    return 0;
  }
  for (const std::string& file : files) {
    if (tests.contains(file)) continue;
    std::fprintf(stderr, "there are no tests of %s; --list_files prints all files\n", file.c_str());
    return 2;
  }
  if (!files.empty()) SelectFiles(tests, files);
  const int failed = RUN_ALL_TESTS();
  const bool some = testing::UnitTest::GetInstance()->test_to_run_count() > 0;
  // One of several processes that share the tests may have none.
  if (some || GTEST_FLAG_GET(list_tests) || std::getenv("GTEST_TOTAL_SHARDS") != nullptr) {
    return failed;
  }
  std::fprintf(stderr, "no test is selected\n");
  return 1;
}
