#pragma once

#include <memory>
#include <string>

#include "runtime/allocator.h"
#include "runtime/device.h"

namespace tessera {

/// What a Device points to. Never destroyed: tensors in static storage may outlive main().
struct DeviceContext {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  std::string name;
  CardInfo card;
  StreamHandle stream = nullptr;
  StreamHandle copy_stream = nullptr;
  bool capturing = false;
  std::unique_ptr<Allocator> allocator;
};

}  // namespace tessera
