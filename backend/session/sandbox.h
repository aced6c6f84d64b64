// What tilebeam-npud gives up once it runs: everything that is not memory, threads and the two descriptors it got.
#ifndef TILEBEAM_SESSION_SANDBOX_H
#define TILEBEAM_SESSION_SANDBOX_H

#include <cstdint>

namespace tb::session {

// From now on this process and its threads open no file, make no socket, start no program or process, signal nobody
// else and map nothing executable; such calls fail with EPERM. Nor can another process of the same user look into it
// or take its descriptors. What of that the system granted, as enum tb_guard bits: without seccomp in the kernel, or
// under a sanitizer (which reads files of its own), TB_GUARD_SYSCALLS is missing.
uint32_t enter_sandbox();

// Close every descriptor above `last`: what the program had open without close-on-exec is none of our business.
void close_above(int last);

} // namespace tb::session

#endif // TILEBEAM_SESSION_SANDBOX_H
