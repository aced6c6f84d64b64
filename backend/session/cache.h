// Cache maintenance at its named places. On the coherent CPUs that run the host executors these do nothing; a CPU and
// NPU that are coherent in one direction only (Snapdragon) put their cache operations here and nowhere else:
// clean what was written before the other side is told, invalidate what the other side wrote before it is read.
#ifndef TILEBEAM_SESSION_CACHE_H
#define TILEBEAM_SESSION_CACHE_H

#include <cstddef>

inline void tb_cache_clean(const void * /*address*/, size_t /*size*/) {}
inline void tb_cache_invalidate(const void * /*address*/, size_t /*size*/) {}

#endif // TILEBEAM_SESSION_CACHE_H
