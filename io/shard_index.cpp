#include "io/shard_index.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "io/safetensors_internal.h"

namespace tessera::io {
namespace {

bool is_plain(const std::string& name) {
  if (name.empty() || name.size() > 255 || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte > 0x20 && byte < 0x7F && c != '/' && c != '\\' && c != ':';
  });
}

/// By events, as the header of safetensors: nothing is kept but the map.
class IndexEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  IndexEvents(const std::string& path, std::map<std::string, std::string>& files)
      : path_(path), files_(files) {}

  bool start_object(size_t) override {
    if (state_ == State::start)
      state_ = State::top;
    else if (state_ == State::map_value)
      state_ = State::map;
    else if (state_ == State::metadata_value)
      ++depth_;
    else
      unexpected("an object");
    return true;
  }
  bool end_object() override {
    if (state_ == State::metadata_value) {
      if (--depth_ == 0) state_ = State::top;
    } else {
      state_ = state_ == State::map ? State::top : State::end;
    }
    return true;
  }
  bool key(string_t& key) override {
    if (state_ == State::top) {
      bool& seen = key == "weight_map" ? has_map_ : has_metadata_;
      check(key == "weight_map" || key == "metadata", "index: ", path_, " has an unknown part '", shown(key),
            "'; expected metadata and weight_map");
      check(!seen, "index: ", path_, " has two parts '", key, "'");
      seen = true;
      state_ = key == "weight_map" ? State::map_value : State::metadata_value;
    } else if (state_ == State::map) {
      check(key.find('\0') == std::string::npos, "index: ", path_, ": the name '", shown(key),
            "' holds a NUL byte");
      check(!files_.contains(key), "index: ", path_, ": the tensor '", shown(key), "' occurs twice");
      name_ = key;
      state_ = State::file;
    }
    return true;
  }
  bool string(string_t& text) override {
    if (state_ == State::metadata_value) return scalar();
    if (state_ != State::file) unexpected("a string");
    check(is_plain(text), "index: ", path_, ": the tensor '", shown(name_), "' lies in '", shown(text),
          "', which is not the plain name of a file in this folder");
    files_.emplace(name_, text);
    state_ = State::map;
    return true;
  }
  bool start_array(size_t) override {
    if (state_ != State::metadata_value) unexpected("a list");
    ++depth_;
    return true;
  }
  bool end_array() override {
    if (--depth_ == 0) state_ = State::top;
    return true;
  }
  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("true or false"); }
  bool binary(binary_t&) override { return other("binary data"); }
  bool number_integer(number_integer_t) override { return other("a number"); }
  bool number_unsigned(number_unsigned_t) override { return other("a number"); }
  bool number_float(number_float_t, const string_t&) override { return other("a number"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail_at(Site::here(), "index: ", path_, " is not valid JSON at byte ", position,
            "; the file is damaged or not an index of weights");
  }
  void finish() const {
    check(has_map_, "index: ", path_, " has no part weight_map");
    check(!files_.empty(), "index: ", path_, " names no tensors");
  }

 private:
  enum class State { start, top, metadata_value, map_value, map, file, end };
  /// A value somewhere in metadata: if it is all of it, metadata ends.
  bool scalar() {
    if (depth_ == 0) state_ = State::top;
    return true;
  }
  bool other(const char* what) { return state_ == State::metadata_value ? scalar() : unexpected(what); }
  [[noreturn]] bool unexpected(const char* what) const {
    const char* const where = state_ == State::start       ? "it"
                              : state_ == State::map_value ? "weight_map"
                                                           : "the file of a tensor";
    fail_at(Site::here(), "index: ", path_, ": ", where,
            state_ == State::file ? " '" + shown(name_) + "'" : "", " is ", what, ", expected ",
            state_ == State::file ? "a string" : "an object");
  }

  const std::string& path_;
  std::map<std::string, std::string>& files_;
  State state_ = State::start;
  std::string name_;
  int64_t depth_ = 0;  // of containers within metadata
  bool has_map_ = false, has_metadata_ = false;
};

}  // namespace

std::map<std::string, std::string> parse_shard_index(const std::string& path, std::string_view text) {
  check(!text.empty() && text[0] == '{', "index: ", path,
        " does not begin with '{'; it is not an index of weights");
  check(text.find('\0') == std::string_view::npos, "index: ", path, " holds a NUL byte");
  std::map<std::string, std::string> files;
  IndexEvents events(path, files);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  events.finish();
  return files;
}

InputFile open_shard(const std::string& folder, const std::string& name) {
  check(is_plain(name), "index: '", shown(name), "' is not the plain name of a file");
  const std::string path = folder + "/" + name;
  std::array<char, 256> target{};
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  if (length > 0) {
    constexpr std::string_view kBlobs = "../../blobs/";
    const std::string_view link(target.data(), size_t(length));
    const std::string_view blob = link.starts_with(kBlobs) ? link.substr(kBlobs.size()) : "";
    const bool is_cache = (blob.size() == 40 || blob.size() == 64) &&
                          blob.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (is_cache) return InputFile(folder + "/" + std::string(link), Links::refuse);
  }
  return InputFile(path, Links::refuse);
}

}  // namespace tessera::io
