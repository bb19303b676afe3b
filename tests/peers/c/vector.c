#include "vector.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *text_of(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) refuse("cannot open the file");
    long nbytes = ftell(file);
    rewind(file);
    char *text = room((size_t)nbytes + 1, 1);
    if (fread(text, 1, (size_t)nbytes, file) != (size_t)nbytes) refuse("cannot read the file");
    fclose(file);
    return text;
}

// Moves on to the value behind the next such key.
static const char *seek(const char **at, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(*at, quoted);
    if (found == NULL) refuse("a key is missing");
    return *at = found + strlen(quoted);
}

static size_t number(const char **at, const char *key) {
    return (size_t)strtoull(seek(at, key), NULL, 10);
}

static char *string(const char **at, const char *key) {
    const char *first = seek(at, key) + 1;
    size_t length = strcspn(first, "\"");
    char *copy = room(length + 1, 1);
    memcpy(copy, first, length);
    return copy;
}

static unsigned nibble(char digit) {
    const char *digits = "0123456789abcdef", *found = digit ? strchr(digits, digit) : NULL;
    if (found == NULL) refuse("no hexadecimal digit");
    return (unsigned)(found - digits);
}

// null is no bytes.
static Bytes hex(const char **at, const char *key) {
    const char *peek = *at;
    if (strncmp(seek(&peek, key), "null", 4) == 0) return (Bytes){NULL, 0};
    const char *digits = string(at, key);
    size_t nbytes = strlen(digits) / 2;
    uint8_t *made = room(nbytes, 1);
    for (size_t i = 0; i < nbytes; i++)
        made[i] = (uint8_t)(nibble(digits[2 * i]) << 4 | nibble(digits[2 * i + 1]));
    return (Bytes){made, nbytes};
}

static size_t count_of(const char *from, const char *to, const char *key) {
    size_t count = 0;
    while ((from = strstr(from, key)) != NULL && from < to) count++, from++;
    return count;
}

static size_t product(const char *at) {
    size_t count = 1;
    for (char *end; *at != ']'; at = end + strspn(end, ", \n")) {
        at += strspn(at, "[ \n");
        if (*at == ']') break;
        count *= (size_t)strtoull(at, &end, 10);
    }
    return count;
}

static Tensor read_tensor(const char **at) {
    Tensor tensor = {0};
    tensor.dtype = dtype_of(string(at, "dtype"));
    tensor.count = product(seek(at, "shape"));
    tensor.offset = number(at, "offset");
    return tensor;
}

static Chunk read_chunk(const char **at) {
    Chunk chunk = {0};
    chunk.offset = number(at, "offset");
    chunk.nbytes = number(at, "nbytes");
    chunk.dtype = dtype_of(string(at, "dtype"));
    chunk.encoding = string(at, "encoding");
    chunk.changed_count = number(at, "changed_count");
    chunk.digest = hex(at, "digest");
    chunk.payload = hex(at, "payload");
    return chunk;
}

static void read_digests(Vector *vector, const char **at) {
    vector->state_nbytes = number(at, "state_nbytes");
    vector->base_blake3 = hex(at, "base_blake3");
    vector->is_whole = vector->base_blake3.nbytes == 0;
    vector->target_blake3 = hex(at, "target_blake3");
    vector->base_state = hex(at, "base_state_digest");
    vector->target_state = hex(at, "target_state_digest");
    vector->shared_tables = hex(at, "shared_tables");
    vector->root = hex(at, "root_digest");
}

Vector read_vector(const char *path) {
    const char *at = text_of(path), *chunks = strstr(at, "\"chunks\"");
    if (chunks == NULL || number(&at, "codec_version") != 3) refuse("another codec version");
    Vector vector = {.share = strstr(path, "many-dtypes") ? 4 : 30};
    vector.tensor_count = count_of(at, chunks, "\"shape\"");
    vector.chunk_count = count_of(chunks, chunks + strlen(chunks), "\"payload\"");
    vector.tensors = room(vector.tensor_count, sizeof(Tensor));
    vector.chunks = room(vector.chunk_count, sizeof(Chunk));
    for (size_t i = 0; i < vector.tensor_count; i++) vector.tensors[i] = read_tensor(&at);
    read_digests(&vector, &at);
    for (size_t i = 0; i < vector.chunk_count; i++) vector.chunks[i] = read_chunk(&at);
    return vector;
}

static uint64_t noise(size_t index, uint64_t stream) {
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15u + stream * 0xd1342543de82ef95u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t element(const Tensor *tensor, size_t t, size_t i, unsigned share, int is_target) {
    uint64_t keep = strcmp(tensor->dtype->name, "i64") == 0 ? 1023 : UINT64_MAX;
    uint64_t old = noise(i, 8 * t) & noise(i, 8 * t + 1) & keep;
    if (!is_target || noise(i, 8 * t + 2) % share) return old;
    return noise(i, 8 * t + 3) % 16 ? old + 1 : noise(i, 8 * t + 4) & keep;
}

static uint8_t *state_of(const Vector *vector, int is_target) {
    uint8_t *state = room(vector->state_nbytes, 1);
    for (size_t t = 0; t < vector->tensor_count; t++) {
        const Tensor *tensor = &vector->tensors[t];
        size_t itemsize = tensor->dtype->itemsize;
        for (size_t i = 0; i < tensor->count; i++)
            store(state + tensor->offset + i * itemsize, itemsize,
                  element(tensor, t, i, vector->share, is_target));
    }
    return state;
}

uint8_t *base_of(const Vector *vector) { return state_of(vector, 0); }
uint8_t *target_of(const Vector *vector) { return state_of(vector, 1); }
