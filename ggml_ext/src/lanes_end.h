// See lanes.h.
#undef VF
#undef VI
#undef SELECT
#undef ABS
#undef AT
#undef NEAREST
