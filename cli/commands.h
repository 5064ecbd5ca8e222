#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/generation/sample.h"
#include "ops/op.h"
#include "runtime/device.h"
#include "tensor/dtype.h"
#include "tensor/precision.h"

/// The subcommands. Each adds itself to the parser; its callback stores what to run, so that nothing is
/// touched (no file, no GPU) before the whole command line has been understood.

namespace tessera::cli {

/// What the chosen subcommand will do; returns the exit code.
using Action = std::function<int()>;

void add_doctor(CLI::App& app, Action& action);
void add_train(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_op(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_study(CLI::App& app, Action& action);
void add_tokenizer(CLI::App& app, Action& action);
void add_data(CLI::App& app, Action& action);
void add_convert(CLI::App& app, Action& action);
void add_prune(CLI::App& app, Action& action);
void add_calibrate(CLI::App& app, Action& action);
void add_sparsify(CLI::App& app, Action& action);
void add_sparsity(CLI::App& app, Action& action);
/// Subcommands of `sparsity`.
void add_sparsity_activations(CLI::App& group, Action& action);
void add_launch(CLI::App& app, Action& action);

/// The command line was understood by the parser, but says something wrong: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Makes parsing strict: a flag that is repeated, a switch with a value, an empty value, and a flag where a
/// value should be are errors.
void be_strict(CLI::App& app);

/// Adds --text, files that are read, and --any-bytes.
void add_text_files(CLI::App& command, std::vector<std::string>& files, bool& any_bytes);
/// Adds a required tokenizer, of what io::Tokenizer::load takes: the flag or the positional `name`.
CLI::Option* add_tokenizer_path(CLI::App& command, const char* name, std::string& path);

/// Adds --any-bytes, the way around io::check_text. Returns the option, for its group.
CLI::Option* add_any_bytes(CLI::App& command, bool& any_bytes);
/// Prints how many bytes of the texts were not UTF-8, if any.
void tell_invalid(uint64_t invalid, uint64_t bytes);
/// All of standard input.
std::string standard_input();
/// The text of a file as io::read_text reads it, or of standard input for "" and "-", which is checked alike
/// and may be empty; with tell_invalid.
std::string read_given_text(const std::string& file, uint64_t limit, bool any_bytes);

/// Message of the InterruptGuard in commands that write their result only at the end.
extern const char* const kGivingUp;
/// For a command that has written its results, before it returns: a signal that comes while the process frees
/// its memory does not change the exit status, since there is nothing left to stop or to resume.
void ignore_signals();

/// Refuses nan and inf, which the number parser would take.
extern const CLI::Validator kFinite;
/// Whole numbers below 2^63 in plain decimal digits. The number parser would take 010 as eight, 0x10 as
/// sixteen and what is too large as the largest.
extern const CLI::Validator kDecimal;
/// Such a number from `least` to `most`: one message, where two validators joined by & would give two.
CLI::Validator whole(int64_t least, int64_t most);
/// Numbers above 0, up to 1.
extern const CLI::Validator kProbability;
/// Numbers from `least` to `most`; the message shows these in few digits.
CLI::Validator between(double least, double most);
/// Marks a text that may be empty. Everywhere else "" is refused: it is mostly a shell variable that was not
/// set, and as a folder it would mean the root.
extern const CLI::Validator kMayBeEmpty;
/// Accepts cpu, cuda and cuda:<index>, without looking for the GPU.
extern const CLI::Validator kDeviceName;
/// Adds --device; "" is the first GPU, else the CPU.
CLI::Option* add_device(CLI::App& command, std::string& device);

/// Adds --temperature, --top-k and --top-p; returns the first.
CLI::Option* add_sampling(CLI::App& command, ops::Sampling& sampling);
/// Throws UsageError for --top-k and --top-p if the most likely token is taken (a temperature of 0).
void check_sampling(const CLI::App& command, const ops::Sampling& sampling);

/// "M=10000,N=1000" to sizes. Throws UsageError on anything else, on a size below 0 and on a name given
/// twice.
std::map<std::string, int64_t> parse_dims(const std::string& text);
/// "a,b,c"; no empty parts, and none twice.
std::vector<std::string> split_list(const std::string& text, const char* what);
/// "on,off" to {true, false}.
std::vector<bool> parse_switches(const std::string& text, const char* what);
std::vector<DType> parse_dtypes(const std::string& text, const char* what = "--dtype");
std::vector<Precision> parse_precisions(const std::string& text, const char* what);

/// The flag --precision of commands that train or plan to: f32, tf32, bf16 or f16; not given, it is
/// default_precision of the device, which is known only later.
class PrecisionFlag {
 public:
  void add_to(CLI::App& command);
  Precision on(Device device) const { return text_.empty() ? default_precision(device) : *given(); }
  std::optional<Precision> given() const;

 private:
  std::string text_;
};
/// Help of the flag of commands that measure several precisions.
inline constexpr const char* kPrecisionsHelp =
    "f32,tf32,bf16,f16; default: bf16 on a GPU (compute capability 8.0), else f32";
/// The same of commands that measure operators.
inline constexpr const char* kOperatorPrecisionsHelp =
    "f64 (CPU), f32,tf32,bf16,f16; default: bf16 on a GPU (compute capability 8.0), else f32";
/// "key=value" texts by the operator's attributes. Throws UsageError, also for a key given twice.
ops::Attrs parse_attrs(const ops::OpSpec& op, const std::vector<std::string>& texts);
/// Takes from the TOML file the flags of the subcommand that the command line neither gives nor excludes; ""
/// is no file. Throws UsageError for a file that is not TOML, an unknown flag, a section, a repeated flag,
/// two flags that exclude each other and a bad value.
void apply_config(CLI::App& command, const std::string& path);
/// Throws UsageError unless the flags were given; for those that a file of apply_config may hold.
void require_flags(const CLI::App& command, std::initializer_list<const char*> flags);
/// Throws unless lines could be appended to a file there: known before the work, not after it.
void check_writable(const std::string& path);
/// Throws unless files could be put into a folder there, new or not: the same for io::AtomicFolder.
void check_folder_writable(const std::string& path);
/// Throws if the file to write is one of those that are read, or a file that is there in a folder that is
/// read (a model, a run): the input would be gone. Empty names are skipped.
void check_not_input(const std::string& out, const std::vector<std::string>& inputs);
/// The values of these flags, as far as the command has them and they are given.
std::vector<std::string> values_given(const CLI::App& command, const std::vector<const char*>& flags);
/// Throws UsageError if two of these files, each with its flag, are one. Empty names are skipped.
void check_different(const std::vector<std::pair<const char*, std::string>>& outputs);
/// Throws UsageError "FLAG why" for the first of these flags that is given: it would have no effect.
void refuse_given(const CLI::App& command, const std::vector<const char*>& flags, const std::string& why);
/// Throws unless a whole file could be put there, as a new one or in place of a regular one (io::AtomicFile).
void check_replaceable(const std::string& path);

}  // namespace tessera::cli
