#include "runtime/call_site.h"

#include <mutex>
#include <unordered_set>

namespace tessera {

std::string CallSite::text() const {
  std::string text;
  if (site.file) text += std::string("; called at ") + site.file + ":" + std::to_string(site.line);
  if (module && *module) text += std::string(text.empty() ? "; in " : " in ") + module;
  return text;
}

const char* intern_name(const std::string& name) {
  static std::mutex mutex;
  static auto* const names = new std::unordered_set<std::string>;  // never freed: messages point into it
  const std::lock_guard lock(mutex);
  return names->insert(name).first->c_str();
}

}  // namespace tessera
