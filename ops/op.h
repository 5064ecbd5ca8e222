#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ops/draw.h"
#include "runtime/rng.h"
#include "tensor/tensor.h"

/// One declaration of an operator serves all uses: `tessera op` runs it on tensors from a file, the tests
/// check every case of it against the f64 reference and central differences, `tessera bench op` times it,
/// and `tessera bench sweep` checks and times random problems of it. An operator's directory defines
/// `std::vector<OpSpec> <folder>_specs()`; ops/registry.cpp lists them.

namespace tessera::ops {

/// Value of an attribute: a number, a flag or a string.
using AttrValue = std::variant<bool, int64_t, double, std::string>;
class Attrs {
 public:
  Attrs() = default;
  Attrs(std::initializer_list<std::pair<const std::string, AttrValue>> values) : values_(values) {}
  bool flag(const std::string& name) const { return get<bool>(name); }
  int64_t integer(const std::string& name) const { return get<int64_t>(name); }
  /// An integer that names a dimension. Throws if no tensor could have so many.
  int dimension(const std::string& name) const;
  /// Of a word that lists integers: "2,3,-1"; the empty word lists nothing.
  std::vector<int64_t> integers(const std::string& name) const;
  double number(const std::string& name) const { return get<double>(name); }
  const std::string& word(const std::string& name) const { return get<std::string>(name); }
  /// The operator that messages name.
  void set_op(std::string name) { op_ = std::move(name); }
  void set(const std::string& name, AttrValue value) { values_.insert_or_assign(name, std::move(value)); }
  bool has(const std::string& name) const { return values_.contains(name); }
  const std::map<std::string, AttrValue>& values() const { return values_; }

 private:
  template <class T>
  const T& get(const std::string& name) const;
  std::string op_;
  std::map<std::string, AttrValue> values_;
};

/// Named sizes of a problem: {"B", 4}, {"M", 10000}, ...
using Dims = std::map<std::string, int64_t>;
/// Whether a size that is a flag, such as "residual", is given and is not 0.
bool is_set(const Dims& dims, const std::string& name);

/// The dtypes of indices: i64, in which checks and benchmarks make them, and i32.
std::vector<DType> index_dtypes();
/// The dtypes of sums over many elements (ops/sum_dtype.h): f32, and f64 of an operator that runs in f64.
std::vector<DType> sum_dtypes();

struct InputSpec {
  std::string name;
  std::string shape;  // for people: "[..., K]"
  bool optional = false;
  bool differentiable = true;  // false: indices, masks, targets
  /// Empty: the operator's floating dtype. Else those that the input may have: indices, bytes, packed bits
  /// (i32 words), f8. Every run has it in the first of them, that of the f64 oracle too, and it has no
  /// gradient.
  std::vector<DType> dtypes = {};
  /// The inputs that it can be made from (OpSpec::derive): a compressed weight from a dense one, a mask from
  /// a tensor.
  std::vector<std::string> from = {};

