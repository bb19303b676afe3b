#include <string.h>

#include "codec.h"

static const Dtype DTYPES[] = {
    {"bool", 1, 0, 0, 1},       {"i8", 1, 0, 0, 2},          {"u8", 1, 0, 0, 3},
    {"i16", 2, 0, 0, 4},        {"u16", 2, 0, 0, 5},         {"i32", 4, 0, 0, 6},
    {"u32", 4, 0, 0, 7},        {"i64", 8, 0, 0, 8},         {"u64", 8, 0, 0, 9},
    {"f16", 2, 10, 0x1f, 10},   {"bf16", 2, 7, 0xff, 11},    {"f32", 4, 23, 0xff, 12},
    {"f64", 8, 52, 0x7ff, 13},  {"f8_e4m3", 1, 3, 0xf, 14},  {"f8_e5m2", 1, 2, 0x1f, 15},
};

const Dtype *dtype_of(const char *name) {
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (strcmp(DTYPES[i].name, name) == 0) return &DTYPES[i];
    refuse("no such dtype");
}

// Bits in an order in which neighbours are one unit of the last place apart.
static uint64_t ordered(uint64_t bits, size_t itemsize) {
    uint64_t sign = (uint64_t)1 << (8 * itemsize - 1);
    return bits & sign ? ~bits & mask_of(itemsize) : bits | sign;
}

static uint64_t unordered(uint64_t order, size_t itemsize) {
    uint64_t sign = (uint64_t)1 << (8 * itemsize - 1);
    return order & sign ? order & ~sign : ~order & mask_of(itemsize);
}

void move_units(Range range, size_t index, uint64_t units, int is_up) {
    size_t itemsize = range.dtype->itemsize;
    uint64_t half = (uint64_t)1 << (8 * itemsize - 1);
    if (units == 0 || units > half || (units == half && is_up)) refuse("a distance out of range");
    uint8_t *at = range.elements + index * itemsize;
    uint64_t order = ordered(load(at, itemsize), itemsize);
    order = (is_up ? order + units : order - units) & mask_of(itemsize);
    store(at, itemsize, unordered(order, itemsize));
}

void decode_dense(Range range, Bytes payload) {
    size_t nbytes = range.count * range.dtype->itemsize;
    memcpy(range.elements, take(&payload, nbytes).at, nbytes);
    if (payload.nbytes) refuse("bytes behind the end");
}

void add_state(uint64_t sums[2], const uint8_t *elements, size_t count, size_t itemsize,
               uint64_t offset) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = load(elements + i * itemsize, itemsize);
        uint64_t x = (offset + i * itemsize) * 0x9e3779b97f4a7c15u + bits * 0xd6e8feb86659fd93u +
                     0x6173747261666c77u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        sums[0] += x;
        x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
        sums[1] += x ^ x >> 29;
    }
}
