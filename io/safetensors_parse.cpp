#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "io/file_integer_internal.h"
#include "io/safetensors_internal.h"

// The header is parsed by events, not into a tree: duplicate keys are seen, depth is a state (object, entry,
// list: nothing nests deeper), and no more is kept than what an entry can mean.

namespace tessera::io {
namespace {

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr std::array<DTypeName, 9> kDTypeNames = {{{"F64", DType::f64},
                                                   {"F32", DType::f32},
                                                   {"BF16", DType::bf16},
                                                   {"F16", DType::f16},
                                                   {"F8_E4M3", DType::f8e4m3},
                                                   {"I64", DType::i64},
                                                   {"I32", DType::i32},
                                                   {"U8", DType::u8},
                                                   {"BOOL", DType::boolean}}};

class HeaderEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderEvents(const std::string& path, std::vector<SafetensorsEntry>& entries, Metadata& metadata)
      : path_(path), entries_(entries), metadata_(metadata) {}

  bool start_object(size_t) override {
    if (state_ == State::start) {
      state_ = State::top;
    } else if (state_ == State::value && is_metadata_) {
      state_ = State::metadata;
    } else if (state_ == State::value) {
      state_ = State::entry;
      dtype_.reset(), sizes_.reset(), offsets_.reset();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& key) override {
    check(key.find('\0') == std::string::npos, "safetensors: ", path_, ": the name '", shown(key),
          "' holds a NUL byte");
    if (state_ == State::top) {
      name_ = key;
      is_metadata_ = key == "__metadata__";
      check(names_.emplace(key, 0).second, "safetensors: ", path_, ": the name '", shown(key),
            "' occurs twice in the header");
      state_ = State::value;
    } else if (state_ == State::metadata) {
      check(!metadata_.contains(key), "safetensors: ", path_, ": the metadata key '", shown(key),
            "' occurs twice");
      metadata_key_ = key;
      state_ = State::metadata_value;
    } else {
      const bool again = key == "dtype"          ? dtype_.has_value()
                         : key == "shape"        ? sizes_.has_value()
                         : key == "data_offsets" ? offsets_.has_value()
                                                 : false;
      check(key == "dtype" || key == "shape" || key == "data_offsets", "safetensors: ", path_, ": tensor '",
            shown(name_), "' has an unknown part '", shown(key), "'; expected dtype, shape and data_offsets");
      check(!again, "safetensors: ", path_, ": tensor '", shown(name_), "' has two parts '", key, "'");
      state_ = key == "dtype" ? State::dtype : key == "shape" ? State::shape : State::offsets;
    }
    return true;
  }

  bool string(string_t& text) override {
    if (state_ == State::metadata_value) {
      metadata_.emplace(metadata_key_, text);
      state_ = State::metadata;
    } else if (state_ == State::dtype) {
      const auto* const found = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                             [&](const DTypeName& known) { return text == known.name; });
      integer_ = found == kDTypeNames.end() ? find_file_integer(&FileInteger::safetensors, text) : nullptr;
      check(integer_ || found != kDTypeNames.end(), "safetensors: ", path_, ": tensor '", shown(name_),
            "' has dtype ", shown(text),
            ", which is not supported; expected F64, F32, BF16, F16, F8_E4M3, I64, I32, I16, I8, U64, U32, "
            "U16, U8 or BOOL");
      dtype_ = integer_ ? integer_->dtype : found->dtype;
      state_ = State::entry;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::shape) {
      sizes_.emplace();
      state_ = State::sizes;
    } else if (state_ == State::offsets) {
      offsets_.emplace();
      state_ = State::offset_list;
    } else {
      unexpected("a list");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::offset_list)
      check(offsets_->size() == 2, "safetensors: ", path_, ": tensor '", shown(name_), "' has ",
            offsets_->size(), " data offsets, expected 2");
    state_ = State::entry;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::sizes) {
      check(sizes_->size() < size_t(kMaxRank), "safetensors: ", path_, ": tensor '", shown(name_),
            "' has more than ", kMaxRank, " dimensions");
      check(value <= uint64_t(INT64_MAX), "safetensors: ", path_, ": tensor '", shown(name_),
            "' has a size of ", value, ", more than 63 bits");
      sizes_->push_back(int64_t(value));
    } else if (state_ == State::offset_list) {
      check(offsets_->size() < 2, "safetensors: ", path_, ": tensor '", shown(name_),
            "' has more than 2 data offsets");
      offsets_->push_back(value);
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool end_object() override {
    if (state_ == State::entry) add_entry();
    state_ = state_ == State::top ? State::end : State::top;
    return true;
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + shown(text) + " (not a whole number below 2^64)");
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail_at(Site::here(), "safetensors: ", path_, ": the header is not valid JSON at byte ", position + 7,
            " of the file; the file is damaged or not in this format");
  }

