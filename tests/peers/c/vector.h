// The committed test vectors: JSON of a fixed form, and base and target by formula.
#ifndef VECTOR_H
#define VECTOR_H

#include "codec.h"

typedef struct {
    const Dtype *dtype;
    size_t offset, count;
} Tensor;

typedef struct {
    size_t offset, nbytes, changed_count;
    const Dtype *dtype;
    char *encoding;
    Bytes digest, payload;
} Chunk;

typedef struct {
    size_t tensor_count, chunk_count, state_nbytes;
    Tensor *tensors;
    Chunk *chunks;
    int is_whole;    // from nothing
    unsigned share; // one element in so many changes
    Bytes base_blake3, target_blake3, base_state, target_state, shared_tables, root;
} Vector;

Vector read_vector(const char *path);

// The flat state, all elements by the formula in the README of the vectors.
uint8_t *base_of(const Vector *vector);
uint8_t *target_of(const Vector *vector);

#endif
