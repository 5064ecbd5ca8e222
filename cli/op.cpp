#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "autograd/tape.h"
#include "cli/commands.h"
#include "cli/variant_flag.h"
#include "io/safetensors.h"
#include "ops/op.h"
#include "runtime/f32_math.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

struct OpArgs {
  std::string name, in, out, device = "cpu";
  std::vector<std::string> set;
  bool list = false, json = false, grad = false, explain = false;
  std::string variant, f32_math = "ieee";
};

nlohmann::json attr_json(const ops::AttrValue& value) {
  return std::visit([](const auto& v) { return nlohmann::json(v); }, value);
}

nlohmann::json name_list(const std::vector<DType>& dtypes) {
  nlohmann::json list = nlohmann::json::array();
  for (const DType dtype : dtypes) list.push_back(name_of(dtype));
  return list;
}

/// Empty dtypes and made_from: the operator's floating dtype, and an input that is always given.
nlohmann::json describe_op(const ops::OpSpec& op) {
  nlohmann::json out = {
      {"name", op.name}, {"summary", op.summary}, {"variants", op.variants}, {"seed", op.seed}};
  for (const auto& input : op.inputs)
    out["inputs"].push_back({{"name", input.name},
                             {"shape", input.shape},
                             {"optional", input.optional},
                             {"differentiable", input.has_gradient()},
                             {"index", input.dtypes == ops::index_dtypes()},
                             {"dtypes", name_list(input.dtypes)},
                             {"made_from", input.from}});
  out["attributes"] = nlohmann::json::array();
  for (const auto& attr : op.attrs)
    out["attributes"].push_back({{"name", attr.name},
                                 {"default", attr_json(attr.fallback)},
                                 {"help", attr.help},
                                 {"choices", attr.choices}});
  for (const auto& output : op.outputs)
    out["outputs"].push_back({{"name", output.name},
                              {"shape", output.shape},
                              {"differentiable", output.differentiable},
                              {"dtypes", name_list(output.dtypes)}});
  out["dtypes"] = {{"cpu", name_list(op.cpu_dtypes)}, {"cuda", name_list(op.cuda_dtypes)}};
  return out;
}

std::string names(const std::vector<DType>& dtypes, const char* between = " ") {
  std::string text;
  for (const DType dtype : dtypes) text += std::string(text.empty() ? "" : between) + name_of(dtype);
  return text;
}

/// What follows the shape of an input in the list.
std::string remarks(const ops::InputSpec& input) {
  std::string text;
  if (!input.dtypes.empty()) text += "  " + names(input.dtypes, " or ");
  if (input.optional) text += "  optional";
  if (input.is_derived()) text += fmt::format("  derived from {} unless given", fmt::join(input.from, ", "));
  return text;
}

int list_ops(bool json) {
  if (json) {
    nlohmann::json all = nlohmann::json::array();
    for (const ops::OpSpec& op : ops::all_ops()) all.push_back(describe_op(op));
    fmt::print("{}\n", all.dump(2));
    return 0;
  }
  for (const ops::OpSpec& op : ops::all_ops()) {
    fmt::print("{}: {}\n", op.name, op.summary);
    for (const auto& input : op.inputs)
      fmt::print("  in   {:<14} {}{}\n", input.name, input.shape, remarks(input));
    for (const auto& attr : op.attrs) {
      std::string choices;
      for (const std::string& choice : attr.choices)
        choices += (choices.empty() ? "  one of " : ", ") + choice;
      fmt::print("  set  {:<14} {}  default {}{}\n", attr.name, attr.help, attr_json(attr.fallback).dump(),
                 choices);
    }
    for (const auto& output : op.outputs)
      fmt::print("  out  {:<14} {}{}\n", output.name, output.shape,
                 output.dtypes.size() == 1 ? "  " + names(output.dtypes) : "");
    if (!op.variants.empty()) fmt::print("  variants: {}\n", fmt::join(op.variants, ", "));
    fmt::print("  dtypes: cpu {}; cuda {}\n", names(op.cpu_dtypes), names(op.cuda_dtypes));
  }
  return 0;
}

