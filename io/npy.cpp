#include "io/npy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "io/file_integer_internal.h"
#include "io/safetensors_internal.h"
#include "io/zip_internal.h"

namespace tessera::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr uint64_t kLargestNpyHeader =
    65'535;                        // what version 1.0 can say, and far more than eight sizes need
constexpr size_t kAlignment = 64;  // of the first element in the file

struct DescrName {
  const char* descr;
  DType dtype;
};
constexpr std::array<DescrName, 7> kDescrs = {{{"<f8", DType::f64},
                                               {"<f4", DType::f32},
                                               {"<f2", DType::f16},
                                               {"<i8", DType::i64},
                                               {"<i4", DType::i32},
                                               {"|u1", DType::u8},
                                               {"|b1", DType::boolean}}};

struct Header {
  DType dtype;
  const FileInteger* integer;  // what the elements are in the file if they are not of that dtype, else null
  bool fortran;
  Shape shape;
};

/// The header is a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }. This reads
/// that form and no other.
class HeaderParser {
 public:
  HeaderParser(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  Header parse() {
    std::optional<DType> dtype;
    std::optional<bool> fortran;
    std::optional<Shape> shape;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      check(key == "descr" || key == "fortran_order" || key == "shape", "npy: ", path_,
            ": the header has an unknown key '", key, "'");
      check(!(key == "descr"   ? dtype.has_value()
              : key == "shape" ? shape.has_value()
                               : fortran.has_value()),
            "npy: ", path_, ": the header has the key '", key, "' twice");
      if (key == "descr")
        dtype = descr();
      else if (key == "fortran_order")
        fortran = truth();
      else
        shape = sizes();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    check(at_ == text_.size(), "npy: ", path_, ": the header goes on after '}' at character ", at_);
    check(dtype && fortran && shape, "npy: ", path_, ": the header has no ",
          !dtype     ? "descr"
          : !fortran ? "fortran_order"
                     : "shape");
    return {*dtype, integer_, *fortran, *shape};
  }

 private:
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\n\r", at_), text_.size()); }
  bool accept(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    check(accept(c), "npy: ", path_, ": the header has no '", c, "' at character ", at_,
          "; the file is damaged or not in this format");
  }

  std::string quoted() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    check(quote == '\'' || quote == '"', "npy: ", path_, ": the header has no quoted text at character ",
          at_);
    const size_t end = text_.find(quote, at_ + 1);
    const std::string_view inside =
        text_.substr(at_ + 1, end == std::string_view::npos ? end : end - at_ - 1);
    const bool plain =
        std::all_of(inside.begin(), inside.end(), [](char c) { return c >= ' ' && c <= '~' && c != '\\'; });
    check(end != std::string_view::npos && plain && inside.size() <= 100, "npy: ", path_,
          ": the header has no proper text at character ", at_);
    at_ = end + 1;
    return std::string(inside);
  }

  DType descr() {
    skip_space();
    check(at_ == text_.size() || text_[at_] != '[', "npy: ", path_,
          " holds a structured array (records); save its columns one by one");
    const std::string descr = quoted();
    const auto* const found = std::find_if(kDescrs.begin(), kDescrs.end(),
                                           [&](const DescrName& known) { return descr == known.descr; });
    const char* const hint = descr.starts_with('>') ? ": big-endian; save it with .astype('<' + ...) first"
                             : descr.find('O') != std::string::npos
                                 ? ": Python objects (a pickle), which are never loaded"
                             : descr.find('V') != std::string::npos
                                 ? ": raw bytes, as NumPy writes bfloat16 and float8; save it as "
                                   "float32, or as safetensors"
                                 : "; expected <f8, <f4, <f2, <i8, <i4, <i2, |i1, <u8, <u4, <u2, |u1 or |b1";
    integer_ = found == kDescrs.end() ? find_file_integer(&FileInteger::npy, descr) : nullptr;
    check(integer_ || found != kDescrs.end(), "npy: ", path_, ": elements of type '", descr,
          "' are not supported", hint);
    return integer_ ? integer_->dtype : found->dtype;
  }

  bool truth() {
    skip_space();
    for (const auto& [word, value] : {std::pair("True", true), std::pair("False", false)}) {
      if (!text_.substr(at_).starts_with(word)) continue;
      at_ += std::strlen(word);
      return value;
    }
    fail_at(Site::here(), "npy: ", path_, ": fortran_order is neither True nor False");
  }

  Shape sizes() {
    std::vector<int64_t> sizes;
    bool comma = true;
    expect('(');
    while (!accept(')')) {
      check(comma, "npy: ", path_, ": the shape has no ',' at character ", at_);
      check(sizes.size() < size_t(kMaxRank), "npy: ", path_, ": the shape has more than ", kMaxRank,
            " dimensions");
      sizes.push_back(number());
      comma = accept(',');
    }
    check(sizes.size() != 1 || comma, "npy: ", path_, ": the shape is a number, not a tuple");
    int64_t largest = 1;
    for (const int64_t size : sizes)
      check(!__builtin_mul_overflow(largest, std::max<int64_t>(size, 1), &largest), "npy: ", path_,
            ": the shape overflows 63 bits");
    return Shape(std::span<const int64_t>(sizes));
  }

