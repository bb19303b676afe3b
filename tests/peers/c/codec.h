// Payloads of chunks, as docs/weights.md describes them (codec version 3).
#ifndef CODEC_H
#define CODEC_H

#include "bytes.h"

typedef struct {
    const char *name;
    size_t itemsize;
    unsigned shift; // of the exponent field in the bits
    uint64_t mask;  // of the exponent, after the shift; 0: no float
    int number;     // in the contract
} Dtype;

// The dtype of that name, or a refusal.
const Dtype *dtype_of(const char *name);

typedef struct {
    const Dtype *dtype;
    uint8_t *elements; // the base; holds the new bits afterwards
    size_t count;
    size_t changed_count;
} Range;

// Each decodes a whole payload over a range and refuses what contradicts itself.
void decode_dense(Range range, Bytes payload);
void decode_sparse_fast(Range range, Bytes payload);
void decode_sparse_compact(Range range, Bytes payload, Bytes shared_tables);
void decode_dense_planes(Range range, Bytes payload);

// Move an element by so many units of the last place.
void move_units(Range range, size_t index, uint64_t units, int is_up);

// Two sums of 64 bits over all elements; offset is that of the tensor.
void add_state(uint64_t sums[2], const uint8_t *elements, size_t count, size_t itemsize,
               uint64_t offset);

#endif
