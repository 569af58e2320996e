#include "server/reports/page/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr std::array<std::string_view, 10> kCategories = {
    "#2f6db3", "#d9772b", "#3b8f4e", "#b8373c", "#7d5aa8",
    "#8a6044", "#c2639f", "#6b6f76", "#9a9a28", "#2c9bab"};

std::string Coordinate(double v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", v);
  std::string out = text;
  if (out.ends_with(".0")) out.resize(out.size() - 2);
  return out;
}

// Returns the colour of a share of the scale, from white to dark blue.
std::string ScaleColor(double share) {
  struct Rgb {
    double r, g, b;
  };
  constexpr std::array<Rgb, 4> kStops = {
      {{247, 249, 252}, {168, 201, 230}, {62, 128, 189}, {12, 44, 96}}};
  const double at = std::clamp(share, 0.0, 1.0) * (kStops.size() - 1);
  const size_t i = std::min(static_cast<size_t>(at), kStops.size() - 2);
  const double t = at - static_cast<double>(i);
  const auto mix = [&](double a, double b) {
    return static_cast<int>(std::lround(a + t * (b - a)));
  };
  char text[16];
  std::snprintf(text, sizeof(text), "#%02x%02x%02x", mix(kStops[i].r, kStops[i + 1].r),
                mix(kStops[i].g, kStops[i + 1].g), mix(kStops[i].b, kStops[i + 1].b));
  return text;
}

std::string DrawnRect(double x, double y, double width, double height, std::string_view fill,
                      const std::string& title = "") {
  const std::string begin =
      Concat("<rect x=\"", Coordinate(x), "\" y=\"", Coordinate(y), "\" width=\"",
             Coordinate(width), "\" height=\"", Coordinate(height), "\" fill=\"", fill, "\"");
  return title.empty() ? begin + "/>" : begin + "><title>" + EscapeHtml(title) + "</title></rect>";
}

// `anchor` is start, middle or end.
std::string DrawnText(double x, double y, std::string_view anchor, const std::string& text,
                      const char* extra = "") {
  return Concat("<text x=\"", Coordinate(x), "\" y=\"", Coordinate(y), "\" text-anchor=\"", anchor,
                "\"", extra, ">", EscapeHtml(text), "</text>");
}

std::string DrawnLine(double x1, double y1, double x2, double y2, std::string_view color) {
  return Concat("<line x1=\"", Coordinate(x1), "\" y1=\"", Coordinate(y1), "\" x2=\"",
                Coordinate(x2), "\" y2=\"", Coordinate(y2), "\" stroke=\"", color, "\"/>");
}

std::string WholeChart(double width, double height, const std::string& content) {
  return Concat("<svg viewBox=\"0 0 ", Coordinate(width), ' ', Coordinate(height),
                "\" role=\"img\">", content, "</svg>\n");
}

std::string ShowValue(double value, bool percent) {
  return percent ? ShowPercent(value) : ShowNumber(value);
}

// Returns about how wide a text is.
double TextWidth(const std::string& text) {
  const auto letters =
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
  return 5.9 * static_cast<double>(letters);
}

double WidestOf(const std::vector<std::string>& texts) {
  double widest = 0.0;
  for (const std::string& text : texts) widest = std::max(widest, TextWidth(text));
  return widest;
}

// Returns how many labels to step over so that labels of this width do not touch.
size_t LabelStep(double widest, double distance) {
  return static_cast<size_t>(std::max(1.0, std::ceil((widest + 4.0) / std::max(distance, 0.1))));
}

