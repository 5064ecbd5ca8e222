#include "io/checkpoint.h"

#include <algorithm>
#include <array>
#include <set>

#include "autograd/gradient.h"
#include "io/checksum.h"
#include "io/safetensors_internal.h"
#include "tensor/equal.h"

namespace tessera::io {
namespace {

constexpr const char* kReserved = "tessera.";
constexpr const char* kFormatKey = "tessera.format";
constexpr const char* kFormat = "1";
constexpr const char* kChecksumKey = "tessera.checksum";
constexpr const char* kHash = "xxh3 ";
const std::string kNoDigits(Xxh3::kDigits, '0');

/// Where the digits of the whole's checksum lie in the head; npos unless the key stands there exactly once.
size_t checksum_place(const std::string& head) {
  const std::string before = std::string("\"") + kChecksumKey + "\":\"" + kHash;
  const size_t found = head.find(before);
  if (found == std::string::npos || head.find(before, found + 1) != std::string::npos)
    return std::string::npos;
  const size_t place = found + before.size();
  return head.size() - place > Xxh3::kDigits ? place : std::string::npos;
}

/// Of the head with its own digits as zeros.
std::string checksum_of(std::string head, size_t place) {
  head.replace(place, Xxh3::kDigits, kNoDigits);
  Xxh3 hash;
  hash.add(head);
  return hash.digits();
}

std::string checksum_of(const Tensor& packed) {
  Xxh3 hash;
  hash.add(packed.raw(), packed.bytes());
  return hash.digits();
}

/// Checks the head's checksum before anything in the header is used.
void check_head(const SafetensorsFile& file) {
  const auto format = file.metadata().find(kFormatKey);
  check(format != file.metadata().end() && file.metadata().contains(kChecksumKey),
        "checkpoint: ", file.path(), " has no ", kFormatKey, " and ", kChecksumKey,
        ": it is not a checkpoint of tessera; its tensors can be read with load_safetensors");
  check(format->second == kFormat, "checkpoint: ", file.path(), " has format ", shown(format->second),
        ", this program reads format ", kFormat, "; use the newer tessera that wrote it");
  const size_t place = checksum_place(file.head());
  const std::string stored =
      place == std::string::npos ? "no proper value" : file.head().substr(place, Xxh3::kDigits);
  const std::string computed = place == std::string::npos ? "" : checksum_of(file.head(), place);
  check(stored == computed, "checkpoint: ", file.path(), ": the header (bytes 0 to ", file.head().size(),
        ") is damaged: its XXH3-128 is ", computed, ", it says ", stored, "; load an older checkpoint");
}

Tensor read_verified(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  const auto stored = file.metadata().find(entry.name);
  check(stored != file.metadata().end(), "checkpoint: ", file.path(), ": tensor '", shown(entry.name),
        "' has no checksum; another program changed the file");
  Tensor tensor = read_entry(file.file(), entry);
  const std::string computed = kHash + checksum_of(tensor);
  check(stored->second == computed, "checkpoint: ", file.path(), ": tensor '", shown(entry.name), "' (bytes ",
        entry.offset, " to ", entry.offset + entry.bytes, ") is damaged: its checksum is ", computed,
        ", the header says ", shown(stored->second), "; load an older checkpoint");
  check_bools(tensor, file.path(), entry.name);
  return tensor;
}

bool is_proper(const Checkpoint::Scalar& scalar) {
  const auto reads_as = [&](auto value) { return leaf::parse_scalar(scalar.text, value); };
  Rng::State state;
  return scalar.type == "i64"      ? reads_as(int64_t{})
         : scalar.type == "u64"    ? reads_as(uint64_t{})
         : scalar.type == "f32"    ? reads_as(float{})
         : scalar.type == "f64"    ? reads_as(double{})
         : scalar.type == "bool"   ? reads_as(bool{})
         : scalar.type == "rng"    ? leaf::parse_rng(scalar.text, state)
         : scalar.type == "string" ? true
                                   : false;
}

Checkpoint::Scalar parse_value(const std::string& path, const std::string& name, const std::string& text) {
  const size_t space = text.find(' ');
  Checkpoint::Scalar scalar{text.substr(0, space), space == std::string::npos ? "" : text.substr(space + 1)};
  check(space != std::string::npos && is_proper(scalar), "checkpoint: ", path, ": the value of '", name,
        "', '", shown(text), "', is not a type and a value of it");
  return scalar;
}

}  // namespace

namespace leaf {

bool parse_rng(std::string_view text, Rng::State& state) {
  const size_t space = text.find(' ');
  return space != std::string_view::npos && parse(text.substr(0, space), state.seed) &&
         parse(text.substr(space + 1), state.offset);
}

std::string describe(const Checkpoint::Value& value) {
  if (const auto* const scalar = std::get_if<Checkpoint::Scalar>(&value)) return scalar->type;
  MessageStream text;
  const Tensor& tensor = std::get<Tensor>(value);
  text << tensor.dtype() << tensor.shape();
  return text.str();
}

const char* unwritable(const Tensor& tensor) {
  if (tensor.grad_state() && tensor.grad_state()->tape != 0)
    return "but the tensor is a result of a tape; detach() it";
  if (tensor.layout().is_expanded()) return "but the tensor is expanded; clone() it";
  return nullptr;
}

bool are_equal(const Checkpoint::Value& a, const Checkpoint::Value& b) {
  const Tensor *const first = std::get_if<Tensor>(&a), *const second = std::get_if<Tensor>(&b);
  return first && second && equal_bits(*first, *second);
}

}  // namespace leaf

void Checkpoint::Restoring::compare_tied(const std::string& name, const Tensor& tensor, const Value& stored) {
  if (tensor.count() == 0) return;
  const auto [begin, end] = tensors_.equal_range(tensor.raw());
  const auto first = std::find_if(begin, end, [&](const auto& entry) {
    const NamedMemory& other = entry.second;
    return other.storage.lock() == tensor.storage() && other.dtype == tensor.dtype() &&
           other.layout.shape == tensor.shape() && other.layout.strides == tensor.layout().strides;
  });
  if (first == end)
    tensors_.emplace(tensor.raw(), NamedMemory{tensor.storage(), tensor.dtype(), tensor.layout(), name});
  else if (!leaf::are_equal(*from_->find(first->second.name), stored))
    mismatches_.push_back({name, leaf::describe(stored),
                           "the values of " + first->second.name + ", which is the same tensor (tied)"});
}

void Checkpoint::put(const std::string& name, Value value) {
  if (const auto* const tensor = std::get_if<Tensor>(&value)) {
    if (!tensor->defined()) return;
    value = tensor->detach();
  }
  const std::string where = path_.empty() ? "" : path_ + ": ";
  check(!name.empty() && !name.starts_with(kReserved) && name != "__metadata__" &&
            name.find('\0') == std::string::npos,
        "checkpoint: ", where, "the name '", shown(name),
        "' cannot be used; it is empty, reserved or holds a NUL byte");
  check(values_.emplace(name, std::move(value)).second, "checkpoint: ", where, "the name '", shown(name),
        "' is used twice; give the things that are saved names of their own with io::named");
}

Checkpoint Checkpoint::part(const std::string& name) const {
  Checkpoint part;
  part.path_ = path_;
  std::set<std::string> parts;
  for (const auto& [full, value] : values_) {
    parts.insert(full.substr(0, full.find('.')));
    if (full == name) part.values_.emplace("value", value);
    if (full.starts_with(name + '.')) part.values_.emplace(full.substr(name.size() + 1), value);
  }
  check(!part.values_.empty(), "checkpoint: ", path_.empty() ? "the one in memory" : path_, " has no part '",
        shown(name), "' among ", joined(parts), did_you_mean(name, parts));
  return part;
}

std::map<std::string, Tensor> Checkpoint::tensors() const {
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, value] : values_)
    if (const auto* const tensor = std::get_if<Tensor>(&value)) tensors.emplace(name, *tensor);
  return tensors;
}

