#include "io/torch_file.h"

#include "io/safetensors_internal.h"
#include "io/zip_internal.h"

namespace tessera::io {
namespace {

/// What begins the format that came before: a pickled magic number.
constexpr std::string_view kOldMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);

std::string start_of(const InputFile& file) {
  std::string start(size_t(std::min<uint64_t>(file.size(), kOldMagic.size())), '\0');
  file.read(0, start.data(), start.size());
  return start;
}

bool is_zip(const std::string& start) {
  return start.starts_with("PK\3\4") && start.find_first_not_of('\0', 4) < 8;
}

void check_format(const InputFile& file) {
  const std::string start = start_of(file);
  check(start != kOldMagic, "read: ", file.path(),
        " was saved by PyTorch before 1.6, in a format that is not read; load it with torch.load and save it "
        "again");
  check(is_zip(start), "read: ", file.path(),
        " does not begin as a zip archive does: not a file of torch.save, or damaged");
}

std::string text_of(const ZipArchive& archive, const ZipArchive::Entry& entry) {
  std::string text(size_t(entry.bytes), '\0');
  archive.read(entry, text.data());
  return text;
}

}  // namespace

bool is_torch_file(const InputFile& file) {
  const std::string start = start_of(file);
  return start == kOldMagic || is_zip(start);
}

TorchFile::TorchFile(InputFile file) {
  check_format(file);
  archive_ = std::make_unique<ZipArchive>(std::move(file));
  constexpr std::string_view kPickle = "/data.pkl";
  const ZipArchive::Entry* pickle = nullptr;
  for (const ZipArchive::Entry& entry : archive_->entries()) {
    if (!entry.name.ends_with(kPickle) || entry.name.find('/') != entry.name.size() - kPickle.size())
      continue;
    check(!pickle, "read: ", path(), ": two entries of its zip archive are pickles: '",
          pickle ? shown(pickle->name) : "", "' and '", shown(entry.name), "'");
    pickle = &entry;
  }
  check(pickle != nullptr, "read: ", path(),
        ": its zip archive has no entry data.pkl: not a file of torch.save");
  folder_ = pickle->name.substr(0, pickle->name.size() - kPickle.size() + 1);
  if (const auto* const order = archive_->find(folder_ + "byteorder")) {
    const std::string text = text_of(*archive_, *order);
    check(text == "little", "read: ", path(), ": its numbers are '", shown(text),
          "' endian, expected little");
  }
  tensors_ = read_state_dict(path(), text_of(*archive_, *pickle), &others_);
  std::map<std::string, size_t> tensors_in;
  for (const PickledTensor& tensor : tensors_) tensors_in[tensor.storage] += 1;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const PickledTensor& tensor = tensors_[i];
    index_.emplace(tensor.name, i);
    if (tensors_in[tensor.storage] > 1) shared_[tensor.storage].missing.insert(tensor.name);
    const ZipArchive::Entry* const entry = archive_->find(folder_ + "data/" + tensor.storage);
    check(entry != nullptr, "read: ", path(), ": tensor '", shown(tensor.name), "' lies in storage '",
          shown(tensor.storage), "', which its zip archive has not");
    uint64_t bytes = 0;
    const bool fits = !__builtin_mul_overflow(tensor.storage_elements, size_of(tensor.dtype), &bytes) &&
                      bytes == entry->bytes;
    check(fits, "read: ", path(), ": storage '", shown(tensor.storage), "' of tensor '", shown(tensor.name),
          "' has ", entry->bytes, " bytes, expected ", tensor.storage_elements, " elements of ",
          tensor.dtype);
  }
}

TorchFile::~TorchFile() = default;
TorchFile::TorchFile(TorchFile&&) noexcept = default;

const std::string& TorchFile::path() const {
  return archive_->path();
}

Tensor TorchFile::load(const std::string& name) const {
  const auto found = index_.find(name);
  check(found != index_.end(), "read: ", path(), " has no tensor '", shown(name), "'");
  const PickledTensor& tensor = tensors_[found->second];
  const auto shared = shared_.find(tensor.storage);
  Tensor whole = shared != shared_.end() ? shared->second.whole : Tensor();
  if (!whole.defined()) {
    whole = Tensor::empty_packed({int64_t(tensor.storage_elements)}, tensor.dtype, Device::cpu());
    archive_->read(*archive_->find(folder_ + "data/" + tensor.storage), whole.raw());
    if (shared == shared_.end()) check_bools(whole, path(), name);
  }
  const Tensor view = Tensor::view_of(whole.storage(), tensor.layout, tensor.dtype);
  if (shared == shared_.end())
    // A view of a larger storage would keep all of it.
    return view.layout().is_packed() && view.count() == whole.count() ? view : view.clone().packed();
  Shared& rest = shared->second;
  rest.missing.erase(name);
  rest.whole = rest.missing.empty() ? Tensor() : whole;
  const Tensor own = view.clone().packed();
  check_bools(own, path(), name);
  return own;
}

}  // namespace tessera::io
