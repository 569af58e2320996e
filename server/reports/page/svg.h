// Charts as SVG, for pages that need no script. All texts are escaped. Lengths are in user units;
// the browser scales a chart to the width of its figure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moeserve::server {

// Returns `text` with &, <, >, ", ' and control characters replaced, so that it can stand in HTML
// and in attributes.
std::string EscapeHtml(std::string_view text);

// Returns a number with about three digits, and k, M or G for thousands: "0.125", "12.3k".
std::string ShowNumber(double value);
// Returns a share as "12.5 %", with a space that does not break.
std::string ShowPercent(double share);

// Returns one of ten colours of categories.
std::string_view CategoryColor(size_t category);

// A table of coloured cells, the darker the larger the value.
struct HeatMap {
  double width = 360;  // of the whole chart
  std::vector<std::string> rows, columns;
  std::vector<double> values;  // [rows][columns]; NaN leaves a cell empty
  std::string row_title, column_title;
  bool numbers = false;  // writes the values into the cells
  bool square = false;   // makes the cells squares
  bool percent = false;  // shows values as percentages
  bool titles = false;   // each cell tells its value when it is pointed at
};
std::string Draw(const HeatMap& map);

// Bars beside each other; of several series, the bars of one label are adjacent.
struct BarChart {
  double width = 360;
  double height = 150;
  std::vector<std::string> labels;
  struct Series {
    std::string name;
    std::vector<double> values;  // [labels], not negative; NaN leaves a gap
  };
  std::vector<Series> series;
  std::string title;  // of the labels, below the chart
  bool percent = false;
};
std::string Draw(const BarChart& chart);

// Points in the plane, coloured by category.
struct ScatterPlot {
  double width = 360;
  double height = 270;
  std::vector<double> x, y;
  std::vector<int> category;
};
std::string Draw(const ScatterPlot& plot);

}  // namespace moeserve::server
