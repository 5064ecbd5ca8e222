#include "datasets/tokenize.h"

#include <atomic>
#include <exception>
#include <filesystem>
#include <thread>
#include <utility>

#include "datasets/tokens.h"
#include "io/file.h"
#include "io/text_file.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::datasets {
namespace {

namespace fs = std::filesystem;

/// Shards of one part as they fill.
class PartWriter {
 public:
  PartWriter(const char* name, const std::string& folder, int64_t shard_tokens,
             const io::Tokenizer& tokenizer, int64_t end_token)
      : name_(name),
        folder_(folder),
        shard_tokens_(shard_tokens),
        writer_(tokenizer.vocab_size(), tokenizer.fingerprint(), end_token) {}
  /// One without tokens too, so that the documents of both parts have the same numbers; it begins no shard.
  void add(const std::vector<int32_t>& document) {
    if (!document.empty() && int64_t(writer_.tokens()) >= shard_tokens_) write();
    writer_.add(document);
    done_.tokens += document.size();
    empty_documents_ += document.empty() ? 1 : 0;
  }
  TokenizedPart finish() {
    if (writer_.tokens() > 0) write();
    return done_;
  }

 private:
  void write() {
    done_.documents += writer_.documents();
    done_.empty_documents += std::exchange(empty_documents_, 0);
    writer_.write((fs::path(folder_) / shard_name(name_, done_.shards++)).string());
  }
  std::string name_, folder_;
  int64_t shard_tokens_;
  TokenShardWriter writer_;
  uint64_t empty_documents_ = 0;  // of the shard that fills
  TokenizedPart done_;
};

struct Encoded {
  std::vector<std::vector<int32_t>> train, validation;  // documents
  uint64_t bytes = 0, invalid = 0, one_line = 0;
  std::exception_ptr error;
};

}  // namespace

void check_no_shards(const std::string& folder) {
  for (const char* part : {"train", "validation"})
    check(!fs::exists(fs::path(folder) / shard_name(part, 0)), "data: ", folder, " has shards of the part ",
          part, " already; name another folder or remove them");
}

Tokenized tokenize_files(const std::vector<std::string>& paths, const io::Tokenizer& tokenizer,
                         const std::string& folder, const TokenizeOptions& options) {
  const std::optional<int32_t> end = tokenizer.special().eos;
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge, check_no_shards);
  PartWriter train("train", files.path(), options.shard_tokens, tokenizer, end ? *end : -1),
      validation("validation", files.path(), options.shard_tokens, tokenizer, end ? *end : -1);
  Tokenized done;
  // Texts are encoded by several threads, a group at a time, and written in their order.
  const size_t group = size_t(options.workers) * 4;
  for (size_t first = 0; first < paths.size(); first += group) {
    const size_t count = std::min(group, paths.size() - first);
    std::vector<Encoded> encoded(count);
    std::atomic<size_t> next{0};
    const auto work = [&] {
      const io::Tokenizer own = tokenizer;
      for (size_t i; (i = next++) < count;) try {
          const std::string text = io::read_text(paths[first + i], kLargestText, options.any_bytes);
          encoded[i].bytes = text.size();
          encoded[i].invalid = io::invalid_bytes(text);
          const auto encode = [&](std::string_view part, std::vector<std::vector<int32_t>>& to) {
            to.emplace_back();
            if (part.empty()) return;
            to.back() = own.encode(part, {.special = false}).ids;
            if (end) to.back().push_back(*end);
          };
          for (const std::string_view piece : split_pieces(text, uint64_t(options.piece))) {
            check_interrupt();
            const TextSplit split = split_text(piece, options.validation);
            encoded[i].one_line += !split.validation.empty() && is_one_line(piece) ? 1 : 0;
            encode(split.train, encoded[i].train);
            encode(split.validation, encoded[i].validation);
          }
        } catch (...) {
          encoded[i].error = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < options.workers; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    for (const Encoded& one : encoded) {
      if (one.error) std::rethrow_exception(one.error);
      for (const auto& document : one.train) train.add(document);
      for (const auto& document : one.validation) validation.add(document);
      done.bytes += one.bytes;
      done.invalid += one.invalid;
      done.one_line += one.one_line;
    }
  }
  done.train = train.finish();
  done.validation = validation.finish();
  files.publish();
  return done;
}

}  // namespace tessera::datasets