 private:
  enum class State {
    start,
    top,
    value,
    metadata,
    metadata_value,
    entry,
    dtype,
    shape,
    sizes,
    offsets,
    offset_list,
    end
  };

  [[noreturn]] bool unexpected(const std::string& what) const {
    const char* const expected = state_ == State::start            ? "an object"
                                 : state_ == State::value          ? "an object"
                                 : state_ == State::metadata_value ? "a string"
                                 : state_ == State::dtype          ? "a string"
                                 : state_ == State::shape          ? "a list"
                                 : state_ == State::offsets        ? "a list"
                                                                   : "whole numbers of 0 and more";
    const std::string where = state_ == State::metadata_value ? "metadata '" + shown(metadata_key_) + "'"
                              : name_.empty()                 ? "the header"
                                                              : "'" + shown(name_) + "'";
    const char* const part = state_ == State::dtype                                     ? " (dtype)"
                             : state_ == State::shape || state_ == State::sizes         ? " (shape)"
                             : state_ == State::offsets || state_ == State::offset_list ? " (data_offsets)"
                                                                                        : "";
    fail_at(Site::here(), "safetensors: ", path_, ": ", where, part, " is ", what, ", expected ", expected);
  }

  void add_entry() {
    const char* const missing = !dtype_ ? "dtype" : !sizes_ ? "shape" : !offsets_ ? "data_offsets" : nullptr;
    check(!missing, "safetensors: ", path_, ": tensor '", shown(name_), "' has no ", missing ? missing : "");
    const uint64_t begin = (*offsets_)[0], end = (*offsets_)[1];
    check(begin <= end, "safetensors: ", path_, ": tensor '", shown(name_), "' ends at ", end,
          " before it begins at ", begin);
    // The product is checked here, zero sizes not excusing the others; Shape would check it too, without the
    // names.
    uint64_t bytes = integer_ ? integer_->bytes : size_of(*dtype_), largest = bytes;
    bool overflow = false;
    for (const int64_t size : *sizes_) {
      overflow |= __builtin_mul_overflow(largest, std::max<uint64_t>(uint64_t(size), 1), &largest);
      bytes *= uint64_t(size);
    }
    overflow |= largest > uint64_t(INT64_MAX);
    check(!overflow, "safetensors: ", path_, ": the shape of tensor '", shown(name_), "' overflows");
    check(bytes == end - begin, "safetensors: ", path_, ": tensor '", shown(name_), "' has ", end - begin,
          " bytes, expected ", bytes, " from its dtype and shape");
    entries_.push_back({name_, *dtype_, Shape(std::span<const int64_t>(*sizes_)), begin, bytes, integer_});
  }

  const std::string& path_;
  std::vector<SafetensorsEntry>& entries_;
  Metadata& metadata_;
  State state_ = State::start;
  std::map<std::string, int> names_;
  std::string name_, metadata_key_;
  bool is_metadata_ = false;
  std::optional<DType> dtype_;
  const FileInteger* integer_ = nullptr;  // what dtype_ is read from, if it is not in the file itself
  std::optional<std::vector<int64_t>> sizes_;
  std::optional<std::vector<uint64_t>> offsets_;
};

/// The entries lie one after the other, from the first byte of the data to the last.
void check_cover(const std::string& path, std::vector<SafetensorsEntry>& entries, uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  uint64_t at = 0;
  for (const SafetensorsEntry& entry : entries) {
    check(entry.offset == at, "safetensors: ", path, ": tensor '", shown(entry.name), "' begins at ",
          entry.offset, " of the data, expected ", at,
          entry.offset < at ? " (it overlaps another)" : " (there is a hole)");
    check(entry.bytes <= data_bytes - at, "safetensors: ", path, ": tensor '", shown(entry.name),
          "' ends at ", at + entry.bytes, " of the data, which has ", data_bytes,
          " bytes: the file is cut short, as by an unfinished download");
    at += entry.bytes;
  }
  check(at == data_bytes, "safetensors: ", path, ": ", data_bytes - at, " bytes follow the last tensor");
}

}  // namespace

const char* safetensors_name(DType dtype) {
  return std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                      [&](const DTypeName& known) { return known.dtype == dtype; })
      ->name;
}

void parse_safetensors_header(const std::string& path, std::string_view header, uint64_t data_bytes,
                              std::vector<SafetensorsEntry>& entries, Metadata& metadata) {
  // The JSON parser would skip a byte order mark and take a NUL for the end.
  check(!header.empty() && header[0] == '{', "safetensors: ", path,
        ": the header does not begin with '{'; the file is damaged or not in this format");
  check(header.find('\0') == std::string_view::npos, "safetensors: ", path, ": the header holds a NUL byte");
  HeaderEvents events(path, entries, metadata);
  nlohmann::json::sax_parse(header.begin(), header.end(), &events);
  check_cover(path, entries, data_bytes);
}

}  // namespace tessera::io
