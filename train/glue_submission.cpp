#include "train/glue_submission.h"

#include "datasets/glue_submission.h"
#include "io/file.h"

namespace tessera::train {

std::vector<std::string> submission_files(const GlueSet& set, const std::filesystem::path& folder) {
  std::vector<std::string> files;
  for (const eval::GluePart& part : set.test)
    files.push_back((folder / datasets::glue_submission_name(set.task, part.name)).string());
  return files;
}

std::vector<std::string> write_submissions(GlueJob& job, const GlueSet& set,
                                           const std::filesystem::path& folder) {
  io::AtomicFolder files(folder.string(), io::AtomicFolder::Existing::replace);
  for (const eval::GluePart& part : set.test)
    io::write_file(files.path() + "/" + datasets::glue_submission_name(set.task, part.name),
                   datasets::glue_submission(set.task, job.predict(part.items).values));
  files.publish();
  return submission_files(set, folder);
}

}  // namespace tessera::train
