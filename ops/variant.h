#pragma once

#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/override.h"

/// How an operator chooses among its kernels, a table of `Variant`s. `choose` returns the one forced by name
/// (ForceVariant; the flag --variant), or else, of those that can run the problem, the one with the least
/// `compared` time; ties go to the earlier. The choice depends only on the problem, the GPU's properties and
/// the build; the GPU is a value (`Gpu`), so tests can choose for GPUs that are not present.

namespace tessera::ops {

/// GPU models that cost models are fitted for.
enum class GpuModel : uint8_t { h100, h200 };

/// What a choice may know of a GPU.
struct Gpu {
  std::string_view name;
  int major = 0, minor = 0;         // compute capability
  int multiprocessors = 0;          // how many SMs kernels plan for
  GpuModel model = GpuModel::h200;  // whose costs apply
  bool fitted = false;              // whether they were measured on this GPU model, or it is the nearest

  /// Refers to the name of the first argument, which must outlive the value.
  Gpu(const DeviceInfo& info, int multiprocessors);
  /// The GPU, with the SMs that this thread plans for.
  explicit Gpu(Device device);
};

/// What a variant is expected to take.
struct Estimate {
  double seconds = 0;         // by its cost model; 0 if it has none
  double compared = seconds;  // what `choose` compares: `seconds`, unless the model is known to be off

  /// Measured to be the fastest wherever it can run: always chosen.
  static constexpr Estimate preferred() { return {0, 0}; }
  /// No cost model: chosen only if no preferred variant and none with a model can run.
  static constexpr Estimate otherwise() { return {0, std::numeric_limits<double>::max()}; }
  /// Measured to be slower here than another variant, whatever its model says: last choice.
  static constexpr Estimate slower(double seconds = 0) {
    return {seconds, std::numeric_limits<double>::infinity()};
  }
};

/// What a variant needs and a problem lacks, such as "bf16 or f16"; empty if it can run. A literal is not
/// copied: it is a reason that a call in an eager loop may drop.
class Reason {
 public:
  Reason() = default;
  Reason(const char* literal) : literal_(literal) {}                  // NOLINT: a reason is written as a text
  Reason(std::string text) : literal_(""), text_(std::move(text)) {}  // NOLINT
  bool empty() const { return *literal_ == 0 && text_.empty(); }
  std::string str() const { return text_.empty() ? literal_ : text_; }

 private:
  const char* literal_ = "";
  std::string text_;
};

/// One way to compute a problem. `Launch`: the type of the function that runs it.
template <class Problem, class Launch = void(const Problem&)>
struct Variant {
  const char* name;
  Reason (*lacks)(const Problem& problem, const Gpu& gpu);
  /// Asked only if it lacks nothing.
  Estimate (*estimate)(const Problem& problem, const Gpu& gpu);
  Launch* launch;
  /// Variants (null-terminated names) of another operator that it is built from: forcing one of them selects
  /// this variant, which passes the name on (PassVariant).
  const char* const* parts = nullptr;
};

/// Runs the operator `op` on the variant of that name for the lifetime of the scope, on this thread. A
/// variant that cannot run a problem throws "<op>: variant <name> needs ...". Nested scopes override.
class ForceVariant {
 public:
  ForceVariant(std::string op, std::string variant) : op_(std::move(op)), variant_(std::move(variant)) {}
  /// Null if no variant is forced.
  static const std::string* forced(std::string_view op) { return innermost_ ? find(op) : nullptr; }

 private:
  static const std::string* find(std::string_view op);
  static inline constinit thread_local ForceVariant* innermost_ = nullptr;
  std::string op_, variant_;
  Override<ForceVariant*> scope_{innermost_, this};
};

/// Collects, for its lifetime and of this thread, a line for each choice that differs from those before:
/// problem, variant, its modelled time, and why not the others.
class ChoiceLog {
 public:
  static ChoiceLog* current() { return current_; }
  const std::vector<std::string>& lines() const { return lines_; }
  void add(std::string line);

