#include <string.h>

#include "codec.h"
#include "rans.h"

static void take_coded(Bytes *payload, size_t count, uint8_t *plane) {
    Table table = take_table(payload);
    Decoder decoder = take_decoder(payload, count);
    for (size_t i = 0; i < count; i++) plane[i] = (uint8_t)next_symbol(&decoder, &table);
    finish(&decoder);
}

static void take_plane(Bytes *payload, size_t count, uint8_t *plane) {
    uint64_t kind = take_integer(payload, 1);
    if (kind > 1) refuse("a plane of an unknown kind");
    if (kind == 1) take_coded(payload, count, plane);
    else memcpy(plane, take(payload, count).at, count);
}

// Floats travel rotated left by one, so that the exponent is on top.
static uint64_t turned_back(uint64_t bits, const Dtype *dtype) {
    if (dtype->mask == 0) return bits;
    return bits >> 1 | (bits & 1) << (8 * dtype->itemsize - 1);
}

void decode_dense_planes(Range range, Bytes payload) {
    size_t itemsize = range.dtype->itemsize;
    uint8_t *plane = room(range.count, 1);
    for (size_t byte = itemsize; byte-- > 0;) {
        take_plane(&payload, range.count, plane);
        for (size_t i = 0; i < range.count; i++) range.elements[i * itemsize + byte] = plane[i];
    }
    for (size_t i = 0; i < range.count; i++) {
        uint8_t *at = range.elements + i * itemsize;
        store(at, itemsize, turned_back(load(at, itemsize), range.dtype));
    }
    if (payload.nbytes) refuse("bytes behind the end");
}
