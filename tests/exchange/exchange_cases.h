// Tests of an exchange that every rank runs at the same time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/exchange/exchange.h"

namespace moeserve {

struct ExchangeCase {
  std::string name;
  // Reports failures to GoogleTest.
  std::function<void(Exchange&)> run;
};

// Cases without losses. Each leaves the exchange idle.
const std::vector<ExchangeCase>& ExchangeCases();

// Gathers parts that have more than 2^31 bytes together and, with two ranks, each alone.
void GatherLargeParts(Exchange& exchange);
// An all-to-all with a part of more than 2^31 bytes.
void ExchangeLargeParts(Exchange& exchange);

}  // namespace moeserve
