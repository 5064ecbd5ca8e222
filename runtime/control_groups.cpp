#include "runtime/control_groups_internal.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

bool lists(const std::string& text, const std::string& word) {
  const auto words = split(text, ',');
  return std::ranges::find(words, word) != words.end();
}

/// Blanks, tabs, line ends and backslashes are three octal digits in mountinfo.
std::string unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool code =
        text[i] == '\\' && i + 3 < text.size() && text.find_first_not_of("01234567", i + 1) >= i + 4;
    out += code ? char((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')) : text[i];
    if (code) i += 3;
  }
  return out;
}

/// The part of a group's path that lies below the part of the hierarchy that is mounted. Without a common
/// start (a container sees its group as the root, or the path of the host) the mount is the group.
std::string below(const std::string& group, const std::string& mounted) {
  if (group.starts_with("/..")) return "";
  if (mounted == "/") return group;
  if (group == mounted) return "";
  return group.starts_with(mounted + "/") ? group.substr(mounted.size()) : "";
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& root, const char* controller) {
  std::vector<ControlGroup> groups;
  // Which group the process is in, in the unified hierarchy (v2) and in that of the controller (v1).
  std::string unified, own;
  std::ifstream own_groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(own_groups, line);) {  // "4:memory:/path", "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) unified = line.substr(second + 1);
    if (lists(controllers, controller)) own = line.substr(second + 1);
  }
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto fields = split(line.substr(0, dash), ' '), kind = split(line.substr(dash + 3), ' ');
    if (fields.size() < 5 || kind.size() < 3) continue;
    const bool is_unified = kind[0] == "cgroup2" && !unified.empty();
    const bool is_own = kind[0] == "cgroup" && lists(kind[2], controller) && !own.empty();
    if (!is_unified && !is_own) continue;
    const fs::path mount = root + unescaped(fields[4]);
    // A limit binds all groups below it.
    std::error_code ignored;
    for (fs::path at = mount.string() + below(is_unified ? unified : own, unescaped(fields[3]));;
         at = at.parent_path()) {
      if (at.string().ends_with('/')) at = at.parent_path();
      if (fs::is_directory(at, ignored)) groups.push_back({at.string(), is_unified});
      if (at == mount || at.string().size() <= mount.string().size()) break;
    }
  }
  return groups;
}

}  // namespace tessera
