#include "rans.h"

static uint16_t take_frequency(Bytes *from) {
    unsigned high = (unsigned)take_integer(from, 1);
    return (uint16_t)(high < 128 ? high : (high - 128) << 8 | (unsigned)take_integer(from, 1));
}

Table take_table(Bytes *from) {
    Table table = {0};
    table.symbol_count = (size_t)take_integer(from, 2);
    if (table.symbol_count > MAX_SYMBOLS) refuse("a table with too many symbols");
    size_t slot = 0;
    for (size_t symbol = 0; symbol < table.symbol_count; symbol++) {
        table.frequency[symbol] = take_frequency(from);
        table.start[symbol] = (uint16_t)slot;
        if (slot + table.frequency[symbol] > SLOTS) refuse("frequencies above 4,096");
        for (size_t i = 0; i < table.frequency[symbol]; i++)
            table.symbol_of[slot++] = (uint8_t)symbol;
    }
    if (table.symbol_count && slot != SLOTS) refuse("frequencies below 4,096");
    return table;
}

static size_t lanes_for(size_t symbol_count) {
    size_t lane_count = 16;
    while (lane_count < 256 && 2 * lane_count <= symbol_count / 8192) lane_count *= 2;
    return lane_count;
}

Decoder take_decoder(Bytes *from, size_t symbol_count) {
    Decoder decoder = {.lane_count = lanes_for(symbol_count)};
    size_t word_count = (size_t)take_integer(from, 4);
    for (size_t i = 0; i < decoder.lane_count; i++)
        decoder.states[i] = (uint32_t)take_integer(from, 4);
    decoder.words = take(from, 2 * word_count);
    return decoder;
}

unsigned next_symbol(Decoder *decoder, const Table *table) {
    if (table->symbol_count == 0) refuse("a symbol without a table");
    uint32_t *state = &decoder->states[decoder->index++ % decoder->lane_count];
    uint32_t slot = *state % SLOTS;
    unsigned symbol = table->symbol_of[slot];
    *state = table->frequency[symbol] * (*state >> SLOT_BITS) + slot - table->start[symbol];
    if (*state < 1 << 16) *state = *state << 16 | (uint32_t)take_integer(&decoder->words, 2);
    return symbol;
}

void finish(const Decoder *decoder) {
    if (decoder->words.nbytes) refuse("words are left");
    for (size_t i = 0; i < decoder->lane_count; i++)
        if (decoder->states[i] != 1 << 16) refuse("a lane did not end where it began");
}
