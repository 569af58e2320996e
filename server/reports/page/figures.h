// The figures of a report page. Each function returns HTML, or "" if the page lacks the data.
#pragma once

#include <string>

#include "server/reports/page/report_page.h"

namespace moeserve::server {

// A chart with its caption, in the width of a column, or of the page if `wide`. `caption` is HTML.
std::string Figure(const std::string& chart, const std::string& caption, bool wide = false);

std::string ActivationFigure(const ReportPage& page);           // MH-MoE, fig. 1 and 5
std::string LoadFigures(const ReportPage& page);                // MoA, fig. 3 and 4
std::string ActivatedParametersFigure(const ReportPage& page);  // HMoE, fig. 5 and table 2
std::string ExpertSizeFigures(const ReportPage& page);          // HMoE, fig. 3, 6 and 8
std::string DiversityFigures(const ReportPage& page);           // MH-MoE, fig. 7 and 8
std::string WordFigures(const ReportPage& page);                // HMoE, fig. 10
std::string SimilarityFigures(const ReportPage& page);          // HMoE, fig. 9 and 13
std::string RepresentationFigures(const ReportPage& page);      // X-MoE, fig. 2

}  // namespace moeserve::server
