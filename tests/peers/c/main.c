// Decodes test vectors of the weight codec and verifies every digest in them.
//
//     cc -std=c11 -o reader *.c -ldl && ./reader ../../codec/vectors/*.json
//
// Exit code 0: all of them lead to their target. 1: one was refused; 3: there is no libzstd.
#include <stdio.h>
#include <string.h>

#include "blake3.h"
#include "vector.h"

static const char *const ENCODINGS[] = {
    "unspecified", "unchanged", "dense", "dense_planes", "sparse_fast", "sparse_compact"};
enum { UNCHANGED = 1, DENSE, DENSE_PLANES, SPARSE_FAST, SPARSE_COMPACT, ENCODING_COUNT };
enum { COMPRESSION_NONE = 1, DIGEST = 32 };

static uint64_t encoding_of(const Chunk *chunk) {
    for (uint64_t i = UNCHANGED; i < ENCODING_COUNT; i++)
        if (strcmp(ENCODINGS[i], chunk->encoding) == 0) return i;
    refuse("no such encoding");
}

static void expect(Bytes wanted, const uint8_t *found, const char *what) {
    if (memcmp(wanted.at, found, wanted.nbytes) != 0) refuse(what);
}

static void verify_chunk(const Chunk *chunk, size_t index) {
    Bytes payload = chunk->payload;
    uint64_t fields[] = {index,
                         chunk->offset,
                         chunk->nbytes,
                         (uint64_t)chunk->dtype->number,
                         encoding_of(chunk),
                         COMPRESSION_NONE,
                         payload.nbytes,
                         chunk->changed_count,
                         payload.nbytes};
    uint8_t *whole = room(sizeof fields + payload.nbytes, 1), digest[DIGEST];
    for (size_t i = 0; i < 9; i++) store(whole + 8 * i, 8, fields[i]);
    if (payload.nbytes) memcpy(whole + sizeof fields, payload.at, payload.nbytes);
    blake3((Bytes){whole, sizeof fields + payload.nbytes}, digest);
    expect(chunk->digest, digest, "a chunk has another digest");
}

static void verify_root(const Vector *vector) {
    size_t nbytes = DIGEST * (vector->chunk_count + 1);
    uint8_t *digests = room(nbytes, 1), root[DIGEST];
    blake3(vector->shared_tables, digests);
    for (size_t i = 0; i < vector->chunk_count; i++)
        memcpy(digests + DIGEST * (i + 1), vector->chunks[i].digest.at, DIGEST);
    blake3((Bytes){digests, nbytes}, root);
    expect(vector->root, root, "the patch has another root");
}

static void verify_state(const Vector *vector, const uint8_t *state, Bytes blake, Bytes sums) {
    uint8_t digest[DIGEST], found[16];
    uint64_t added[2] = {0, 0};
    blake3((Bytes){state, vector->state_nbytes}, digest);
    expect(blake, digest, "the state has another BLAKE3");
    for (size_t i = 0; i < vector->tensor_count; i++) {
        const Tensor *tensor = &vector->tensors[i];
        add_state(added, state + tensor->offset, tensor->count, tensor->dtype->itemsize,
                  tensor->offset);
    }
    store(found, 8, added[0]);
    store(found + 8, 8, added[1]);
    expect(sums, found, "the state has another digest");
}

static Range range_of(const Vector *vector, const Chunk *chunk, uint8_t *state) {
    size_t itemsize = chunk->dtype->itemsize;
    if (chunk->offset > vector->state_nbytes || chunk->nbytes % itemsize ||
        chunk->nbytes > vector->state_nbytes - chunk->offset)
        refuse("a chunk outside of the layout");
    Range range = {chunk->dtype, state + chunk->offset, chunk->nbytes / itemsize,
                   chunk->changed_count};
    if (range.changed_count > range.count) refuse("more changes than elements");
    return range;
}

static void decode(const Vector *vector, const Chunk *chunk, uint8_t *state) {
    Range range = range_of(vector, chunk, state);
    switch (encoding_of(chunk)) {
    case UNCHANGED: break;
    case DENSE: decode_dense(range, chunk->payload); break;
    case DENSE_PLANES: decode_dense_planes(range, chunk->payload); break;
    case SPARSE_FAST: decode_sparse_fast(range, chunk->payload); break;
    default: decode_sparse_compact(range, chunk->payload, vector->shared_tables);
    }
}

static void check(const char *path, int is_trusting) {
    Vector vector = read_vector(path);
    uint8_t *state = vector.is_whole ? room(vector.state_nbytes, 1) : base_of(&vector);
    if (!vector.is_whole) verify_state(&vector, state, vector.base_blake3, vector.base_state);
    for (size_t i = 0; i < vector.chunk_count; i++) {
        if (!is_trusting) verify_chunk(&vector.chunks[i], i);
        decode(&vector, &vector.chunks[i], state);
    }
    verify_root(&vector);
    verify_state(&vector, state, vector.target_blake3, vector.target_state);
    expect((Bytes){state, vector.state_nbytes}, target_of(&vector), "the state is not the target");
    printf("ok %s\n", path);
}

// With --trusting chunk digests are not looked at, so that decoders meet what is damaged.
int main(int count, char **paths) {
    int is_trusting = count > 1 && strcmp(paths[1], "--trusting") == 0;
    for (int i = 1 + is_trusting; i < count; i++) check(paths[i], is_trusting);
    return 0;
}
