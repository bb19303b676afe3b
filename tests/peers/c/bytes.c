#include "bytes.h"

#include <stdio.h>
#include <stdlib.h>

_Noreturn void refuse(const char *why) {
    fprintf(stderr, "refused: %s\n", why);
    exit(1);
}

void *room(size_t count, size_t size) {
    void *made = calloc(count ? count : 1, size);
    if (made == NULL) refuse("no memory");
    return made;
}

Bytes take(Bytes *from, size_t nbytes) {
    if (nbytes > from->nbytes) refuse("bytes are missing at the end");
    Bytes taken = {from->at, nbytes};
    from->at += nbytes;
    from->nbytes -= nbytes;
    return taken;
}

uint64_t take_integer(Bytes *from, size_t nbytes) {
    return load(take(from, nbytes).at, nbytes);
}

uint64_t load(const uint8_t *at, size_t nbytes) {
    uint64_t bits = 0;
    for (size_t i = 0; i < nbytes; i++) bits |= (uint64_t)at[i] << 8 * i;
    return bits;
}

void store(uint8_t *at, size_t nbytes, uint64_t bits) {
    for (size_t i = 0; i < nbytes; i++) at[i] = (uint8_t)(bits >> 8 * i);
}

uint64_t mask_of(size_t nbytes) {
    return nbytes == 8 ? UINT64_MAX : ((uint64_t)1 << 8 * nbytes) - 1;
}