/// Takes the named tensors out of the file's; throws if one is missing or not an input.
class NamedTensors {
 public:
  NamedTensors(std::string path, Device device) : path_(std::move(path)) {
    for (auto& [name, tensor] : io::load_safetensors(path_, device)) left_.emplace(name, tensor);
  }
  Tensor take(const std::string& name) {
    const auto found = left_.find(name);
    if (found == left_.end()) return Tensor();
    Tensor tensor = found->second;
    left_.erase(found);
    return tensor;
  }
  void expect_empty(const ops::OpSpec& op, const std::vector<std::string>& wanted) const {
    if (left_.empty()) return;
    const std::string& name = left_.begin()->first;
    const std::string near = nearest(name, wanted);
    const bool gradient = std::ranges::any_of(
        op.outputs, [&](const ops::OutputSpec& output) { return name == "d_" + output.name; });
    fail_at(Site::here(), path_, ": tensor \"", io::shown(name), "\" is not an input of ", op.name,
            gradient       ? "; gradients go with --grad, of outputs that have one"
            : near.empty() ? ""
                           : "; did you mean \"" + near + "\"?");
  }

 private:
  std::string path_;
  std::map<std::string, Tensor> left_;
};

/// The operator that the command line names, once all that it says is checked, before a file or a GPU is
/// touched.
const ops::OpSpec& checked_op(const OpArgs& args) {
  if (args.name.empty()) throw UsageError("op: name an operator, or use --list");
  const ops::OpSpec* found = nullptr;
  try {
    found = &ops::find_op(args.name);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  const ops::OpSpec& op = *found;
  if (args.in.empty() || args.out.empty()) throw UsageError("op " + op.name + ": --in and --out are needed");
  check_not_input(args.out, {args.in});
  check_variant(op, args.variant, args.device == "cpu");
  if (args.grad && std::ranges::none_of(op.outputs, &ops::OutputSpec::differentiable))
    throw UsageError("op " + op.name + ": it has no gradient; run without --grad");
  return op;
}

/// What the file holds for an operator.
struct OpTensors {
  std::vector<Tensor> inputs,
      output_grads;  // output_grads: with --grad only; undefined where the file has none
};

OpTensors read_tensors(const OpArgs& args, const ops::OpSpec& op, const ops::Attrs& attrs, Device device) {
  NamedTensors file(args.in, device);
  OpTensors tensors;
  std::vector<std::string> wanted;
  for (const auto& input : op.inputs) {
    tensors.inputs.push_back(file.take(input.name));
    wanted.push_back(input.name);
  }
  if (args.grad) {
    for (const auto& output : op.outputs) {
      tensors.output_grads.push_back(output.differentiable ? file.take("d_" + output.name) : Tensor());
      if (output.differentiable) wanted.push_back("d_" + output.name);
    }
  }
  file.expect_empty(op, wanted);
  ops::check_inputs(op, tensors.inputs);
  ops::derive_inputs(op, tensors.inputs, attrs);
  return tensors;
}

/// Runs backward from the outputs whose gradients the file has.
void run_backward(const OpArgs& args, const ops::OpSpec& op, Tape& tape, const std::vector<Tensor>& outputs,
                  const std::vector<Tensor>& output_grads) {
  std::vector<Tensor> on_tape, grads;
  MessageStream absent;  // the gradients that could have been given
  for (size_t n = 0; n < outputs.size(); ++n) {
    if (!op.outputs[n].differentiable || !requires_grad(outputs[n])) continue;
    if (!output_grads[n].defined()) {
      absent << (absent.tellp() > 0 ? ", or " : "") << "\"d_" << op.outputs[n].name << "\" "
             << outputs[n].dtype() << outputs[n].shape();
      continue;
    }
    const Tensor& d = output_grads[n];
    check(d.shape() == outputs[n].shape(), args.in, ": \"d_", op.outputs[n].name, "\" is ", describe(d),
          "; the output is ", describe(outputs[n]));
    check(is_floating(d.dtype()), args.in, ": \"d_", op.outputs[n].name, "\" is ", d.dtype(), "; expected ",
          outputs[n].dtype());
    on_tape.push_back(outputs[n]);
    grads.push_back(d.to(outputs[n].dtype()));
  }
  check(!on_tape.empty() || absent.tellp() == 0, args.in, ": --grad needs ", absent.str());
  check(!on_tape.empty(), op.name, ": no output has a gradient; run without --grad");
  tape.backward(on_tape, grads);
}

int run_op(const OpArgs& args) {
  const ops::OpSpec& op = checked_op(args);
  const ops::Attrs given = parse_attrs(op, args.set);
  try {
    ops::check_used(op, given);
  } catch (const Error& error) {
    throw UsageError(std::string("--set: ") + error.what());
  }
  const Device device = Device::parse(args.device);
  check_replaceable(args.out);
  const ops::Attrs attrs = ops::complete(op, given);
  auto [inputs, output_grads] = read_tensors(args, op, attrs, device);

  std::optional<ops::ForceVariant> force;
  if (!args.variant.empty()) force.emplace(op.name, args.variant);
  std::optional<ops::ChoiceLog> choices;
  if (args.explain) choices.emplace();
  const F32MathScope math(args.f32_math == "tf32" ? F32Math::tf32 : F32Math::ieee);

  std::vector<std::pair<std::string, Tensor>> results;
  std::vector<Tensor> outputs;
  if (args.grad) {
    for (size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].defined() && op.inputs[i].has_gradient() && is_floating(inputs[i].dtype()))
        require_grad(inputs[i]);
    Tape tape;
    outputs = op.run(inputs, attrs);
    run_backward(args, op, tape, outputs, output_grads);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!requires_grad(inputs[i])) continue;
      const Tensor d_input = grad(inputs[i]);
      results.emplace_back(
          "d_" + op.inputs[i].name,
          d_input.defined() ? d_input : Tensor::zeros(inputs[i].shape(), inputs[i].dtype(), device));
    }
  } else {
    outputs = op.run(inputs, attrs);
  }
  for (size_t n = 0; n < outputs.size(); ++n) results.emplace_back(op.outputs[n].name, outputs[n].detach());
  io::save_safetensors(args.out, results);
  if (choices) fmt::print("{}", choice_lines(choices->lines()));
  return 0;
}

}  // namespace