void Checkpoint::rename(const std::string& name, const std::string& other) {
  const auto found = values_.find(name);
  check(found != values_.end() && !values_.contains(other), "checkpoint: cannot rename '", shown(name),
        "' to '", shown(other), "': ", found == values_.end() ? "there is none" : "the name is taken");
  put(other, found->second);
  values_.erase(name);
}

const Checkpoint::Value* Checkpoint::find(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

void Checkpoint::save(const std::string& path) const {
  NamedTensors tensors;
  Metadata metadata{{kFormatKey, kFormat}, {kChecksumKey, kHash + kNoDigits}};
  for (const auto& [name, value] : values_) {
    if (const auto* const tensor = std::get_if<Tensor>(&value)) {
      tensors.emplace_back(name, *tensor);
      metadata[name] = kHash + kNoDigits;
    } else {
      const Scalar& scalar = std::get<Scalar>(value);
      metadata[name] = scalar.type + ' ' + scalar.text;
    }
  }
  const SafetensorsPlan plan = plan_safetensors(path, tensors);
  // The head comes first in the file and is known last: its length is known, so its place is kept.
  std::string head = safetensors_head(path, plan, metadata);
  AtomicFile file(path, head.size() + plan.bytes);
  file.write(head);
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const Tensor host = file_order(plan.tensors[i]);
    metadata[plan.entries[i].name] = kHash + checksum_of(host);
    file.write(host.raw(), host.bytes());
  }
  head = safetensors_head(path, plan, metadata);
  const size_t place = checksum_place(head);
  head.replace(place, Xxh3::kDigits, checksum_of(head, place));
  file.rewrite(0, head);
  file.publish();
}

