// BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs): plain hashing, 32 bytes out.
#ifndef BLAKE3_H
#define BLAKE3_H

#include "bytes.h"

void blake3(Bytes of, uint8_t digest[32]);

#endif
