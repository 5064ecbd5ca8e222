#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <iterator>

#include "cli/commands.h"
#include "io/file.h"
#include "io/text_file.h"
#include "report/progress.h"
#include "runtime/error.h"

namespace tessera::cli {

const char* const kGivingUp = "\ntessera: stopping; partial output is removed\n";

void ignore_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
}

CLI::Option* add_any_bytes(CLI::App& command, bool& any_bytes) {
  return command.add_flag("--any-bytes", any_bytes,
                          "Accept files that are not UTF-8; each invalid byte sequence becomes U+FFFD");
}

void add_text_files(CLI::App& command, std::vector<std::string>& files, bool& any_bytes) {
  command.add_option("--text", files, "Text files")->required();
  add_any_bytes(command, any_bytes);
}

CLI::Option* add_tokenizer_path(CLI::App& command, const char* name, std::string& path) {
  return command
      .add_option(name, path, "tokenizer.json, vocabulary file, .model file, or a directory with one")
      ->required();
}

void tell_invalid(uint64_t invalid, uint64_t bytes) {
  if (invalid > 0)
    report::tell(fmt::format(
        "tessera: warning: {} of {} bytes of the text are not UTF-8; each invalid sequence became U+FFFD\n",
        invalid, bytes));
}

std::string standard_input() {
  std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  check(!std::ferror(stdin), "read: the standard input: ", std::strerror(errno));  // as of a directory
  return text;
}

std::string read_given_text(const std::string& file, uint64_t limit, bool any_bytes) {
  std::string text;
  if (file.empty() || file == "-") {
    text = standard_input();
    io::check_text_unless(any_bytes, "the standard input", text);
  } else {
    text = io::read_text(file, limit, any_bytes);
  }
  tell_invalid(io::invalid_bytes(text), text.size());
  return text;
}

const CLI::Validator kFinite(
    [](std::string& text) {
      // The option's own conversion has accepted or will refuse the text; here only what is not finite
      // matters.
      double value = 0;
      const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (code != std::errc{} || end != text.data() + text.size()) return text + " is not a number";
      return std::isfinite(value) ? std::string() : text + " is not finite";
    },
    "FINITE", "finite");

const CLI::Validator kProbability(
    [](std::string& text) {
      double value = 0;
      std::from_chars(text.data(), text.data() + text.size(), value);
      return value > 0 && value <= 1 ? std::string() : text + ": expected more than 0 and at most 1";
    },
    "", "probability");

const CLI::Validator kDecimal(
    [](std::string& text) {
      const size_t sign = text.starts_with('-') ? 1 : 0;
      const bool digits =
          text.size() > sign && text.find_first_not_of("0123456789", sign) == std::string::npos;
      if (!digits || (text[sign] == '0' && text.size() > sign + 1))
        return text + " is not a whole number in decimal digits";
      int64_t value = 0;
      const bool fits = std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc{};
      return fits ? std::string() : text + " is too large";
    },
    "", "decimal");

CLI::Validator whole(int64_t least, int64_t most) {
  return CLI::Validator(
      [=](std::string& text) {
        const std::string wrong = kDecimal(text);
        return wrong.empty() ? CLI::Range(least, most)(text) : wrong;
      },
      "", "whole");
}

CLI::Validator between(double least, double most) {
  return CLI::Validator(
      [=](std::string& text) {
        double value = 0;
        std::from_chars(text.data(), text.data() + text.size(), value);
        return value >= least && value <= most
                   ? std::string()
                   : fmt::format("Value {} not in range {} to {}", text, least, most);
      },
      "", "between");
}

const CLI::Validator kMayBeEmpty([](std::string&) { return std::string(); }, "", "may be empty");

const CLI::Validator kDeviceName(
    [](std::string& text) {
      const bool indexed = text.starts_with("cuda:") && text.size() > 5 && text.size() <= 8 &&
                           text.find_first_not_of("0123456789", 5) == std::string::npos;
      return text == "cpu" || text == "cuda" || indexed
                 ? std::string()
                 : "device \"" + text + "\": expected cpu, cuda or cuda:<index>";
    },
    "DEVICE", "device");

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command
      .add_option("--device", device, "cpu, cuda or cuda:<index>; default: the first GPU, else the CPU")
      ->check(kDeviceName);
}

namespace {

bool may_be_empty(CLI::Option& option) {
  try {
    return option.get_validator(kMayBeEmpty.get_name()) != nullptr;
  } catch (const CLI::OptionNotFound&) {
    return false;
  }
}

}  // namespace

