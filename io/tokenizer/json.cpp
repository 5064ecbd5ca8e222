#include <algorithm>

#include "io/safetensors_internal.h"
#include "io/tokenizer/file_internal.h"
#include "io/tokenizer/settings_internal.h"
#include "runtime/error.h"

// A tokenizer.json is parsed by events. Vocabulary, merges and added tokens, which may be millions, go
// straight into compact lists; the rest becomes a small tree of bounded depth and size.

namespace tessera::io {
namespace {

constexpr size_t kMostDepth = 64, kMostValues = 1 << 16;
/// A few thousand are the most in use; each costs some 300 bytes in lists and tables.
constexpr size_t kMostAdded = 1 << 16;

AddedToken added_token(const Settings& item) {
  AddedToken token;
  token.content = item.text("content");
  token.id = int32_t(item.number("id", 0, kMostTokens - 1));
  token.special = item.flag("special", false);
  token.single_word = item.flag("single_word", false);
  token.lstrip = item.flag("lstrip", false);
  token.rstrip = item.flag("rstrip", false);
  token.normalized = item.flag("normalized", !token.special);
  check(token.content.size() <= kLongestAdded, "tokenizer: ", item.where(), ": a token of ",
        token.content.size(), " bytes, more than ", kLongestAdded);
  return token;
}

/// Builds the tree; where the names of a TokenizerFile's lists come, their parts go there.
class Events : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// `only_vocabulary`: the text is a vocab.json.
  Events(const std::string& path, nlohmann::json& root, TokenizerFile* file, bool only_vocabulary = false)
      : path_(path),
        where_vocabulary_(path + (only_vocabulary ? "" : ": model.vocab")),
        root_(root),
        file_(file),
        only_vocabulary_(only_vocabulary) {}

  bool null() override { return value(nullptr, "null"); }
  bool boolean(bool b) override { return value(b, "true or false"); }
  bool binary(binary_t&) override { return false; }
  bool number_float(number_float_t x, const string_t&) override {
    return value(x, "a number that is not whole");
  }

  bool number_integer(number_integer_t x) override {
    if (list_ == List::vocabulary) return token(x);
    return value(x, "a number");
  }

  bool number_unsigned(number_unsigned_t x) override {
    if (list_ == List::vocabulary) return token(x > uint64_t(kMostTokens) ? kMostTokens : int64_t(x));
    return value(x, "a number");
  }

  bool string(string_t& text) override {
    if (list_ == List::merges) {
      const size_t blank = text.find(' ');
      if (blank == std::string::npos || text.find(' ', blank + 1) != std::string::npos)
        refuse_merge("is \"" + shown(text) + "\", expected two tokens with a blank between them");
      file_->merges.add(std::string_view(text).substr(0, blank), std::string_view(text).substr(blank + 1));
      return true;
    }
    if (list_ == List::pair) {
      if (pair_.size() == 2) refuse_merge("has more than two tokens");
      pair_.push_back(text);
      return true;
    }
    return value(std::move(text), "a string");
  }

  bool start_object(size_t) override {
    if (at_vocabulary()) {
      list_ = List::vocabulary;
      file_->has_vocabulary = true;
      return true;
    }
    return open(nlohmann::json::object(), "an object");
  }

  bool start_array(size_t) override {
    if (list_ == List::merges) {
      list_ = List::pair;
      pair_.clear();
      return true;
    }
    if (at_model("merges")) {
      list_ = List::merges;
      return true;
    }
    check(
        only_vocabulary_ || !at_vocabulary(), "tokenizer: ", path_,
        ": model.vocab is a list, as of a Unigram model, expected an object; Unigram is read from the .model "
        "file of SentencePiece");
    return open(nlohmann::json::array(), "a list");
  }

  bool key(string_t& key) override {
    if (list_ == List::vocabulary) {
      token_ = key;
      return true;
    }
    nlohmann::json& object = *stack_.back();
    const bool diverted = file_ && ((stack_.size() == 1 && key == "added_tokens") ||
                                    (in_model() && (key == "vocab" || key == "merges")));
    check(!object.contains(key), "tokenizer: ", path_, ": the key \"", shown(key),
          "\" occurs twice in one object");
    if (diverted) object[key] = nullptr;  // so that a second one is seen
    key_ = key;
    return true;
  }

  bool end_object() override {
    if (list_ == List::vocabulary) {
      list_ = List::none;
      return true;
    }
    return close();
  }

  bool end_array() override {
    if (list_ == List::pair) {
      if (pair_.size() != 2) refuse_merge("has " + std::to_string(pair_.size()) + " tokens, expected 2");
      file_->merges.add(pair_[0], pair_[1]);
      list_ = List::merges;
      return true;
    }
    if (list_ == List::merges) {
      list_ = List::none;
      return true;
    }
    return close();
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail_at(Site::here(), "tokenizer: ", path_, ": not valid JSON at byte ", position,
            "; the file is damaged, cut short or not in this format");
  }

 private:
  enum class List { none, vocabulary, merges, pair };