  bool has_gradient() const { return differentiable && dtypes.empty(); }
  bool is_derived() const { return !from.empty(); }
};
struct AttrSpec {
  std::string name;
  AttrValue fallback;  // its type is the attribute's type
  std::string help;
  std::vector<std::string> choices = {};  // of a word
  /// A word attribute and the only one of its values with which this attribute has an effect; "": it always
  /// has.
  std::pair<std::string, std::string> only_with = {};
};
struct OutputSpec {
  std::string name;
  std::string shape;
  bool differentiable = true;  // false: statistics such as the log-sum-exp
  /// Empty: the operator's floating dtype. Else those that the output may have; one alone is its dtype in
  /// every run, that of the f64 oracle too.
  std::vector<DType> dtypes = {};
  bool counts_results = false;  // of computed values: which of them round to 0 depends on the precision
};

/// How an input of a case is filled.
enum class Fill : uint8_t {
  normal,       // N(0, 1)
  positive,     // exp(N(0, 1)/2): bounded away from 0
  away_from_0,  // N(0, 1) pushed 0.1 away from 0: for kinks and poles
  index,        // integers in [0, high)
  bits,   // packed bits, i32 [..., ceil(high / 32)]: bit j of word w is column 32 w + j < high, the tail 0
  absent  // an optional input left out
};
/// One input of a problem. For an input that is derived from others only the shape is used, if it is
/// given.
struct InputCase {
  Shape shape;
  Fill fill = Fill::normal;
  int64_t high = 0;     // of Fill::index and Fill::bits
  int64_t ignore = -1;  // Fill::index: about one in eight becomes this value, if it is not -1
  double scale = 1.0;
  double density = 1.0;              // share of the floating elements, or of the packed bits, that are not 0
  std::vector<int64_t> values = {};  // of an index input whose values obey rules: they, in row-major order
};

/// One concrete problem.
struct Problem {
  std::vector<InputCase> inputs;                       // in the order of OpSpec::inputs
  double forward_flops = 0, backward_flops = 0;        // on the real work, a multiply-add is two
  double forward_elements = 0, backward_elements = 0;  // floating elements read and written at least once
  double forward_bytes = 0, backward_bytes = 0;        // next to them: what is of another dtype
};

/// How the inputs of a case lie in memory: as Tensor::empty makes them, as views with gaps (every second row
/// of a wider tensor, offset by one element), or transposed in memory.
enum class Placement : uint8_t { pitched, strided, transposed };

struct Case {
  Dims dims;
  Attrs attrs = {};
  Placement placement = Placement::pitched;
  bool gradcheck =
      true;  // false: too large for central differences; its gradient is checked against the oracle
};

/// The generator that OpSpec::run draws from. A declared operator is a function of its inputs and attributes:
/// its streams are the first ones of the seed, in every run and in every replay of a graph.
class SeededRng {
 public:
  explicit SeededRng(int64_t seed, int streams = 1);
  Rng& rng() { return rng_; }

 private:
  Rng rng_;
  std::vector<RandomStream> streams_;
  RandomReplay replay_;
};

struct OpSpec {
  std::string name;
  std::string summary;  // one line, with the formula
  std::vector<InputSpec> inputs;
  std::vector<AttrSpec> attrs = {};
  std::vector<OutputSpec> outputs;
  /// The operator's floating dtypes. One without floating inputs lists one dtype, that of its main input: its
  /// cases run once, and its benchmarks are recorded as that.
  std::vector<DType> cpu_dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16};
  std::vector<DType> cuda_dtypes = {DType::f32, DType::bf16, DType::f16};
  /// Runs the operator as a user would (recorded if a tape lives). Undefined tensors stand for absent inputs.
  /// Every attribute is present.
  std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs, const Attrs& attrs)> run;
  /// Makes every input with InputSpec::from, and returns them in their order; in `inputs` they are undefined.
  /// It is called with tensors on the CPU in the case's dtype, which all runs share: those on a GPU and the
  /// oracle's are copies of its results. They lie in memory as it made them.
  std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs, const Attrs& attrs)> derive = {};
  /// Throws unless inputs with InputSpec::from, given instead of made, are such as derive() could have made.
  /// For operators that could otherwise read outside them. Called with all inputs on the CPU.
  std::function<void(const std::vector<Tensor>& inputs, const Attrs& attrs)> check_given = {};
  /// The integer attribute that seeds the operator's random numbers (SeededRng); empty: it draws none.
  std::string seed = {};
  std::function<Problem(const Dims& dims, const Attrs& attrs)> problem;
  std::vector<Case> cases;             // checked: odd, prime, one, zero, tile ± 1, strided
  std::vector<Case> benches = {};      // timed by default, on a CPU with sizes cut in half until they fit, or
  std::vector<Case> cpu_benches = {};  // these, if such sizes would contradict attributes
  /// Draws a random problem for `tessera bench sweep`; its budget refuses what is too large. None: not swept.
  std::function<Case(Draw&)> sweep = {};
  /// Whether the f32 kernels on a GPU take every problem that others do: a sweep checks large ones by them.
  bool f32_checks = true;
  /// False: on a GPU the host waits for an answer (whether a factor exists), so no graph can capture it.
  bool captures = true;
  /// Whether f32 operands are multiplied as f32_math() says; then every case runs in TF32 as well.
  bool honours_f32_math = false;
  /// The factor k of the tolerance max|y-ref| <= k * max|baseline-ref| + 2 ulp * max|ref|, and the reason if
  /// it is not 2.
  double tolerance_factor = 2;
  double tolerance_factor_f32 =
      2;  // in f32, where the order of a long sum shows and no final rounding hides it
  std::string tolerance_reason = {};
  /// Names of its variants on CUDA (ops/variant.h); empty if there is one.
  std::vector<std::string> variants = {};
  /// The dtypes that each of them computes, on CUDA; empty, or an empty entry: all of cuda_dtypes.
  std::vector<std::vector<DType>> variant_dtypes = {};
  /// Ulp that the CPU may be off in bf16 and f16 beyond the two of cpu_tolerance (ops/verify.h), and the
  /// rounding points that they are for.
  double cpu_extra_ulp = 0;
  std::string cpu_extra_reason = {};
};

