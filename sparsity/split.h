#pragma once

#include <string>
#include <vector>

/// Two sparsities at once: a share s1 of the weights is zero, and gates leave out a share s2 of the inputs.
/// What is left to multiply is (1 - s1)(1 - s2), so the total is s = 1 - (1 - s1)(1 - s2).

namespace tessera::sparsity {

/// Both in [0, 1], or it throws.
double total_sparsity(double weights, double activations);
/// s2 = 1 - (1 - s) / (1 - s1). Throws unless 0 <= s1 < s < 1: at s = s1 nothing is left for gates.
double activations_for(double total, double weights);
/// "0.5 = 1 - (1 - 0.25 of the weights)(1 - 0.3333 of the inputs)"
std::string split_text(double weights, double activations);

/// "0.1:0.8:0.05" to 0.1, 0.15, ..., 0.8, each rounded to nine decimals; "0.3" and "0.3,0.5" to themselves.
/// Throws, beginning with `what`, for anything else, values outside [0, 1), more than 1,000 and descending
/// ranges.
std::vector<double> parse_shares(const std::string& text, const char* what);

}  // namespace tessera::sparsity
