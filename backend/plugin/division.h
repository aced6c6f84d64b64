// Which weight matrices are cut over several sessions, because one session's address space cannot hold them.
//
// A cut runs between columns, i.e. between rows of ggml's tensor: both in tiles, whose panels are 32 columns each, and
// in plain rows, a range of columns is a range of bytes, and each session maps only its own range.
#ifndef TILEBEAM_PLUGIN_DIVISION_H
#define TILEBEAM_PLUGIN_DIVISION_H

#include <cstdint>
#include <string>
#include <vector>

#include "control.h"
#include "tilebeam/types.h"

struct ggml_tensor;

namespace tb::plugin {

struct column_part {
    int device;
    int64_t columns;
};

// Replace this thread's plan (control.h, tilebeam_divide); no parts end it. On failure there is none.
tb_status plan_division(const tilebeam_part * parts, uint64_t n_parts, std::string & why);
bool division_planned();

// How this weight of `device` is cut: as planned, else over all devices that ggml knows if it exceeds the device's
// limit. Empty: not at all. False: a plan does not fit the tensor.
bool divide(const ggml_tensor * t, int device, uint64_t bytes, std::vector<column_part> & parts, std::string & why);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_DIVISION_H