void be_strict(CLI::App& app) {
  for (CLI::Option* option :
       app.get_options([](const CLI::Option* o) { return o->get_expected_max() > 0; })) {
    if (option->nonpositional())
      option->check([&app](const std::string& text) {
        const bool flag = text.starts_with('-') && app.get_option_no_throw(text.substr(0, text.find('=')));
        return flag ? "a value is missing: " + text + " is a flag" : std::string();
      });
    if (may_be_empty(*option)) continue;
    option->check(
        [](const std::string& text) { return text.empty() ? std::string("the value is empty") : ""; });
  }
  for (CLI::Option* option :
       app.get_options([](const CLI::Option* o) { return o->get_expected_max() == 0; })) {
    option->multi_option_policy(CLI::MultiOptionPolicy::Throw);
    option->disable_flag_override();
  }
  for (CLI::App* sub : app.get_subcommands([](CLI::App*) { return true; })) be_strict(*sub);
}

std::vector<std::string> split_list(const std::string& text, const char* what) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (;;) {
    const size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma == std::string::npos ? comma : comma - begin));
    if (parts.back().empty()) throw UsageError(std::string(what) + ": \"" + text + "\" has an empty part");
    if (std::ranges::count(parts, parts.back()) > 1)
      throw UsageError(std::string(what) + ": " + parts.back() + " is given twice");
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

std::map<std::string, int64_t> parse_dims(const std::string& text) {
  std::map<std::string, int64_t> dims;
  for (const std::string& part : split_list(text, "--shape")) {
    const size_t equals = part.find('=');
    int64_t size = -1;
    if (equals != std::string::npos && equals > 0) {
      const char* const end = part.data() + part.size();
      const auto [stop, code] = std::from_chars(part.data() + equals + 1, end, size);
      if (code != std::errc{} || stop != end) size = -1;
    }
    if (size < 0) throw UsageError("--shape: \"" + part + "\": expected NAME=SIZE with a size of 0 or more");
    if (!dims.emplace(part.substr(0, equals), size).second)
      throw UsageError("--shape: \"" + part.substr(0, equals) + "\" is given twice");
  }
  return dims;
}

std::vector<bool> parse_switches(const std::string& text, const char* what) {
  std::vector<bool> values;
  for (const std::string& part : split_list(text, what)) {
    if (part != "on" && part != "off")
      throw UsageError(std::string(what) + ": \"" + part + "\": expected on or off");
    values.push_back(part == "on");
  }
  return values;
}

namespace {

/// The parts of "a,b,c", each by `parse`, whose errors become those of the flag `what`.
template <class Parse>
auto parse_list(const std::string& text, const char* what, Parse&& parse) {
  std::vector<decltype(parse(text))> values;
  for (const std::string& part : split_list(text, what)) {
    try {
      values.push_back(parse(part));
    } catch (const Error& error) {
      throw UsageError(std::string(what) + ": " + error.what());
    }
  }
  return values;
}

}  // namespace

std::vector<DType> parse_dtypes(const std::string& text, const char* what) {
  return parse_list(text, what, [&](const std::string& part) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
      if (part == name_of(dtype)) return dtype;
    throw UsageError(std::string(what) + ": \"" + part + "\": expected f64, f32, bf16 or f16");
  });
}

std::vector<Precision> parse_precisions(const std::string& text, const char* what) {
  return parse_list(text, what, [](const std::string& part) { return parse_precision(part); });
}

CLI::Option* add_sampling(CLI::App& command, ops::Sampling& sampling) {
  auto* const temperature =
      command.add_option("--temperature", sampling.temperature, "Sampling temperature; 0: greedy")
          ->check(kFinite)
          ->check(between(0.0, 1e6));
  command.add_option("--top-k", sampling.top_k, "Sample from the k most likely tokens; 0: all")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 30));
  command
      .add_option("--top-p", sampling.top_p,
                  "Sample from the smallest set of tokens with this total probability")
      ->check(kFinite)
      ->check(kProbability);
  return temperature;
}

void check_sampling(const CLI::App& command, const ops::Sampling& sampling) {
  if (sampling.temperature == 0)
    refuse_given(command, {"--top-k", "--top-p"},
                 "is for sampling, and with a temperature of 0 the most likely token is taken; leave it out");
}

void PrecisionFlag::add_to(CLI::App& command) {
  command
      .add_option("--precision", text_,
                  "Precision of the model; default: bf16 on a GPU that supports it, else f32")
      ->check(CLI::IsMember({"f32", "tf32", "bf16", "f16"}))
      ->default_str("")
      ->group("Model");
}

