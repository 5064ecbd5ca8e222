#include "cli/variant_flag.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tessera::cli {

void add_variant(CLI::App& command, std::string& variant) {
  command.add_option("--variant", variant,
                     "Kernel variant (CUDA), from tessera op --list; default: chosen by the cost model");
}

void check_variant(const ops::OpSpec& op, const std::string& variant, bool cpu) {
  if (variant.empty()) return;
  if (std::ranges::find(op.variants, variant) == op.variants.end())
    throw UsageError(
        fmt::format("--variant \"{}\": {} has {}", variant, op.name,
                    op.variants.empty() ? "no variants" : fmt::format("{}", fmt::join(op.variants, ", "))));
  if (cpu)
    throw UsageError(fmt::format("--variant {}: the CPU has no kernel variants; add --device cuda", variant));
}

std::string choice_lines(const std::vector<std::string>& choices) {
  std::string text;
  for (const std::string& line : choices) text += line + "\n";
  return text.empty() ? "nothing to choose: one kernel for each step, or a CPU\n" : text;
}

}  // namespace tessera::cli
