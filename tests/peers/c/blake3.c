#include "blake3.h"

#include <string.h>

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, BLOCK = 64, CHUNK = 1024 };

static const uint32_t IV[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
static const uint8_t PERMUTED[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

typedef struct {
    uint32_t words[8];
} Value;

static uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 7);
}

static void round_of(uint32_t *v, const uint32_t *m) {
    for (int i = 0; i < 4; i++) mix(v, i, i + 4, i + 8, i + 12, m[2 * i], m[2 * i + 1]);
    for (int i = 0; i < 4; i++)
        mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[2 * i + 8], m[2 * i + 9]);
}

static Value compressed(Value in, const uint8_t block[BLOCK], uint64_t counter, size_t nbytes,
                        uint32_t flags) {
    uint32_t m[16], v[16];
    for (int i = 0; i < 16; i++) m[i] = (uint32_t)load(block + 4 * i, 4);
    memcpy(v, in.words, sizeof in.words);
    memcpy(v + 8, IV, 16);
    v[12] = (uint32_t)counter;
    v[13] = (uint32_t)(counter >> 32);
    v[14] = (uint32_t)nbytes;
    v[15] = flags;
    for (int i = 0; i < 7; i++) {
        uint32_t next[16];
        round_of(v, m);
        for (int j = 0; j < 16; j++) next[j] = m[PERMUTED[j]];
        memcpy(m, next, sizeof m);
    }
    for (int i = 0; i < 8; i++) in.words[i] = v[i] ^ v[i + 8];
    return in;
}

static Value first_value(void) {
    Value value;
    memcpy(value.words, IV, sizeof IV);
    return value;
}

static Value chunk_value(Bytes of, uint64_t index, uint32_t root) {
    Value value = first_value();
    uint32_t flags = CHUNK_START;
    for (;;) {
        uint8_t block[BLOCK] = {0};
        Bytes part = take(&of, of.nbytes < BLOCK ? of.nbytes : BLOCK);
        if (part.nbytes) memcpy(block, part.at, part.nbytes);
        if (of.nbytes == 0) flags |= CHUNK_END | root;
        value = compressed(value, block, index, part.nbytes, flags);
        if (of.nbytes == 0) return value;
        flags = 0;
    }
}

// The left half of a tree is the largest power of two of chunks that leaves some to the right.
static Value tree_value(Bytes of, uint64_t index, uint32_t root) {
    if (of.nbytes <= CHUNK) return chunk_value(of, index, root);
    size_t left_count = 1;
    while (2 * left_count * CHUNK < of.nbytes) left_count *= 2;
    Value left = tree_value(take(&of, left_count * CHUNK), index, 0);
    Value right = tree_value(of, index + left_count, 0);
    uint8_t block[BLOCK];
    for (int i = 0; i < 8; i++) store(block + 4 * i, 4, left.words[i]);
    for (int i = 0; i < 8; i++) store(block + 32 + 4 * i, 4, right.words[i]);
    return compressed(first_value(), block, 0, BLOCK, PARENT | root);
}

void blake3(Bytes of, uint8_t digest[32]) {
    Value value = tree_value(of, 0, ROOT);
    for (int i = 0; i < 8; i++) store(digest + 4 * i, 4, value.words[i]);
}