 private:
  static inline constinit thread_local ChoiceLog* current_ = nullptr;
  std::vector<std::string> lines_;
  Override<ChoiceLog*> scope_{current_, this};
};

namespace variant_internal {

/// One that did not lack anything has an estimate.
struct Candidate {
  const char* name;
  std::string lacks;
  Estimate estimate;
};
bool has_part(const char* const* parts, std::string_view name);
[[noreturn]] void refuse(const char* op, const std::string& forced, const std::vector<Candidate>& allowed,
                         const std::vector<const char*>& names, const std::string& problem);
void log(const char* op, const std::string& problem, const std::vector<Candidate>& allowed, size_t chosen,
         bool forced, const Gpu& gpu);

}  // namespace variant_internal

/// The index of the variant that runs the problem. `op` null: no name is forced, and nothing is logged.
/// Throws if the forced name is unknown, or if no variant of that name can run the problem. Of a forced name,
/// a variant that bears it comes before those that are made of it. `describe_problem(problem)`, found by
/// argument-dependent lookup, says the problem in messages.
template <class Problem, class Launch, size_t kCount>
size_t choose_index(const char* op, const Variant<Problem, Launch> (&variants)[kCount],
                    const Problem& problem, const Gpu& gpu) {
  const std::string* const forced = op ? ForceVariant::forced(op) : nullptr;
  ChoiceLog* const log = op ? ChoiceLog::current() : nullptr;
  size_t chosen = kCount;
  double least = 0;
  bool bears_name = false;
  const auto look = [&](size_t index, auto&& seen) {
    const auto& variant = variants[index];
    const bool own = forced && *forced == variant.name;
    if (forced && !own && !variant_internal::has_part(variant.parts, *forced)) return;
    Reason lacks = variant.lacks(problem, gpu);
    Estimate estimate;
    if (lacks.empty()) {
      estimate = variant.estimate(problem, gpu);
      if (chosen == kCount || (own && !bears_name) || (estimate.compared < least && own == bears_name)) {
        chosen = index;
        least = estimate.compared;
        bears_name = own;
      }
    }
    seen(index, lacks, estimate);
  };
  if (!log) {
    for (size_t index = 0; index < kCount && (forced || chosen == kCount || least > 0); ++index)
      look(index, [](size_t, const Reason&, const Estimate&) {});
    if (chosen < kCount) return chosen;
  }
  std::vector<variant_internal::Candidate> allowed;
  std::vector<const char*> names;
  size_t place = 0;  // of the chosen one among those that are allowed
  chosen = kCount, bears_name = false;
  for (size_t index = 0; index < kCount; ++index) {
    names.push_back(variants[index].name);
    for (const char* const* part = variants[index].parts; part && *part; ++part) names.push_back(*part);
    look(index, [&](size_t seen, const Reason& lacks, const Estimate& estimate) {
      if (chosen == seen) place = allowed.size();
      allowed.push_back({variants[seen].name, lacks.str(), estimate});
    });
  }
  const std::string text = describe_problem(problem);
  if (chosen == kCount) variant_internal::refuse(op ? op : "", forced ? *forced : "", allowed, names, text);
  variant_internal::log(op, text, allowed, place, forced != nullptr, gpu);
  return chosen;
}

template <class Problem, class Launch, size_t kCount>
const Variant<Problem, Launch>& choose(const char* op, const Variant<Problem, Launch> (&variants)[kCount],
                                       const Problem& problem, const Gpu& gpu) {
  return variants[choose_index(op, variants, problem, gpu)];
}

/// The parts one after the other, for describe_problem.
template <class... Parts>
std::string text_of(const Parts&... parts) {
  MessageStream text;
  (text << ... << parts);
  return text.str();
}

/// For tables: a variant that can run everything, or one without a model.
template <class Problem>
Reason lacks_nothing(const Problem&, const Gpu&) {
  return {};
}
template <class Problem>
Estimate is_preferred(const Problem&, const Gpu&) {
  return Estimate::preferred();
}
template <class Problem>
Estimate is_otherwise(const Problem&, const Gpu&) {
  return Estimate::otherwise();
}

/// The names in a table, in its order.
template <class Problem, class Launch, size_t kCount>
std::vector<std::string> names_of(const Variant<Problem, Launch> (&variants)[kCount]) {
  std::vector<std::string> names;
  for (const auto& variant : variants) names.emplace_back(variant.name);
  return names;
}

}  // namespace tessera::ops
