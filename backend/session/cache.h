// Cache maintenance of the channel's messages: clean what was written before the other side is told, invalidate what
// the other side wrote before it is read. On the coherent CPUs that run the host executors these do nothing; a port to
// a CPU and NPU that are coherent in one direction only (Snapdragon) fills them in. Data buffers have no such calls:
// such a port must map them coherently, or add calls where the plugin writes and reads them (plugin/buffer.cpp).
#ifndef TILEBEAM_SESSION_CACHE_H
#define TILEBEAM_SESSION_CACHE_H

#include <cstddef>

inline void tb_cache_clean(const void * /*address*/, size_t /*size*/) {}
inline void tb_cache_invalidate(const void * /*address*/, size_t /*size*/) {}

#endif // TILEBEAM_SESSION_CACHE_H