std::optional<Precision> PrecisionFlag::given() const {
  return text_.empty() ? std::nullopt : std::optional(parse_precision(text_));
}

ops::Attrs parse_attrs(const ops::OpSpec& op, const std::vector<std::string>& texts) {
  ops::Attrs attrs;
  for (const std::string& text : texts) {
    const std::string key = text.substr(0, text.find('='));
    if (attrs.has(key)) throw UsageError("--set: " + op.name + ": \"" + key + "\" is given twice");
    try {
      ops::set_attr(op, attrs, text);
    } catch (const Error& error) {
      throw UsageError(std::string("--set: ") + error.what());
    }
  }
  return attrs;
}

namespace {

namespace fs = std::filesystem;

void check_folder_of(const std::string& path) {
  fs::path folder = fs::path(io::followed(path)).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code code;
  check(fs::is_directory(folder, code), "write: there is no folder ", folder.string(), " for ", path,
        "; create it first");
  check(::access(folder.c_str(), W_OK) == 0, "write: ", path, ": the folder ", folder.string(),
        " cannot be written to; check its permissions");
}

/// Whether it is the file that the process prints to, under any name, such as /dev/stdout.
bool takes_output(const std::string& path) {
  struct stat file {
  }, open{};
  if (::stat(path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) return false;
  return std::ranges::any_of(std::array{STDOUT_FILENO, STDERR_FILENO}, [&](int output) {
    return ::fstat(output, &open) == 0 && open.st_dev == file.st_dev && open.st_ino == file.st_ino;
  });
}

}  // namespace

void check_writable(const std::string& path) {
  std::error_code code;
  check(!fs::is_directory(path, code), "write: ", path, " is a directory; name a file in it");
  if (!fs::exists(path, code)) return check_folder_of(path);
  check(!takes_output(path), "write: ", path,
        " is the file that this command's output goes to; name another file");
  check(::access(path.c_str(), W_OK) == 0, "write: ", path,
        " is read-only for this user; check its permissions");
}

void check_folder_writable(const std::string& path) {
  const io::AtomicFolder gone_at_once(path, io::AtomicFolder::Existing::merge);
}

namespace {

/// Whether the file is there and lies in the folder, at any depth.
bool lies_in(const std::string& file, const std::string& folder) {
  std::error_code code;
  if (!fs::is_directory(folder, code)) return false;
  const fs::path inner = fs::canonical(file, code);
  if (code) return false;
  const fs::path outer = fs::canonical(folder, code);
  return !code && std::ranges::mismatch(outer, inner).in1 == outer.end();
}

}  // namespace

void check_not_input(const std::string& out, const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    std::error_code code;
    if (out.empty() || input.empty()) continue;
    check(!fs::equivalent(out, input, code), "write: ", out, " is the input ", input,
          ", which would be replaced; name another file");
    check(!lies_in(out, input), "write: ", out, " is a file of the input ", input,
          ", which would be replaced; name another file");
  }
}

void check_different(const std::vector<std::pair<const char*, std::string>>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const auto& [flag, path] = outputs[i];
      std::error_code code;
      const auto place = [&](const std::string& file) {
        return fs::weakly_canonical(fs::absolute(file), code);
      };
      if (!path.empty() && !outputs[j].second.empty() && place(path) == place(outputs[j].second))
        throw UsageError(
            fmt::format("{}, {}: both name {}; give each a file of its own", outputs[j].first, flag, path));
    }
}

std::vector<std::string> values_given(const CLI::App& command, const std::vector<const char*>& flags) {
  std::vector<std::string> values;
  for (const char* const flag : flags)
    if (const CLI::Option* const option = command.get_option_no_throw(flag); option && option->count() > 0)
      values.insert(values.end(), option->results().begin(), option->results().end());
  return values;
}

void refuse_given(const CLI::App& command, const std::vector<const char*>& flags, const std::string& why) {
  for (const char* const flag : flags)
    if (!values_given(command, {flag}).empty()) throw UsageError(fmt::format("{} {}", flag, why));
}

void check_replaceable(const std::string& path) {
  check_writable(path);
  std::error_code code;
  check(!fs::exists(path, code) || fs::is_regular_file(path, code), "write: ", path,
        " is not a regular file (a pipe, socket or device); name a file");
  check_folder_of(path);
}

}  // namespace tessera::cli
