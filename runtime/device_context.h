#pragma once

#include <atomic>
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
  std::atomic<bool> capturing = false;  // by the thread that has the CaptureSession
  std::unique_ptr<Allocator> allocator;
};

}  // namespace tessera
