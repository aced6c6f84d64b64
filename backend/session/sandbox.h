// What tilebeam-npud gives up once it runs: everything that is not memory, threads and the two descriptors it got.
#ifndef TILEBEAM_SESSION_SANDBOX_H
#define TILEBEAM_SESSION_SANDBOX_H

namespace tb::session {

// From now on this process and its threads open no file, make no socket, start no program and map nothing executable;
// such calls fail with EPERM. False where the kernel has no seccomp filters, or under a sanitizer, which reads files
// of its own.
bool enter_sandbox();

} // namespace tb::session

#endif // TILEBEAM_SESSION_SANDBOX_H
