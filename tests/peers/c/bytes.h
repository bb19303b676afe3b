// Bytes that are read from the front, never past their end.
#ifndef BYTES_H
#define BYTES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const uint8_t *at;
    size_t nbytes;
} Bytes;

// Says why and ends the process with exit code 1.
_Noreturn void refuse(const char *why);

// Zeroed; refuses when there is no memory.
void *room(size_t count, size_t size);

Bytes take(Bytes *from, size_t nbytes);
uint64_t take_integer(Bytes *from, size_t nbytes);

// Elements are unsigned integers of 1, 2, 4 or 8 bytes, little-endian.
uint64_t load(const uint8_t *at, size_t nbytes);
void store(uint8_t *at, size_t nbytes, uint64_t bits);
uint64_t mask_of(size_t nbytes);

#endif
