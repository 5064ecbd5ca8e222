#include <zip.h>

#include <algorithm>
#include <memory>

#include "io/safetensors_internal.h"
#include "io/torch_file.h"
#include "io/zip_internal.h"

namespace tessera::io {

/// Named, as ZipArchive::Handle has a member of it.
namespace zip_internal {

/// A file as libzip reads it: through InputFile, which refuses to read past the end it saw when it was
/// opened.
struct Source {
  const InputFile& file;
  uint64_t at = 0;
  std::string failed;  // what InputFile threw
  zip_error_t error{};

  static zip_int64_t call(void* self, void* data, zip_uint64_t length, zip_source_cmd_t command) {
    return static_cast<Source*>(self)->handle(data, length, command);
  }

  zip_int64_t handle(void* data, zip_uint64_t length, zip_source_cmd_t command) {
    switch (command) {
      case ZIP_SOURCE_OPEN:
        at = 0;
        return 0;
      case ZIP_SOURCE_READ:
        return read(data, length);
      case ZIP_SOURCE_SEEK: {
        const zip_int64_t next = zip_source_seek_compute_offset(at, file.size(), data, length, &error);
        if (next >= 0) at = uint64_t(next);
        return next < 0 ? -1 : 0;
      }
      case ZIP_SOURCE_TELL:
        return zip_int64_t(at);
      case ZIP_SOURCE_STAT: {
        auto* const stat = ZIP_SOURCE_GET_ARGS(zip_stat_t, data, length, &error);
        if (!stat) return -1;
        zip_stat_init(stat);
        stat->size = file.size();
        stat->valid |= ZIP_STAT_SIZE;
        return sizeof *stat;
      }
      case ZIP_SOURCE_ERROR:
        return zip_error_to_data(&error, data, length);
      case ZIP_SOURCE_CLOSE:
      case ZIP_SOURCE_FREE:
        return 0;
      case ZIP_SOURCE_SUPPORTS:
        return zip_source_make_command_bitmap(ZIP_SOURCE_OPEN, ZIP_SOURCE_READ, ZIP_SOURCE_CLOSE,
                                              ZIP_SOURCE_STAT, ZIP_SOURCE_ERROR, ZIP_SOURCE_FREE,
                                              ZIP_SOURCE_SEEK, ZIP_SOURCE_TELL, ZIP_SOURCE_SUPPORTS, -1);
      default:
        zip_error_set(&error, ZIP_ER_OPNOTSUPP, 0);
        return -1;
    }
  }

  zip_int64_t read(void* data, zip_uint64_t length) {
    const uint64_t bytes = std::min<uint64_t>(length, file.size() - std::min(at, file.size()));
    try {
      if (bytes) file.read(at, data, size_t(bytes));
    } catch (const Error& caught) {  // nothing may be thrown through a library of C
      failed = caught.what();
      zip_error_set(&error, ZIP_ER_READ, 0);
      return -1;
    }
    at += bytes;
    return zip_int64_t(bytes);
  }
};

}  // namespace zip_internal

namespace {

using zip_internal::Source;

uint64_t little(const std::string& bytes, size_t at, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) value = value << 8 | uint8_t(bytes[at + i]);
  return value;
}

/// libzip makes room for every entry of the directory before it looks at them; a directory is limited here to
/// 8 MiB (180,000 names), found as the format says: from the end of the file.
void check_directory(const InputFile& file) {
  constexpr uint64_t kEnd = 22, kMost = uint64_t{8} << 20, kLongestComment = 65535;
  std::string tail(size_t(std::min<uint64_t>(file.size(), kEnd + kLongestComment)), '\0');
  const uint64_t begin = file.size() - tail.size();
  file.read(begin, tail.data(), tail.size());
  const size_t place = tail.size() < kEnd ? std::string::npos : tail.rfind("PK\5\6", tail.size() - kEnd);
  check(place != std::string::npos, "read: ", file.path(),
        " is cut short: the end record of its zip archive is missing, as after an unfinished download or a "
        "save "
        "that was killed");
  uint64_t bytes = little(tail, place + 12, 4), entries = little(tail, place + 10, 2);
  if ((bytes == 0xFFFFFFFF || entries == 0xFFFF) && begin + place >= 20) {
    std::string locator(20, '\0'), record(56, '\0');
    file.read(begin + place - 20, locator.data(), locator.size());
    const uint64_t at = little(locator, 8, 8);
    if (locator.starts_with("PK\6\7") && at <= file.size() && file.size() - at >= record.size()) {
      file.read(at, record.data(), record.size());
      entries = little(record, 32, 8);
      bytes = little(record, 40, 8);
    }
  }
  check(bytes <= kMost && entries <= kMost / 46, "read: ", file.path(),
        ": the directory of its zip archive has ", bytes, " bytes and ", entries,
        " entries, more than a file of torch.save has");
}

}  // namespace