/// Every operator, in the order of ops/registry.cpp. Built once.
const std::vector<OpSpec>& all_ops();
/// Throws, naming the nearest, if there is none of that name.
const OpSpec& find_op(std::string_view name);

/// `given` completed with the fallbacks; throws, naming the nearest, for an attribute that the operator does
/// not have, a wrong type (an integer is accepted where a number is expected) or a word that is not among the
/// choices.
Attrs complete(const OpSpec& op, const Attrs& given);
/// Throws if an attribute is given that has no effect with the others (AttrSpec::only_with).
void check_used(const OpSpec& op, const Attrs& given);
/// Reads "key=value" by the attribute's type; throws with what was expected.
void set_attr(const OpSpec& op, Attrs& attrs, std::string_view key_value);

/// Whether an input has the operator's floating dtype.
bool takes_floating(const OpSpec& op);
/// Checks inputs as `tessera op` does before running: count, presence, dtypes that agree, one device. Inputs
/// that can be made from others are given together, or left out together where what they are made from is
/// given.
void check_inputs(const OpSpec& op, const std::vector<Tensor>& inputs);
/// Makes the inputs that can be made from others, if they are left out, on the device of those; checks them
/// if they are given.
void derive_inputs(const OpSpec& op, std::vector<Tensor>& inputs, const Attrs& attrs);
/// Throws unless a run gave what `op` declares: the number of outputs and their dtypes.
void check_outputs(const OpSpec& op, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs);

/// For OpSpec::problem: throws, beginning with `op`, if the values that an input lists (InputCase::values)
/// would be more than 2^28. They are made before a tensor is, so no allocator refuses a mistyped size.
void check_listed(const char* op, double values);
/// The values of input `number` of a problem, from `seed`: f64 on the CPU.
Tensor input_values(const InputCase& input, uint64_t seed, size_t number);
/// Fills the inputs of a problem from `seed`, rounded to `dtype`, on `device`, and derives the others. The
/// same values for every dtype and device but for the rounding.
std::vector<Tensor> make_inputs(const OpSpec& op, const Problem& problem, const Attrs& attrs,
                                Placement placement, DType dtype, Device device, uint64_t seed);
/// The oracle's inputs: those on the CPU that make_inputs() gave, in f64 where they have the operator's
/// floating dtype, and placed as they are.
std::vector<Tensor> oracle_inputs(const OpSpec& op, const std::vector<Tensor>& inputs, Placement placement);

}  // namespace tessera::ops