Checkpoint Checkpoint::read(InputFile input, bool keep) {
  const SafetensorsFile file(std::move(input));
  check_head(file);
  Checkpoint checkpoint;
  checkpoint.path_ = file.path();
  for (const SafetensorsEntry& entry : file.entries()) {
    Tensor tensor = read_verified(file, entry);
    if (keep) checkpoint.put(entry.name, std::move(tensor));
  }
  for (const auto& [name, text] : file.metadata()) {
    if (name == kFormatKey || name == kChecksumKey || file.has(name)) continue;
    checkpoint.put(name, parse_value(file.path(), name, text));
  }
  return checkpoint;
}

void Checkpoint::refuse(std::vector<Mismatch> mismatches) const {
  constexpr size_t kMost = 200;
  std::sort(mismatches.begin(), mismatches.end(),
            [](const Mismatch& a, const Mismatch& b) { return a.name < b.name; });
  std::array<size_t, 2> widths = {4, 11};
  for (const Mismatch& mismatch : mismatches) {
    widths[0] = std::max(widths[0], mismatch.name.size());
    widths[1] = std::max(widths[1], mismatch.stored.size());
  }
  MessageStream text;
  const auto row = [&](const std::string& name, const std::string& stored, const std::string& wanted) {
    text << "\n  " << name << std::string(widths[0] - name.size() + 2, ' ') << stored
         << std::string(widths[1] - stored.size() + 2, ' ') << wanted;
  };
  text << "checkpoint: " << (path_.empty() ? "the one in memory" : path_)
       << " does not fit: " << mismatches.size()
       << (mismatches.size() == 1 ? " name differs" : " names differ")
       << "; nothing was changed. Build the same things with the same options as when it was saved.";
  if (std::ranges::all_of(mismatches, [](const Mismatch& m) { return m.wanted == kUnexpected; }))
    text << " To load a part of it alone: "
            "io::Checkpoint::read(path).part(\"model\").restore(model).";
  row("name", "in the file", "wanted");
  for (size_t i = 0; i < std::min(mismatches.size(), kMost); ++i)
    row(mismatches[i].name, mismatches[i].stored, mismatches[i].wanted);
  if (mismatches.size() > kMost) text << "\n  and " << mismatches.size() - kMost << " more";
  fail_at(Site::here(), text.str());
}

}  // namespace tessera::io
