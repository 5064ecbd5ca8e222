#pragma once

#include <cstddef>
#include <memory>

namespace tessera {

/// Recorded work. Its destructor waits for launches that are still running.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch() = 0;
  virtual size_t nodes() const = 0;
};

/// What Captured needs of a device: CUDA's stream capture, or a test's own.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  /// From here on, what is issued to the device's stream is recorded and does not run.
  virtual void begin() = 0;
  virtual std::unique_ptr<Graph> end() = 0;
  /// Instead of end(), or after end() threw: the stream runs work again.
  virtual void abandon() noexcept = 0;
  /// Copies inside the device, in stream order. Not while recording.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
};

}  // namespace tessera
