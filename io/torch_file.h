#pragma once

#include <map>
#include <memory>
#include <set>

#include "io/file.h"
#include "io/unpickle.h"
#include "tensor/tensor.h"

/// The format of torch.save since PyTorch 1.6: a zip archive with a pickle of the objects and an entry for
/// each storage, neither compressed nor encrypted. Read by libzip, whose consistency checks are on; the
/// pickle by io/unpickle.h. Without libzip in the build every call throws and says so.

namespace tessera::io {

class ZipArchive;

class TorchFile {
 public:
  explicit TorchFile(const std::string& path) : TorchFile(InputFile(path)) {}
  /// Throws, naming file, entry and, within the pickle, offset. Every storage that a tensor names is there
  /// with exactly its bytes.
  explicit TorchFile(InputFile file);
  ~TorchFile();
  TorchFile(TorchFile&&) noexcept;

  const std::string& path() const;
  const std::vector<PickledTensor>& entries() const { return tensors_; }
  /// The other contents of the dictionary, as read_state_dict names them.
  const std::vector<std::string>& others() const { return others_; }
  /// The elements in row-major order, packed, in host memory of their own; the checksum of its storage is
  /// verified. A storage in which several tensors lie is read once: it is held from the first of them to the
  /// last. Throws if there is none of that name. One thread at a time.
  Tensor load(const std::string& name) const;

 private:
  std::unique_ptr<ZipArchive> archive_;
  std::string folder_;  // of the archive's entries: "model/"
  std::vector<PickledTensor> tensors_;
  std::vector<std::string> others_;
  std::map<std::string, size_t> index_;  // of tensors_
  /// A storage with several tensors: those that were not loaded yet, and its bytes once one was.
  struct Shared {
    std::set<std::string> missing;
    Tensor whole;
  };
  mutable std::map<std::string, Shared> shared_;
};

/// True if the file begins as one of torch.save, of any PyTorch, does. A file of safetensors begins with
/// eight bytes of a length, which may be "PK\3\4" as well, but then goes on with zeros, as a zip archive does
/// not.
bool is_torch_file(const InputFile& file);

/// True for a build with libzip.
bool has_torch_files();

}  // namespace tessera::io
