#include "sparsity/allocation_file.h"

#include <nlohmann/json.hpp>
#include <set>

#include "io/file.h"
#include "io/safetensors.h"

namespace tessera::sparsity {

std::vector<std::pair<std::string, double>> read_allocation(const std::string& path) {
  constexpr uint64_t kMost = uint64_t{16} << 20;
  using Json = nlohmann::ordered_json;
  std::set<std::string> keys;
  std::string twice;  // the parser keeps the place of the first and the value of the last
  const auto json = Json::parse(
      io::read_file(path, kMost),
      [&](int, Json::parse_event_t event, Json& value) {
        if (event == Json::parse_event_t::key && !keys.insert(value.get<std::string>()).second)
          twice = value.get<std::string>();
        return true;
      },
      false);
  check(json.is_object() && !json.empty(), "allocation: ", path,
        " is no JSON object of sparsities by module; expected one like {\"mlp.down_proj\": 0.6}");
  check(twice.empty(), "allocation: ", path, " has '", io::shown(twice), "' twice; name it once");
  std::vector<std::pair<std::string, double>> assigned;
  for (const auto& [name, value] : json.items()) {
    check(value.is_number() && value.get<double>() >= 0 && value.get<double>() < 1, "allocation: ", path,
          ": '", io::shown(name), "' is ", io::shown(value.dump()),
          "; expected a sparsity of 0 or more and less than 1");
    assigned.emplace_back(name, value.get<double>());
  }
  return assigned;
}

}  // namespace tessera::sparsity
