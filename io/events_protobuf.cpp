#include "events.pb.h"
#include "io/events_internal.h"

namespace tessera::io::events {

bool available() {
  return true;
}

std::string version_message(double wall_time) {
  Event event;
  event.set_wall_time(wall_time);
  event.set_file_version("brain.Event:2");
  return event.SerializeAsString();
}

std::string scalar_message(std::string_view tag, int64_t step, float value, double wall_time) {
  Event event;
  event.set_wall_time(wall_time);
  event.set_step(step);
  Summary::Value* const scalar = event.mutable_summary()->add_value();
  scalar->set_tag(std::string(tag));
  scalar->set_simple_value(value);
  return event.SerializeAsString();
}

}  // namespace tessera::io::events