void add_op(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("op", "List the operators, or run one on tensors from a safetensors file");
  auto args = std::make_shared<OpArgs>();
  auto* name = command->add_option("name", args->name, "Operator");
  auto* list =
      command->add_flag("--list", args->list, "List every operator: inputs, attributes, outputs, dtypes");
  command->add_flag("--json", args->json, "With --list: machine-readable")->needs(list);
  command->add_option("--in", args->in, "Safetensors file: the inputs by name, and d_<output> with --grad");
  command->add_option("--out", args->out,
                      "Safetensors file to write: the outputs by name (and d_<input> with --grad)");
  command->add_option("--set", args->set, "Attribute, key=value; may be repeated")->allow_extra_args(false);
  command->add_flag("--grad", args->grad, "Also run backward");
  command->add_option("--device", args->device, "cpu, cuda or cuda:<index>")->check(kDeviceName);
  command
      ->add_option("--f32-math", args->f32_math,
                   "Math of f32 GEMMs and attention: ieee or tf32 (operands rounded to TF32)")
      ->check(CLI::IsMember({"ieee", "tf32"}));
  add_variant(*command, args->variant);
  command->add_flag("--explain", args->explain, kExplainHelp);
  name->excludes(list);
  for (const char* other :
       {"--in", "--out", "--set", "--grad", "--device", "--variant", "--explain", "--f32-math"})
    list->excludes(command->get_option(other));
  command->callback(
      [&action, args] { action = [args] { return args->list ? list_ops(args->json) : run_op(*args); }; });
}

}  // namespace tessera::cli