  bool in_model() const { return stack_.size() == 2 && stack_keys_.back() == "model"; }
  bool at_model(const char* name) const { return file_ && list_ == List::none && in_model() && key_ == name; }
  bool at_vocabulary() const {
    return only_vocabulary_ ? list_ == List::none && stack_.empty() : at_model("vocab");
  }
  bool at_added() const {
    return file_ && stack_.size() == 2 && stack_.back()->is_array() && stack_keys_.back() == "added_tokens";
  }
  bool token(int64_t id) {
    file_->vocabulary.add(where_vocabulary_, token_, id);
    return true;
  }

  [[noreturn]] void refuse_merge(const std::string& what) const {
    fail_at(Site::here(), "tokenizer: ", path_, ": model.merges[", file_->merges.size(), "] ", what);
  }

  void refuse_in_list(const char* what) const {
    check(list_ != List::vocabulary, "tokenizer: ", path_, ": model.vocab: the number of \"", token_,
          "\" is ", what, ", expected a whole number");
    if (list_ == List::merges)
      refuse_merge(std::string("is ") + what + ", expected \"left right\" or [\"left\", \"right\"]");
    if (list_ == List::pair) refuse_merge(std::string("holds ") + what + ", expected two strings");
  }

  /// Where the next value goes.
  nlohmann::json& place() {
    check(++values_ <= kMostValues, "tokenizer: ", path_, ": more than ", kMostValues,
          " values besides vocabulary, merges and added tokens");
    if (stack_.empty()) return root_;
    nlohmann::json& parent = *stack_.back();
    if (parent.is_object()) return parent[key_];
    parent.push_back(nullptr);
    return parent.back();
  }

  bool value(nlohmann::json value, const char* what) {
    refuse_in_list(what);
    check(!stack_.empty(), "tokenizer: ", path_, " is ", what, ", expected an object");
    // null stands for "none" everywhere in the format.
    check(value.is_null() || !(at_model("vocab") || at_model("merges")), "tokenizer: ", path_, ": model.",
          key_, " is ", what, ", expected ", key_ == "vocab" ? "an object" : "a list");
    place() = std::move(value);
    return true;
  }

  bool open(nlohmann::json container, const char* what) {
    refuse_in_list(what);
    check(!stack_.empty() || container.is_object(), "tokenizer: ", path_, " is ", what,
          ", expected an object");
    check(!at_model("merges"), "tokenizer: ", path_, ": model.merges is ", what, ", expected a list");
    check(stack_.size() < kMostDepth, "tokenizer: ", path_, ": nested deeper than ", kMostDepth);
    nlohmann::json& to = place();
    to = std::move(container);
    stack_keys_.push_back(stack_.empty() ? "" : key_);
    stack_.push_back(&to);
    return true;
  }

  bool close() {
    stack_.pop_back();
    stack_keys_.pop_back();
    if (at_added()) {
      nlohmann::json& list = *stack_.back();
      const std::string where = path_ + ": added_tokens[" + std::to_string(file_->added.size()) + "]";
      check(file_->added.size() < kMostAdded, "tokenizer: ", path_, ": more than ", kMostAdded,
            " added tokens");
      file_->added.push_back(added_token(Settings(list.back(), where)));
      values_ -= 1 + list.back().size();
      list.erase(list.size() - 1);
    }
    return true;
  }

  const std::string& path_;
  const std::string where_vocabulary_;
  nlohmann::json& root_;
  TokenizerFile* file_;
  bool only_vocabulary_;
  std::vector<nlohmann::json*> stack_;
  std::vector<std::string> stack_keys_;
  std::string key_, token_;
  std::vector<std::string> pair_;
  List list_ = List::none;
  size_t values_ = 0;
};

nlohmann::json parse(const std::string& path, std::string_view text, TokenizerFile* file,
                     bool only_vocabulary = false) {
  // The parser would take a NUL for the end.
  check(text.find('\0') == std::string_view::npos, "tokenizer: ", path, " holds a NUL byte; it is damaged");
  nlohmann::json root;
  Events events(path, root, file, only_vocabulary);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  return root;
}

}  // namespace

nlohmann::json parse_small_json(const std::string& path, std::string_view text) {
  return parse(path, text, nullptr);
}

void parse_vocab_json(TokenizerFile& file, std::string_view text) {
  parse(file.path, text, &file, true);
  check(file.has_vocabulary, "tokenizer: ", file.path, " is no object of tokens and numbers");
  file.vocabulary.finish(file.path);
}

TokenizerFile parse_tokenizer_json(const std::string& path, std::string_view text) {
  TokenizerFile file;
  file.path = path;
  file.settings = parse(path, text, &file);
  const Settings root(file.settings, path + ": ");
  const Settings model = root.at("model");
  if (root.has("added_tokens")) {
    const Settings added = root.at("added_tokens");
    check(added.items().empty(), "tokenizer: ", added.where(), "[0] is no object");
  }
  check(file.has_vocabulary, "tokenizer: ", path, ": model has no \"vocab\"");
  file.vocabulary.finish(path + ": model.vocab");
  for (const char* list : {"vocab", "merges"}) file.settings["model"].erase(list);
  file.settings.erase("added_tokens");
  return file;
}

}  // namespace tessera::io
