// Zstandard frames, by the library of the system. Its headers are not needed.
#ifndef INFLATE_H
#define INFLATE_H

#include "bytes.h"

// The frame unpacks to exactly this many bytes, or is refused.
Bytes inflated(Bytes frame, size_t nbytes);

#endif
