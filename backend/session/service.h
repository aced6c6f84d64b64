// The NPU side of the channel: takes requests from the control region and runs them in an executor. The same loop
// serves as a thread of the host process and as the whole of tilebeam-npud.
//
// It trusts nothing in the region: a request and its payload are copied to private memory, their digest is compared,
// and only the copy is looked at.
#ifndef TILEBEAM_SESSION_SERVICE_H
#define TILEBEAM_SESSION_SERVICE_H

namespace tb::session {

// Serve until the CPU side says stop or is gone. Takes over both descriptors. Returns 0, or 1 if the CPU side was
// refused or broke the protocol beyond repair.
int serve(int region_fd, int socket_fd);

} // namespace tb::session

#endif // TILEBEAM_SESSION_SERVICE_H
