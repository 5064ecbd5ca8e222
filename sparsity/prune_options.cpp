#include "sparsity/prune_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "ops/obs_columns/obs_columns.h"
#include "runtime/text.h"

namespace tessera::sparsity {
namespace {

constexpr const char* kScores[] = {"magnitude", "wanda", "ria", "sparsegpt"};
constexpr const char* kUpdates[] = {"none", "obs", "admm"};
constexpr const char* kAllocations[] = {"uniform", "owl"};

nlohmann::ordered_json to_json(const PruneGates& gates) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::object();
  for (const auto& [name, gate] : gates.gates.gates) {
    if (gate.kind == ops::Gate::Kind::top_k)
      layers[name] = {{"top_k", gate.keep}};
    else
      layers[name] = gate.threshold;
  }
  return {{"fingerprint", gates.gates.fingerprint},
          {"scale", gates.gates.column_norms ? "column-norm" : "one"},
          {"prefill", gates.prefill},
          {"layers", std::move(layers)}};
}

void check_share(const std::string& what, double share) {
  check(share > 0 && share < 1, "prune: ", what, " ", share, "; expected more than 0 and less than 1");
}

}  // namespace

const char* name_of(Score score) {
  return kScores[size_t(score)];
}
const char* name_of(Update update) {
  return kUpdates[size_t(update)];
}
const char* name_of(Allocation allocation) {
  return kAllocations[size_t(allocation)];
}
Score parse_score(std::string_view text) {
  return parse_name<Score>("prune: there is no score", kScores, text);
}
Update parse_update(std::string_view text) {
  return parse_name<Update>("prune: there is no update", kUpdates, text);
}
Allocation parse_allocation(std::string_view text) {
  return parse_name<Allocation>("prune: there is no allocation", kAllocations, text);
}

std::string Pattern::name() const {
  return structured() ? std::to_string(zeros) + ":" + std::to_string(group) : "unstructured";
}

Pattern parse_pattern(std::string_view text) {
  if (text == "unstructured") return {};
  Pattern pattern;
  const char* const end = text.data() + text.size();
  const auto [colon, first] = std::from_chars(text.data(), end, pattern.zeros);
  const bool has_colon = first == std::errc{} && colon != end && *colon == ':';
  const auto [stop, second] = std::from_chars(has_colon ? colon + 1 : end, end, pattern.group);
  check(has_colon && second == std::errc{} && stop == end, "prune: the pattern '", text,
        "'; expected unstructured, or n:m as in 2:4");
  check(0 < pattern.zeros && pattern.zeros < pattern.group && pattern.group <= 1024, "prune: the pattern ",
        text, " drops ", pattern.zeros, " of each ", pattern.group,
        " weights; expected n:m with 0 < n < m and m at most 1024");
  return pattern;
}

ops::KeepWithin PruneOptions::keep_within() const {
  if (within) return *within;
  return score == Score::magnitude || score == Score::sparsegpt ? ops::KeepWithin::matrix
                                                                : ops::KeepWithin::row;
}

std::string PruneOptions::method() const {
  const std::string score_name = name_of(score) + std::string(variant ? " variant" : "");
  if (score == Score::sparsegpt && update == Update::obs) return (gates ? "gate-aware " : "") + score_name;
  if (score == Score::sparsegpt && update == Update::none) return "sparsegpt + none";
  return update == Update::none ? score_name
                                : (gates ? "gate-aware " : "") + score_name + " + " + name_of(update);
}

