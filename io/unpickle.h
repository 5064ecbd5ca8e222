#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/layout.h"

/// The names, shapes and places of the tensors of a state dictionary, or of one tensor, that torch.save
/// pickled.
///
/// A pickle is a program; this machine knows the 28 instructions (of protocol 2) that state dictionaries are
/// made of and fourteen names: collections.OrderedDict, torch._utils._rebuild_tensor_v2, _rebuild_tensor_v3
/// and _rebuild_parameter, the storages of the dtypes there are, and for f8e4m3, which has none in PyTorch,
/// torch.storage.UntypedStorage and torch.float8_e4m3fn. None of them is called: they say what an object is.
/// Any other instruction, name, or use of an object as what it is not, is an error that names the offset.

namespace tessera::io {

/// A tensor: elements of storage `storage`, which has `storage_elements` of the dtype.
struct PickledTensor {
  std::string name;
  DType dtype = DType::f32;
  Layout layout;
  std::string storage;
  uint64_t storage_elements = 0;
};

/// The name of a tensor that was saved by itself, without a dictionary.
inline constexpr const char* kBareTensor = "tensor";

/// The tensors of a dictionary in its order; those of dictionaries in it as "outer.inner"; a bare tensor as
/// kBareTensor. Other contents of a dictionary are left out and, if `others` is given, named there: "epoch
/// (an integer)". Every view lies within its storage and has no more elements than it. Throws, naming `path`
/// and the offset in the pickle. Memory: at most 48 MiB beyond the pickle's size, by counting.
std::vector<PickledTensor> read_state_dict(const std::string& path, std::string_view pickle,
                                           std::vector<std::string>* others = nullptr);

}  // namespace tessera::io
