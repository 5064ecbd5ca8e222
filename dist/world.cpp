#include "dist/world.h"

#include "comm/lane.h"
#include "comm/nccl.h"
#include "dist/launch.h"

namespace tessera::dist {

World::World(comm::Communicator host, comm::Communicator data, Place place)
    : place_(std::move(place)), host_(std::move(host)), data_(std::move(data)) {}

World World::join(const std::string& what, std::function<void(const std::string& message)> lost) {
  end_with_launcher();
  const Place place = own_place();
  if (place.size == 1) return World();
  const comm::Communicator host =
      comm::connect_tcp({.rendezvous = rendezvous_options(place, what), .lost = std::move(lost)});
  return World(host, host, place);
}

void World::check_own_gpu(Device device) const {
  if (size() > 1) check_own_gpus(host_.gather_texts(comm::gpu_uuid(device)));
}

const comm::Communicator& World::data(Device device) const {
  if (data_.takes(device)) return data_;
  if (!*gpu_) {
    check(comm::nccl_lacks().empty(), "several ranks on ", device.name(), " need NCCL: ", comm::nccl_lacks(),
          "; or train on the CPU (--device cpu)");
    check_own_gpu(device);
    gpu_->emplace(comm::connect_nccl(host_, device));
  }
  return **gpu_;
}

std::shared_ptr<comm::Lane> World::lane() const {
  std::shared_ptr<comm::Lane> lane = lane_->lock();
  if (!lane) *lane_ = lane = std::make_shared<comm::Lane>(data(Device::cpu()), Device::cpu());
  return lane;
}

}  // namespace tessera::dist
