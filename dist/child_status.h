#pragma once

namespace tessera::dist {

/// Lets waitpid tell how a child process ended: where SIGCHLD is ignored, as some programs leave it to those
/// that they start, the system drops it, and waitpid fails. For this process, before it starts the first
/// child.
void keep_child_status();

}  // namespace tessera::dist