struct ZipArchive::Handle {
  explicit Handle(InputFile given) : file(std::move(given)), source{file} {}
  ~Handle() {
    if (zip) zip_discard(zip);
  }
  [[noreturn]] void fail(const std::string& what, const std::string& why) const {
    fail_at(Site::here(), "read: ", file.path(), ": ", what, ": ",
            source.failed.empty() ? why : source.failed);
  }

  InputFile file;
  Source source;
  zip_t* zip = nullptr;
};

ZipArchive::ZipArchive(InputFile file, Entries allowed) : handle_(nullptr) {
  check_directory(file);
  auto handle = std::make_unique<Handle>(std::move(file));
  zip_error_t error;
  zip_error_init(&error);
  const auto reason = [&] {
    std::string text = zip_error_strerror(&error);
    zip_error_fini(&error);
    return text;
  };
  zip_source_t* const source = zip_source_function_create(Source::call, &handle->source, &error);
  if (!source) handle->fail("its zip archive cannot be read", reason());
  handle->zip = zip_open_from_source(source, ZIP_RDONLY | ZIP_CHECKCONS, &error);
  if (!handle->zip) {
    zip_source_free(source);
    handle->fail("its zip archive is damaged", reason());
  }
  zip_error_fini(&error);
  const zip_int64_t count = zip_get_num_entries(handle->zip, 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    zip_stat_t stat;
    if (zip_stat_index(handle->zip, zip_uint64_t(i), ZIP_FL_ENC_RAW, &stat) != 0)
      handle->fail("an entry of its zip archive is damaged", zip_strerror(handle->zip));
    constexpr zip_uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE |
                                     ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
    const std::string name = (stat.valid & ZIP_STAT_NAME) ? stat.name : "";
    const std::string what = "entry '" + shown(name) + "' of its zip archive";
    if ((stat.valid & kNeeded) != kNeeded || name.empty()) handle->fail(what, "is incomplete");
    if (stat.encryption_method != ZIP_EM_NONE) handle->fail(what, "is encrypted");
    if (stat.comp_method == ZIP_CM_DEFLATE && allowed == Entries::stored_or_deflated) {
      // The most that deflate can make of them (zlib, "Technical details"): more bytes are no proper size,
      // and must not be allocated.
      constexpr uint64_t kMostRatio = 1032;
      if (stat.comp_size > handle->file.size() || stat.size / kMostRatio > stat.comp_size)
        handle->fail(what, "is larger than its compressed bytes can be");
    } else {
      if (stat.comp_method != ZIP_CM_STORE || stat.comp_size != stat.size)
        handle->fail(what, "is compressed");
      if (stat.size > handle->file.size()) handle->fail(what, "is larger than the file");
    }
    if (!index_.emplace(name, entries_.size()).second) handle->fail(what, "occurs twice");
    entries_.push_back({name, stat.size});
  }
  handle_ = handle.release();
}

ZipArchive::~ZipArchive() {
  delete handle_;
}

const std::string& ZipArchive::path() const {
  return handle_->file.path();
}

const ZipArchive::Entry* ZipArchive::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void ZipArchive::read(const Entry& entry, void* to) const {
  const auto index = zip_uint64_t(&entry - entries_.data());
  const std::string what = "entry '" + shown(entry.name) + "' of its zip archive";
  zip_file_t* const file = zip_fopen_index(handle_->zip, index, 0);
  if (!file) handle_->fail(what, zip_strerror(handle_->zip));
  uint64_t done = 0;
  zip_int64_t got = 1;
  while (done < entry.bytes && got > 0) {
    got = zip_fread(file, static_cast<char*>(to) + done, entry.bytes - done);
    if (got > 0) done += uint64_t(got);
  }
  char beyond = 0;
  if (got >= 0) got = zip_fread(file, &beyond, 1);  // the checksum is compared at the end
  const std::string why = got < 0 ? zip_file_strerror(file) : "";
  zip_fclose(file);
  if (!why.empty()) handle_->fail(what, why);
  if (done != entry.bytes || got != 0) handle_->fail(what, "has another size than its directory says");
}

bool has_torch_files() {
  return true;
}

}  // namespace tessera::io
