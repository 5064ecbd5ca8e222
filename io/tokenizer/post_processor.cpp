#include "io/tokenizer/post_processor_internal.h"

#include <algorithm>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "runtime/error.h"

namespace tessera::io {
namespace {

constexpr int64_t kMostTypes = 1 << 16;

/// ["[SEP]", 102]
int32_t named_id(const Settings& settings, const PostProcessor::Known& known) {
  const std::vector<Settings> items = settings.items();
  check(items.size() == 2, "tokenizer: ", settings.where(), " has ", items.size(),
        " parts, expected a token and its number");
  const int64_t id = items[1].number(0, kMostTokens - 1);
  check(known(id), "tokenizer: ", settings.where(), ": there is no token ", id);
  return int32_t(id);
}

}  // namespace

PostProcessor::PostProcessor() : single_{{0, {}, 0}}, pair_{{0, {}, 0}, {1, {}, 1}} {}

PostProcessor::PostProcessor(const Settings& settings, const Known& known) : PostProcessor() {
  add(settings, known);
}

void PostProcessor::add(const Settings& settings, const Known& known) {
  const std::string type = settings.type();
  if (type == "ByteLevel") return;
  if (type == "Sequence") {
    for (const Settings& step : settings.list("processors")) add(step, known);
    return;
  }
  check(!has_parts_, "tokenizer: ", settings.where(), ": a second processor that adds tokens");
  has_parts_ = true;
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    const bool bert = type == "BertProcessing";
    const Part cls{-1, {named_id(settings.at("cls"), known)}, 0};
    const int32_t sep = named_id(settings.at("sep"), known);
    single_ = {cls, {0, {}, 0}, {-1, {sep}, 0}};
    pair_ = single_;
    if (bert)
      pair_.insert(pair_.end(), {{1, {}, 1}, {-1, {sep}, 1}});
    else
      pair_.insert(pair_.end(), {{-1, {sep}, 0}, {1, {}, 0}, {-1, {sep}, 0}});
    return;
  }
  if (type != "TemplateProcessing")
    settings.refuse_type("TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel or Sequence");
  const auto parts = [&](const char* name, int sequences) {
    std::vector<Part> result;
    std::vector<int> uses(2);
    for (const Settings& item : settings.list(name)) {
      Part part;
      const bool is_sequence = item.has("Sequence");
      const Settings what = item.at(is_sequence ? "Sequence" : "SpecialToken");
      part.type = int32_t(what.number("type_id", 0, 0, kMostTypes));
      const std::string id = what.text("id");
      if (is_sequence) {
        check(id == "A" || (id == "B" && sequences == 2), "tokenizer: ", what.where(), ".id is \"", shown(id),
              "\", expected A", sequences == 2 ? " or B" : "");
        part.sequence = id == "A" ? 0 : 1;
        uses[size_t(part.sequence)] += 1;
      } else {
        const Settings table = settings.at("special_tokens");
        check(table.has(id), "tokenizer: ", what.where(), ".id is \"", shown(id),
              "\", which is not among special_tokens");
        for (const Settings& number : table.at(id).list("ids")) {
          part.ids.push_back(int32_t(number.number(0, kMostTokens - 1)));
          check(known(part.ids.back()), "tokenizer: ", number.where(), ": there is no token ",
                part.ids.back());
        }
      }
      result.push_back(std::move(part));
    }
    for (int sequence = 0; sequence < sequences; ++sequence)
      check(uses[size_t(sequence)] == 1, "tokenizer: ", settings.where(), ".", name, " has the text ",
            sequence == 0 ? "A " : "B ", uses[size_t(sequence)], " times, expected once");
    return result;
  };
  single_ = parts("single", 1);
  if (settings.has("pair")) pair_ = parts("pair", 2);
}

size_t PostProcessor::added(bool pair) const {
  size_t count = 0;
  for (const Part& part : pair ? pair_ : single_) count += part.ids.size();
  return count;
}

Encoding PostProcessor::operator()(const std::vector<int32_t>& a, const std::vector<int32_t>* b,
                                   bool special) const {
  Encoding encoding;
  for (const Part& part : b ? pair_ : single_) {
    if (part.sequence < 0 && !special) continue;
    const std::vector<int32_t>& ids = part.sequence < 0 ? part.ids : part.sequence == 0 ? a : *b;
    encoding.ids.insert(encoding.ids.end(), ids.begin(), ids.end());
    encoding.types.resize(encoding.ids.size(), part.type);
  }
  return encoding;
}

}  // namespace tessera::io
