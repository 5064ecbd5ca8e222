#include "sparsity/split.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "runtime/error.h"

namespace tessera::sparsity {
namespace {

void check_share(const char* what, double share) {
  check(share >= 0 && share <= 1, what, " is ", share, "; expected 0 to 1");
}

double rounded(double value) {
  return std::round(value * 1e9) / 1e9;
}

double share_of(std::string_view text, const std::string& whole, const char* what) {
  double value = -1;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(code == std::errc{} && end == text.data() + text.size() && value >= 0 && value < 1, what, ": \"",
        whole, "\": expected sparsities of 0 or more and less than 1, as 0.5, 0.3,0.5 or 0.1:0.8:0.05");
  return value;
}

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

}  // namespace

double total_sparsity(double weights, double activations) {
  check_share("the weight sparsity", weights), check_share("the activation sparsity", activations);
  return 1 - (1 - weights) * (1 - activations);
}

double activations_for(double total, double weights) {
  check(total < 1 && weights >= 0 && weights < total, "a total sparsity of ", total,
        " and a weight sparsity of ", weights,
        ": expected 0 <= weights < total < 1, so that something is left for the gates");
  return 1 - (1 - total) / (1 - weights);
}

std::string split_text(double weights, double activations) {
  return fmt::format("{:.4g} = 1 - (1 - {:.4g} of the weights)(1 - {:.4g} of the inputs)",
                     total_sparsity(weights, activations), weights, activations);
}

std::vector<double> parse_shares(const std::string& text, const char* what) {
  constexpr double kMost = 1000;
  std::vector<double> shares;
  const std::vector<std::string> ends = parts_of(text, ':');
  if (ends.size() == 1) {
    for (const std::string& part : parts_of(text, ',')) shares.push_back(share_of(part, text, what));
    return shares;
  }
  check(ends.size() == 3, what, ": \"", text, "\": expected FIRST:LAST:STEP, as 0.1:0.8:0.05");
  const double first = share_of(ends[0], text, what), last = share_of(ends[1], text, what),
               step = share_of(ends[2], text, what);
  check(step > 0 && last >= first && (last - first) / step < kMost, what, ": \"", text,
        "\": expected an ascending range with a step above 0, and at most 1000 values");
  for (int64_t i = 0; rounded(first + double(i) * step) <= last + 1e-9; ++i)
    shares.push_back(rounded(first + double(i) * step));
  return shares;
}

}  // namespace tessera::sparsity
