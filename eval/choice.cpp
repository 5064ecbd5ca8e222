#include "eval/choice.h"

#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/json.h"
#include "io/text_file.h"

namespace tessera::eval {
namespace {

using nlohmann::json;

constexpr uint64_t kLargestItems = uint64_t{1} << 30;

ChoiceItem item_of(const std::string& line, const std::string& where) {
  constexpr const char* kExpected =
      "; expected {\"context\": \"...\", \"choices\": [\"...\", \"...\"], \"answer\": 0}";
  const json object = io::parse_object(where, line);
  check(object.contains("context") && object["context"].is_string(), where, " has no text \"context\"",
        kExpected);
  check(object.contains("choices") && object["choices"].is_array() && object["choices"].size() >= 2, where,
        " has no list \"choices\" of two or more", kExpected);
  ChoiceItem item{.context = object["context"].get<std::string>(), .choices = {}};
  for (const json& choice : object["choices"]) {
    check(choice.is_string() && !choice.get<std::string>().empty(), where,
          " has a choice that is empty or not a string", kExpected);
    item.choices.push_back(choice.get<std::string>());
  }
  check(object.contains("answer") && object["answer"].is_number_integer(), where,
        " has no whole number \"answer\"", kExpected);
  item.answer = object["answer"].get<int64_t>();
  check(item.answer >= 0 && item.answer < int64_t(item.choices.size()), where, ": \"answer\" is ",
        item.answer, " of ", item.choices.size(), " choices; expected 0 to ", item.choices.size() - 1);
  return item;
}

/// The ends of Wilson's interval.
double wilson(const Accuracy& accuracy, double sign) {
  // Exact: rounding would leave 1e-17 of them.
  if (sign < 0 && accuracy.right == 0) return 0;
  if (sign > 0 && accuracy.right == accuracy.items) return 1;
  constexpr double z = 1.959963984540054;  // the normal quantile 0.975
  const double n = double(accuracy.items), p = accuracy.share();
  const double middle = p + z * z / (2 * n), half = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return std::clamp((middle + sign * half) / (1 + z * z / n), 0.0, 1.0);
}

}  // namespace

std::vector<ChoiceItem> read_choices(const std::string& path) {
  const std::string text = io::read_file(path, kLargestItems);
  io::check_text(path, text);
  std::vector<ChoiceItem> items;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1, ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    items.push_back(item_of(line, "eval choice: " + path + ": line " + std::to_string(number)));
  }
  check(!items.empty(), "eval choice: ", path, " has no items");
  return items;
}

ChoiceText choice_text(const ChoiceItem& item, size_t choice,
                       const std::function<std::vector<int64_t>(const std::string&)>& encode, int64_t most,
                       std::optional<int64_t> begin) {
  const size_t end = item.context.find_last_not_of(" \t\r\n");
  const std::string context = end == std::string::npos ? "" : item.context.substr(0, end + 1);
  const std::string rest = item.context.substr(context.size()) + item.choices.at(choice);
  std::vector<int64_t> before = encode(context), whole = encode(context + rest);
  if (before.empty()) {
    check(begin.has_value(),
          "eval choice: a context is empty, and the model's config.json names no bos_token_id of its "
          "vocabulary to begin with; give each item a context");
    before.push_back(*begin), whole.insert(whole.begin(), *begin);
  }
  size_t common = 0;
  while (common < before.size() && common < whole.size() && before[common] == whole[common]) ++common;
  ChoiceText text{.tokens = std::move(whole),
                  .first = int64_t(std::max<size_t>(1, common)),
                  .bytes = int64_t(item.choices[choice].size())};
  const int64_t chosen = int64_t(text.tokens.size()) - text.first;
  check(chosen >= 1, "eval choice: the choice '", item.choices[choice], "' has no tokens");
  // The last token is predicted, but never run.
  const int64_t cut = int64_t(text.tokens.size()) - 1 - most;
  if (cut > 0) {
    check(text.first > cut, "eval choice: a choice of ", chosen, " tokens does not fit into the ", most,
          " that the model takes");
    text.tokens.erase(text.tokens.begin(), text.tokens.begin() + cut);
    text.first -= cut;
  }
  return text;
}

double Accuracy::low() const {
  return wilson(*this, -1);
}
double Accuracy::high() const {
  return wilson(*this, 1);
}

}  // namespace tessera::eval
