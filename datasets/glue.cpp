#include "datasets/glue.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "io/file.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::datasets {
namespace {

namespace fs = std::filesystem;

/// QQP's test part, the largest file, has 391,000 rows; so many take 48 MB.
constexpr size_t kMostRows = 1 << 21;
constexpr size_t kLongestLine = 1 << 20;
constexpr size_t kMostColumns = 64;
constexpr uint64_t kLargestFile = uint64_t{1} << 31;

}  // namespace

/// Named, as GlueReader has members of them.
namespace glue_internal {

/// Columns of a task's files.
struct Columns {
  const char *first, *second, *label;    // TSV
  const char *json_first, *json_second;  // JSONL; its label is "label"
};

/// Lines of a file, read a piece at a time.
class Lines {
 public:
  explicit Lines(const io::InputFile& file) : file_(file) {}
  /// Without its end (\n or \r\n); false at the end of the file.
  bool next(std::string_view& line) {
    for (;;) {
      const size_t end = buffer_.find('\n', at_);
      const bool last = read_ == file_.size();
      if (end != std::string::npos || (last && at_ < buffer_.size())) {
        const size_t stop = end == std::string::npos ? buffer_.size() : end;
        line = std::string_view(buffer_).substr(at_, stop - at_);
        if (line.ends_with('\r')) line.remove_suffix(1);
        at_ = std::min(stop + 1, buffer_.size());
        number_ += 1;
        check(line.size() <= kLongestLine, where(), "is longer than ", kLongestLine, " bytes");
        check(line.find('\0') == std::string_view::npos, where(), "holds a NUL byte; it is no text");
        check(io::is_utf8(line), where(), "is not UTF-8 text; convert the file (iconv -f LATIN1 -t UTF-8)");
        if (number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
        return true;
      }
      if (last) return false;
      check(buffer_.size() - at_ <= kLongestLine, "glue: ", file_.path(), ": line ", number_ + 1,
            " is longer than ", kLongestLine, " bytes");
      buffer_.erase(0, at_);
      at_ = 0;
      const size_t old = buffer_.size(),
                   more = size_t(std::min<uint64_t>(kLongestLine, file_.size() - read_));
      buffer_.resize(old + more);
      file_.read(read_, buffer_.data() + old, more);
      read_ += more;
    }
  }
  std::string where() const { return "glue: " + file_.path() + ": line " + std::to_string(number_) + " "; }

 private:
  const io::InputFile& file_;
  std::string buffer_;
  size_t at_ = 0;
  uint64_t read_ = 0, number_ = 0;
};

/// A JSON object of plain values: strings as they are, numbers as text.
class FlatObject : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FlatObject(std::string where) : where_(std::move(where)) {}
  const std::string* find(const std::string& key) const {
    for (const auto& [name, value] : values_)
      if (name == key) return &value;
    return nullptr;
  }
  bool null() override { return open_ || refuse("null"); }
  bool boolean(bool b) override { return put(b ? "1" : "0"); }
  bool number_integer(number_integer_t x) override { return put(std::to_string(x)); }
  bool number_unsigned(number_unsigned_t x) override { return put(std::to_string(x)); }
  bool number_float(number_float_t, const string_t& text) override { return put(text); }
  bool string(string_t& text) override { return put(std::move(text)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override {
    if (open_) refuse("an object within an object");
    return open_ = true;
  }
  bool key(string_t& key) override {
    check(!find(key), where_, "has the key \"", shown(key), "\" twice");
    check(values_.size() < kMostColumns, where_, "has more than ", kMostColumns, " keys");
    key_ = key;
    return true;
  }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return refuse("a list"); }
  bool end_array() override { return true; }
  bool parse_error(size_t place, const std::string&, const nlohmann::detail::exception&) override {
    fail_at(Site::here(), where_, "is not valid JSON at byte ", place);
  }

 private:
  bool put(std::string value) {
    if (!open_) refuse("a plain value");
    values_.emplace_back(key_, std::move(value));
    return true;
  }
  [[noreturn]] bool refuse(const char* what) const {
    fail_at(Site::here(), where_, "holds ", what, ", expected one object of plain values");
  }
  std::string where_, key_;
  std::vector<std::pair<std::string, std::string>> values_;
  bool open_ = false;
};

}  // namespace glue_internal

namespace {

using glue_internal::Columns, glue_internal::Lines, glue_internal::FlatObject;

const Columns& columns_of(GlueTask task) {
  static const std::array<Columns, 9> columns = {
      {{"sentence", nullptr, "label", "sentence", nullptr},
       {"sentence", nullptr, "label", "sentence", nullptr},
       {"#1 String", "#2 String", "Quality", "sentence1", "sentence2"},
       {"sentence1", "sentence2", "score", "sentence1", "sentence2"},
       {"question1", "question2", "is_duplicate", "question1", "question2"},
       {"sentence1", "sentence2", "gold_label", "premise", "hypothesis"},
       {"question", "sentence", "label", "question", "sentence"},
       {"sentence1", "sentence2", "label", "sentence1", "sentence2"},
       {"sentence1", "sentence2", "label", "sentence1", "sentence2"}}};
  return columns[size_t(task)];
}

std::vector<std::string_view> fields_of(std::string_view line) {
  std::vector<std::string_view> fields;
  for (size_t begin = 0; fields.size() < kMostColumns;) {
    const size_t tab = line.find('\t', begin);
    fields.push_back(line.substr(begin, tab == std::string_view::npos ? tab : tab - begin));
    if (tab == std::string_view::npos) break;
    begin = tab + 1;
  }
  return fields;
}

}  // namespace

const std::vector<GlueInfo>& glue_tasks() {
  static const std::vector<GlueInfo> tasks = {
      {GlueTask::cola, "cola", "CoLA", false, {"unacceptable", "acceptable"}, {"matthews"}},
      {GlueTask::sst2, "sst2", "SST-2", false, {"negative", "positive"}, {"accuracy"}},
      {GlueTask::mrpc, "mrpc", "MRPC", true, {"not_equivalent", "equivalent"}, {"accuracy", "f1"}},
      {GlueTask::stsb, "stsb", "STS-B", true, {}, {"pearson", "spearman"}},
      {GlueTask::qqp, "qqp", "QQP", true, {"not_duplicate", "duplicate"}, {"accuracy", "f1"}},
      {GlueTask::mnli, "mnli", "MNLI", true, {"entailment", "neutral", "contradiction"}, {"accuracy"}},
      {GlueTask::qnli, "qnli", "QNLI", true, {"entailment", "not_entailment"}, {"accuracy"}},
      {GlueTask::rte, "rte", "RTE", true, {"entailment", "not_entailment"}, {"accuracy"}},
      {GlueTask::wnli, "wnli", "WNLI", true, {"not_entailment", "entailment"}, {"accuracy"}}};
  return tasks;
}

const GlueInfo& glue_info(GlueTask task) {
  return glue_tasks()[size_t(task)];
}

const GlueInfo& parse_glue_task(const std::string& name) {
  const auto lower = [](std::string text) {
    for (char& c : text)
      if (c >= 'A' && c <= 'Z') c = char(c + ('a' - 'A'));
    return text;
  };
  std::vector<std::string> names;
  for (const GlueInfo& info : glue_tasks()) {
    if (lower(name) == info.name || lower(name) == lower(info.folder)) return info;
    names.emplace_back(info.name);
  }
  const std::string near = nearest(lower(name), names);
  fail_at(Site::here(), "glue: there is no task \"", shown(name),
          near.empty() ? "\"; expected cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli"
                       : "\"; did you mean " + near + "?");
}

/// Reads one file into a GlueData.
class GlueReader {
 public:
  GlueReader(GlueData& data, const io::InputFile& file, bool is_test)
      : data_(data), info_(glue_info(data.task_)), columns_(columns_of(data.task_)), lines_(file) {
    check(file.size() <= kLargestFile, "glue: ", file.path(), " has ", file.size(), " bytes, more than ",
          kLargestFile);
    // All that is kept of a file is less than the file: no growth by doubling.
    data_.text_.reserve(size_t(file.size()));
    data_.rows_.reserve(std::min(kMostRows, size_t(file.size() / 2) + 1));
    if (file.path().ends_with(".jsonl"))
      jsonl();
    else
      tsv(is_test);
    check(!data_.rows_.empty(), "glue: ", file.path(), " has no examples");
    data_.rows_.shrink_to_fit();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const { fail_at(Site::here(), lines_.where(), what); }

  void add(std::string_view first, std::string_view second, std::optional<std::string_view> label) {
    if (data_.rows_.empty()) data_.has_labels_ = label.has_value();
    if (label.has_value() != data_.has_labels_)
      refuse(label ? "has a label, unlike those before" : "has no label, unlike those before");
    const float value = label ? float(parse_label(*label)) : std::numeric_limits<float>::quiet_NaN();
    check(data_.rows_.size() < kMostRows, lines_.where(), "is one too many: more than ", kMostRows,
          " examples");
    data_.rows_.push_back({data_.text_.size(), uint32_t(first.size()), uint32_t(second.size()), value});
    data_.text_ += first;
    data_.text_ += second;
  }

  double parse_label(std::string_view text) const {
    double value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool is_number = code == std::errc{} && end == text.data() + text.size() && std::isfinite(value);
    if (info_.labels.empty()) {
      if (!is_number || value < 0 || value > 5)
        refuse("has the score \"" + shown(std::string(text)) + "\", expected a number from 0 to 5");
      return value;
    }
    for (size_t i = 0; i < info_.labels.size(); ++i)
      if (text == info_.labels[i] || (is_number && value == double(i))) return double(i);
    refuse("has the label \"" + shown(std::string(text)) + "\", expected one of " + joined(info_.labels) +
           " or its number");
  }

  /// The next line of a TSV; false at the end, before which there may be empty lines. (QQP's broken rows,
  /// which may be empty, are left out.)
  bool next_row(std::string_view& line) {
    if (!lines_.next(line)) return false;
    if (!line.empty() || info_.task == GlueTask::qqp) return true;
    const std::string where = lines_.where();
    while (lines_.next(line)) check(line.empty(), where, "is empty, though rows follow");
    return false;
  }

  void tsv(bool is_test) {
    std::string_view line;
    if (!next_row(line)) return;
    const bool cola = info_.task == GlueTask::cola;
    if (cola && !is_test) {  // four columns without a header: source, label, the linguist's mark, sentence
      do {
        const std::vector<std::string_view> fields = fields_of(line);
        if (fields.size() != 4) refuse("has " + std::to_string(fields.size()) + " columns, expected 4");
        add(fields[3], {}, fields[1]);
      } while (next_row(line));
      return;
    }
    std::vector<std::string> header;
    for (const std::string_view field : fields_of(line)) header.emplace_back(field);
    const auto find = [&](const char* name) -> size_t {
      const auto found = std::find(header.begin(), header.end(), name);
      if (std::count(found, header.end(), name) > 1)
        refuse(std::string("is a header with two columns \"") + name + "\"");
      return size_t(found - header.begin());
    };
    const size_t first = find(columns_.first), second = columns_.second ? find(columns_.second) : 0;
    const size_t label = find(columns_.label);
    const auto missing = [&](const char* name) {
      refuse(std::string("is a header without the column \"") + name + "\" of " + info_.folder);
    };
    if (first == header.size()) missing(columns_.first);
    if (columns_.second && second == header.size()) missing(columns_.second);
    const bool labelled = label < header.size();
    if (!labelled && !is_test) missing(columns_.label);
    while (next_row(line)) {
      const std::vector<std::string_view> fields = fields_of(line);
      if (fields.size() != header.size()) {
        if (info_.task == GlueTask::qqp && fields.size() < header.size()) {
          data_.left_out_ += 1;
          continue;
        }
        refuse("has " + std::to_string(fields.size()) + " columns, the header " +
               std::to_string(header.size()));
      }
      if (info_.task == GlueTask::mnli && labelled && fields[label] == "-") {
        data_.left_out_ += 1;
        continue;
      }
      add(fields[first], columns_.second ? fields[second] : std::string_view(),
          labelled ? std::optional(fields[label]) : std::nullopt);
    }
  }

  void jsonl() {
    std::string_view line;
    while (lines_.next(line)) {
      if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
      FlatObject object(lines_.where());
      nlohmann::json::sax_parse(line.begin(), line.end(), &object);
      const auto get = [&](const char* key) -> const std::string& {
        const std::string* const value = object.find(key);
        if (!value) refuse(std::string("has no \"") + key + "\"");
        return *value;
      };
      const std::string* const label = object.find("label");
      const bool labelled = label && *label != "-1" && *label != "-1.0";  // scores are floats
      add(get(columns_.json_first), columns_.json_second ? std::string_view(get(columns_.json_second)) : "",
          labelled ? std::optional<std::string_view>(*label) : std::nullopt);
    }
  }

  GlueData& data_;
  const GlueInfo& info_;
  const Columns& columns_;
  Lines lines_;
};

GlueData GlueData::read(GlueTask task, const std::string& path, bool is_test) {
  return read(task, io::InputFile(path), is_test);
}

GlueData GlueData::read(GlueTask task, const io::InputFile& file, bool is_test) {
  GlueData data(task, file.path());
  GlueReader(data, file, is_test);
  return data;
}

GlueData::GlueData(GlueTask task, const std::string& folder, const std::string& part) : task_(task) {
  const GlueInfo& info = glue_info(task);
  const bool mnli = task == GlueTask::mnli;
  const bool known = part == "train" || part == "dev" || part == "test" ||
                     (mnli && (part == "dev_matched" || part == "dev_mismatched" || part == "test_matched" ||
                               part == "test_mismatched"));
  check(known, "glue: ", info.folder, " has no part \"", shown(part), "\"; expected train, dev or test",
        mnli ? ", the last two also with _matched or _mismatched" : "");
  const std::string name = mnli && (part == "dev" || part == "test") ? part + "_matched" : part;
  std::error_code ignored;
  for (const fs::path& place :
       {fs::path(folder), fs::path(folder) / info.folder, fs::path(folder) / info.name})
    for (const char* ending : {".tsv", ".jsonl"}) {
      const std::string path = (place / (name + ending)).string();
      if (!fs::exists(path, ignored)) continue;
      *this = read(task, path, part.starts_with("test"));
      return;
    }
  fail_at(Site::here(), "glue: there is no ", name, ".tsv or ", name, ".jsonl of ", info.folder, " in ",
          folder, " or ", folder, "/", info.folder, "; tessera data glue writes a synthetic one");
}

const GlueData::Row& GlueData::row(int64_t i) const {
  check(i >= 0 && i < size(), "glue: ", path_, ": there is no example ", i, " of ", size());
  return rows_[size_t(i)];
}

double GlueData::label(int64_t i) const {
  check(has_labels_, "glue: ", path_, " has no labels");
  return double(row(i).label);
}

}  // namespace tessera::datasets