// Returns a round number that is at least `value`.
double RoundScale(double value) {
  if (!(value > 0.0)) return 1.0;
  const double power = std::pow(10.0, std::floor(std::log10(value)));
  for (const double step : {1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0}) {
    if (value <= step * power * (1.0 + 1e-9)) return step * power;
  }
  return 10.0 * power;
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '\n':
        out += "\u23ce";  // the sign of a return key
        break;
      case '\t':
        out += "\u21e5";
        break;
      default:
        // Other control characters are not allowed in HTML.
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += "\u2423";
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string ShowNumber(double value) {
  if (!std::isfinite(value)) return "\u2013";
  char text[32];
  const double size = std::abs(value);
  if (size >= 1e9) {
    std::snprintf(text, sizeof(text), "%.3gG", value / 1e9);
  } else if (size >= 1e6) {
    std::snprintf(text, sizeof(text), "%.3gM", value / 1e6);
  } else if (size >= 1e4) {
    std::snprintf(text, sizeof(text), "%.3gk", value / 1e3);
  } else if (size >= 1e3) {
    std::snprintf(text, sizeof(text), "%.0f", value);
  } else {
    std::snprintf(text, sizeof(text), "%.3g", value);
  }
  return text;
}

std::string ShowPercent(double share) {
  if (!std::isfinite(share)) return "\u2013";
  char text[32];
  const double percent = 100.0 * share;
  const bool whole = percent >= 9.95 || percent == 0.0;
  std::snprintf(text, sizeof(text), whole ? "%.0f\u00a0%%" : "%.1f\u00a0%%", percent);
  return text;
}

std::string_view CategoryColor(size_t category) {
  return kCategories[category % kCategories.size()];
}

std::string Draw(const HeatMap& map) {
  const size_t rows = map.rows.size(), columns = map.columns.size();
  if (rows == 0 || columns == 0) return "";
  const double left = WidestOf(map.rows) + (map.row_title.empty() ? 8.0 : 24.0);
  constexpr double kLegend = 16.0;
  const double top = map.column_title.empty() ? 18.0 : 34.0;
  const double cell =
      std::min(map.width / 9.0, (map.width - left - 4.0) / static_cast<double>(columns));
  const double height = map.square ? cell : std::clamp(cell, 12.0, 20.0);
  const double bottom = top + height * static_cast<double>(rows);
  double high = 0.0;
  for (const double v : map.values) {
    if (std::isfinite(v)) high = std::max(high, v);
  }
  const double scale = high > 0.0 ? 1.0 / high : 0.0;
  const double right = left + cell * static_cast<double>(columns);
  std::string out =
      DrawnText((left + right) / 2, 11, "middle", map.column_title, " class=\"axis\"");
  const size_t step = LabelStep(WidestOf(map.columns), cell);
  for (size_t c = 0; c < columns; c += step) {
    out +=
        DrawnText(left + cell * (static_cast<double>(c) + 0.5), top - 5, "middle", map.columns[c]);
  }
  if (!map.row_title.empty()) {
    const std::string y = Coordinate((top + bottom) / 2);
    out += DrawnText(10, (top + bottom) / 2, "middle", map.row_title,
                     Concat(" class=\"axis\" transform=\"rotate(-90 10 ", y, ")\"").c_str());
  }
  const size_t row_step = LabelStep(8.0, height);
  for (size_t r = 0; r < rows; ++r) {
    const double y = top + height * static_cast<double>(r);
    if (r % row_step == 0) out += DrawnText(left - 5, y + height / 2 + 4, "end", map.rows[r]);
    for (size_t c = 0; c < columns; ++c) {
      const double v = map.values[r * columns + c];
      const double x = left + cell * static_cast<double>(c);
      if (!std::isfinite(v)) continue;
      const std::string title =
          map.titles ? Concat(map.rows[r], ", ", map.columns[c], ": ", ShowValue(v, map.percent))
                     : "";
      out += DrawnRect(x, y, cell - (cell > 6 ? 1 : 0.3), height - (height > 6 ? 1 : 0.3),
                       ScaleColor(v * scale), title);
      if (!map.numbers || cell < 25.0) continue;
      const std::string shown = map.percent ? Concat(std::lround(100.0 * v)) : ShowNumber(v);
      if (TextWidth(shown) > cell + 2.0) continue;
      out += DrawnText(x + cell / 2 - 0.5, y + height / 2 + 3.5, "middle", shown,
                       v * scale > 0.55 ? " class=\"on\"" : " class=\"in\"");
    }
  }
  constexpr int kSteps = 24;
  const double legend = std::min(120.0, std::max(60.0, right - left - 80.0));
  const double y = bottom + 8;
  out += DrawnText(left - 5, y + 9, "end", "0");
  for (int i = 0; i < kSteps; ++i) {
    out += DrawnRect(left + legend * i / kSteps, y, legend / kSteps + 0.3, 10,
                     ScaleColor((i + 0.5) / kSteps));
  }
  out += DrawnText(left + legend + 5, y + 9, "start", ShowValue(high, map.percent));
  return WholeChart(map.width, y + kLegend, out);
}

std::string Draw(const BarChart& chart) {
  const size_t labels = chart.labels.size();
  if (labels == 0 || chart.series.empty()) return "";
  double high = 0.0;
  for (const BarChart::Series& series : chart.series) {
    for (const double v : series.values) {
      if (std::isfinite(v)) high = std::max(high, v);
    }
  }
  high = RoundScale(high);
  const double left = 10.0 + std::max(TextWidth(ShowValue(high, chart.percent)),
                                      TextWidth(ShowValue(high / 2, chart.percent)));
  const bool legend = chart.series.size() > 1;
  const double top = legend ? 24.0 : 8.0, below = chart.title.empty() ? 20.0 : 36.0;
  const double bottom = chart.height - below, right = chart.width - 4.0;
  std::string out;
  double at = left;
  for (size_t s = 0; s < chart.series.size() && legend; ++s) {
    out += DrawnRect(at, 5, 9, 9, CategoryColor(s)) +
           DrawnText(at + 13, 13, "start", chart.series[s].name);
    at += 30.0 + TextWidth(chart.series[s].name);
  }
  for (const double share : {0.0, 0.5, 1.0}) {
    const double y = bottom - share * (bottom - top);
    out += DrawnLine(left, y, right, y, share == 0.0 ? "#667" : "#dde1e6");
    out += DrawnText(left - 5, y + 4, "end", ShowValue(high * share, chart.percent));
  }
  const double group = (right - left) / static_cast<double>(labels);
  const double bar = group * 0.78 / static_cast<double>(chart.series.size());
  const size_t step = LabelStep(WidestOf(chart.labels), group);
  for (size_t i = 0; i < labels; ++i) {
    const double x = left + group * (static_cast<double>(i) + 0.11);
    for (size_t s = 0; s < chart.series.size(); ++s) {
      const double v = chart.series[s].values[i];
      if (!std::isfinite(v)) continue;
      const double height = v / high * (bottom - top);
      out += DrawnRect(x + bar * static_cast<double>(s), bottom - height, std::max(bar - 0.6, 0.4),
                       height, CategoryColor(s),
                       Concat(chart.labels[i], ": ", ShowValue(v, chart.percent)));
    }
    if (i % step == 0) {
      out += DrawnText(left + group * (static_cast<double>(i) + 0.5), bottom + 13, "middle",
                       chart.labels[i]);
    }
  }
  if (!chart.title.empty()) {
    out +=
        DrawnText((left + right) / 2, chart.height - 6, "middle", chart.title, " class=\"axis\"");
  }
  return WholeChart(chart.width, chart.height, out);
}

std::string Draw(const ScatterPlot& plot) {
  if (plot.x.empty()) return "";
  const auto [x0, x1] = std::minmax_element(plot.x.begin(), plot.x.end());
  const auto [y0, y1] = std::minmax_element(plot.y.begin(), plot.y.end());
  const double width = std::max(*x1 - *x0, std::numeric_limits<double>::min());
  const double height = std::max(*y1 - *y0, std::numeric_limits<double>::min());
  std::string out =
      Concat("<rect x=\"0.5\" y=\"0.5\" width=\"", Coordinate(plot.width - 1), "\" height=\"",
             Coordinate(plot.height - 1), "\" fill=\"none\" stroke=\"#c9ced6\"/>");
  for (size_t i = 0; i < plot.x.size(); ++i) {
    const double x = 8 + (plot.x[i] - *x0) / width * (plot.width - 16);
    const double y = 8 + (plot.y[i] - *y0) / height * (plot.height - 16);
    out +=
        Concat("<circle cx=\"", Coordinate(x), "\" cy=\"", Coordinate(y), "\" r=\"2.2\" fill=\"",
               CategoryColor(static_cast<size_t>(plot.category[i])), "\" fill-opacity=\"0.65\"/>");
  }
  return WholeChart(plot.width, plot.height, out);
}

}  // namespace moeserve::server
