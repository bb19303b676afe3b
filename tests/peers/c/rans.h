// Tables of frequencies, and the entropy coder that reads by them.
#ifndef RANS_H
#define RANS_H

#include "bytes.h"

enum { SLOT_BITS = 12, SLOTS = 1 << SLOT_BITS, MAX_SYMBOLS = 256 };

typedef struct {
    size_t symbol_count; // 0: codes nothing
    uint16_t frequency[MAX_SYMBOLS];
    uint16_t start[MAX_SYMBOLS];
    uint8_t symbol_of[SLOTS];
} Table;

Table take_table(Bytes *from);

typedef struct {
    size_t lane_count, index;
    uint32_t states[256];
    Bytes words;
} Decoder;

// Reads word_count, states and words of so many symbols.
Decoder take_decoder(Bytes *from, size_t symbol_count);
unsigned next_symbol(Decoder *decoder, const Table *table);
void finish(const Decoder *decoder);

#endif