  int64_t number() {
    skip_space();
    const size_t begin = at_;
    int64_t value = 0;
    bool overflow = false;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      overflow |= __builtin_mul_overflow(value, int64_t{10}, &value);
      overflow |= __builtin_add_overflow(value, int64_t(text_[at_] - '0'), &value);
    }
    check(at_ > begin && !overflow, "npy: ", path_, ": the shape has ",
          overflow ? "a size of more than 63 bits" : "no whole number of 0 and more", " at character ",
          begin);
    return value;
  }

  const std::string& path_;
  std::string_view text_;
  size_t at_ = 0;
  const FileInteger* integer_ = nullptr;
};

}  // namespace

void save_npy(const std::string& path, const Tensor& tensor) {
  check(tensor.defined(), "npy: ", path, ": the tensor is undefined");
  const auto* const known = std::find_if(
      kDescrs.begin(), kDescrs.end(), [&](const DescrName& descr) { return descr.dtype == tensor.dtype(); });
  check(known != kDescrs.end(), "npy: ", path, ": NumPy has no ", tensor.dtype(),
        "; convert with to(DType::f32) first, or save as safetensors");
  std::string shape = "(";
  for (int dim = 0; dim < tensor.rank(); ++dim) shape += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  shape += tensor.rank() == 1 ? ",)" : ")";
  std::string header =
      std::string("{'descr': '") + known->descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
  // NumPy leaves room to grow the first dimension to 21 digits in place, pads with at least one space, and
  // ends the line.
  if (tensor.rank() > 0) header.append(21 - std::to_string(tensor.size(0)).size(), ' ');
  const size_t before = kMagic.size() + 4;
  header.append(kAlignment - (before + header.size() + 1) % kAlignment, ' ');
  header += '\n';
  std::string head(kMagic);
  head += {'\1', '\0', char(header.size() & 0xFF), char(header.size() >> 8)};
  head += header;

  const Tensor host = file_order(tensor);
  AtomicFile file(path, head.size() + host.bytes());
  file.write(head);
  file.write(host.raw(), host.bytes());
  file.publish();
}

Tensor load_npy(const std::string& path, Device device) {
  return load_npy(InputFile(path), device);
}

Tensor load_npy(const InputFile& file, Device device) {
  const std::string& path = file.path();
  std::array<unsigned char, 12> start{};
  const uint64_t given = std::min<uint64_t>(file.size(), start.size());
  file.read(0, start.data(), size_t(given));
  check(given >= 10 && std::memcmp(start.data(), kMagic.data(), kMagic.size()) == 0, "npy: ", path,
        " does not begin like an .npy file",
        start[0] == 'P' && start[1] == 'K' ? " (a zip archive: an .npz? read it with load_npz)" : "");
  const int major = start[6], minor = start[7];
  check(major >= 1 && major <= 3 && minor == 0, "npy: ", path, " is of version ", major, ".", minor,
        "; expected 1.0, 2.0 or 3.0");
  const uint64_t header_at = major == 1 ? 10 : 12;
  check(file.size() >= header_at, "npy: ", path, " is cut short: ", file.size(), " bytes");
  uint64_t length = uint64_t(start[8]) | uint64_t(start[9]) << 8;
  if (major > 1) length |= uint64_t(start[10]) << 16 | uint64_t(start[11]) << 24;
  check(length <= kLargestNpyHeader, "npy: ", path, ": the header claims ", length, " bytes, more than ",
        kLargestNpyHeader);
  check(length <= file.size() - header_at, "npy: ", path, ": the header claims ", length, " bytes, but only ",
        file.size() - header_at, " follow: the file is cut short");
  std::string text(size_t(length), '\0');
  file.read(header_at, text.data(), text.size());
  const Header header = HeaderParser(path, text).parse();

  uint64_t bytes = 0;
  const uint64_t each = header.integer ? header.integer->bytes : size_of(header.dtype);
  const bool overflow = __builtin_mul_overflow(uint64_t(header.shape.count()), each, &bytes);
  const uint64_t data_at = header_at + length, rest = file.size() - data_at;
  check(!overflow && bytes == rest, "npy: ", path, " has ", rest, " bytes of elements, expected ",
        overflow ? std::string("more than 2^64") : std::to_string(bytes), " for ", header.dtype, header.shape,
        rest < bytes || overflow ? ": the file is cut short" : ": something follows the array");
  Tensor host;
  if (header.integer) {
    host = read_file_integers(file, data_at, *header.integer, header.shape, "array");
  } else {
    host = Tensor::empty_packed(header.shape, header.dtype);
    file.read(data_at, host.raw(), size_t(bytes));
  }
  check_bools(host, path, "array");
  if (!header.fortran) return on_device(host, device);
  Layout columns = host.layout();
  int64_t stride = 1;
  for (int dim = 0; dim < columns.rank(); ++dim) {
    columns.strides[size_t(dim)] = stride;
    stride *= columns.shape[dim];
  }
  return Tensor::view_of(host.storage(), columns, header.dtype).clone().to(device);
}

std::map<std::string, Tensor> load_npz(const std::string& path, Device device) {
  constexpr std::string_view kEnd = ".npy";
  const ZipArchive archive(InputFile(path), ZipArchive::Entries::stored_or_deflated);
  std::map<std::string, Tensor> arrays;
  for (const ZipArchive::Entry& entry : archive.entries()) {
    check(entry.name.ends_with(kEnd), "npz: ", path, ": its entry '", shown(entry.name),
          "' is no .npy file; not an archive of numpy.savez");
    std::string bytes(size_t(entry.bytes), '\0');
    archive.read(entry, bytes.data());
    arrays.emplace(entry.name.substr(0, entry.name.size() - kEnd.size()),
                   load_npy(InputFile(path + ": " + shown(entry.name), bytes), device));
  }
  return arrays;
}

}  // namespace tessera::io