void PruneOptions::validate() const {
  check_share("a sparsity of", sparsity);
  for (const auto& [name, share] : assigned)
    check(share >= 0 && share < 1, "prune: a sparsity of ", share, " for '", name,
          "'; expected 0 or more and less than 1");
  if (pattern.structured()) {
    const double share = double(pattern.zeros) / double(pattern.group);
    check(0 < pattern.zeros && pattern.zeros < pattern.group, "prune: the pattern ", pattern.name(),
          "; expected n:m with 0 < n < m");
    check(std::abs(sparsity - share) < 1e-9, "prune: the pattern ", pattern.name(), " drops a share of ",
          share, ", not ", sparsity, "; leave the sparsity out, or give that");
    check(allocation == Allocation::uniform && assigned.empty(), "prune: the pattern ", pattern.name(),
          " fixes the sparsity of every matrix; an allocation needs the unstructured pattern");
    check(!within, "prune: the pattern ", pattern.name(), " drops within groups; leave out --within");
    check(!variant, "prune: Wanda's variant is unstructured; leave out the pattern ", pattern.name());
  }
  check(!within || *within != ops::KeepWithin::group, "prune: --within group is what a pattern n:m means");
  check(!variant || (score == Score::wanda && update == Update::none && !within),
        "prune: --variant belongs to the score wanda without an update, and drops within rows; leave out "
        "--update and --within");
  check(first_block >= 0 && (last_block == -1 || last_block > first_block), "prune: blocks ", first_block,
        " to ", last_block, "; expected the second to be larger than the first");
  check(batch >= 1, "prune: ", batch, " samples at a time; expected 1 or more");
  check(std::isfinite(ria_power) && ria_power >= 0, "prune: a power of ", ria_power,
        " for ria; expected 0 or more");
  const bool owl = allocation == Allocation::owl;
  check(!owl || owl_outlier > 0, "prune: outliers of ", owl_outlier, " times the mean; expected more than 0");
  check(!owl || (owl_range >= 0 && sparsity - owl_range > 0 && sparsity + owl_range < 1),
        "prune: owl with a range of ", owl_range, " around a sparsity of ", sparsity,
        "; expected all of it to lie between 0 and 1");
  check(damping > 0 && std::isfinite(damping), "prune: a damping of ", damping, "; expected more than 0");
  check(block_size >= 1, "prune: blocks of ", block_size, " columns; expected 1 or more");
  const bool by_blocks = update == Update::obs || score == Score::sparsegpt;
  check(!pattern.structured() || !by_blocks || block_size % pattern.group == 0, "prune: blocks of ",
        block_size, " columns cut groups of ", pattern.group, "; give a multiple of ", pattern.group,
        " (--block-size), such as ", std::max<int64_t>(1, block_size / pattern.group) * pattern.group);
  check(bits == 0 || (bits >= 2 && bits <= 8), "prune: rounding to ", bits,
        " bits; expected 2 to 8, or 0 for none");
  check(bits == 0 || update == Update::obs, "prune: rounding to bits is part of the update obs; choose that");
  check(iterations >= 1, "prune: ", iterations, " iterations; expected 1 or more");
  check(!gates || update != Update::none,
        "prune: gates ask for weights that make up for the inputs they leave out; choose the update obs or "
        "admm, or the score sparsegpt with its own");
  check(!gates || !sequential,
        "prune: gates and --true-sequential: dense and gated inputs are collected from whole blocks; leave "
        "out one of the two");
  check(!gates || (gates->prefill >= 0 && gates->prefill <= 1), "prune: gates for a share of ",
        gates ? gates->prefill : 0, " of a text; expected 0 to 1");
  check(rho > 0 && std::isfinite(rho), "prune: a penalty rho of ", rho, "; expected more than 0");
}

void PruneOptions::check_gpu(const std::string& matrix, int64_t columns) const {
  if (update != Update::obs) return;
  const int64_t block = std::min(block_size, columns);
  check(block <= ops::kMostObsColumns, "prune: the update obs of ", matrix, " in blocks of ", block,
        " columns; a GPU takes at most ", ops::kMostObsColumns,
        ": give fewer (--block-size; a pattern n:m divides them), or prune on the CPU (--device cpu)");
}

nlohmann::ordered_json to_json(const PruneOptions& options) {
  nlohmann::ordered_json json = {
      {"score", name_of(options.score)},
      {"update", name_of(options.update)},
      {"pattern", options.pattern.name()},
      {"sparsity", options.sparsity},
      {"within", options.pattern.structured() ? "group" : name_of(options.keep_within())},
      {"allocation", name_of(options.allocation)},
      {"only", options.only},
      {"except", options.except},
      {"first_block", options.first_block},
      {"last_block", options.last_block},
      {"invert", options.invert},
      {"variant", options.variant},
      {"ria_power", options.ria_power},
      {"owl_outlier", options.owl_outlier},
      {"owl_range", options.owl_range},
      {"damping", options.damping},
      {"block_size", options.block_size},
      {"bits", options.bits},
      {"sequential", options.sequential},
      {"iterations", options.iterations},
      {"rho", options.rho},
      {"batch_size", options.batch}};
  if (options.gates) json["gates"] = to_json(*options.gates);
  json["assigned"] = nlohmann::ordered_json::array();
  for (const auto& [name, share] : options.assigned) json["assigned"].push_back({name, share});
  json["dtype"] =
      options.dtype ? nlohmann::ordered_json(tessera::name_of(*options.dtype)) : nlohmann::ordered_json();
  return json;
}

}  // namespace tessera::sparsity
