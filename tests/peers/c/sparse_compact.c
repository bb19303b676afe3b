#include <string.h>

#include "codec.h"
#include "rans.h"

enum { MAX_CLASSES = 16, MAX_TOKENS = 8 + 4 * 61 };

typedef struct {
    uint64_t low;
    size_t class_count;
    Table gaps[MAX_CLASSES], distances[MAX_CLASSES];
} Section;

typedef struct {
    Bytes bytes;
    size_t at;
} Bits;

static void take_section(Bytes *tables, Section *section) {
    section->low = take_integer(tables, 2);
    section->class_count = (size_t)take_integer(tables, 1);
    if (section->class_count < 1 || section->class_count > MAX_CLASSES)
        refuse("a section with no classes, or too many");
    for (size_t i = 0; i < section->class_count; i++) section->gaps[i] = take_table(tables);
    for (size_t i = 0; i < section->class_count; i++) section->distances[i] = take_table(tables);
}

static void find_section(Bytes tables, const char *name, Section *section) {
    uint64_t count = tables.nbytes ? take_integer(&tables, 1) : 0;
    while (count--) {
        Bytes found = take(&tables, (size_t)take_integer(&tables, 1));
        take_section(&tables, section);
        if (found.nbytes == strlen(name) && memcmp(found.at, name, found.nbytes) == 0) return;
    }
    refuse("the shared tables lack the dtype");
}

static size_t class_of(uint64_t bits, const Dtype *dtype, const Section *section) {
    uint64_t exponent = bits >> dtype->shift & dtype->mask;
    if (exponent <= section->low) return 0;
    uint64_t above = exponent - section->low;
    return above < section->class_count ? (size_t)above : section->class_count - 1;
}

static size_t take_leb128(Bytes *from) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
        uint64_t byte = take_integer(from, 1);
        value |= (byte & 127) << shift;
        if (byte < 128) return (size_t)value;
    }
    refuse("a count that never ends");
}

static uint64_t take_bits(Bits *low, unsigned count) {
    uint64_t value = 0;
    for (unsigned i = 0; i < count; i++, low->at++) {
        if (low->at / 8 >= low->bytes.nbytes) refuse("low bits are missing");
        value |= (uint64_t)(low->bytes.at[low->at / 8] >> low->at % 8 & 1) << i;
    }
    return value;
}

static uint64_t number_of(unsigned token, Bits *low) {
    if (token < 8) return token;
    if (token >= MAX_TOKENS) refuse("a token out of range");
    unsigned low_count = (token - 8) / 4 + 1; // t - 2, where the highest bit is t
    uint64_t top = 4 + (token - 8) % 4;
    return top << low_count | take_bits(low, low_count);
}

static void no_bits_left(Bits low) {
    if (low.bytes.nbytes != (low.at + 7) / 8) refuse("bytes behind the end");
    while (low.at < 8 * low.bytes.nbytes)
        if (take_bits(&low, 1)) refuse("a low bit of no symbol");
}

// Both kinds of symbols, class after class, as tokens first: low bits follow all of them.
static void take_tokens(Decoder *decoder, const Table *tables, const size_t *counts,
                        size_t class_count, uint8_t *tokens) {
    for (size_t c = 0; c < class_count; c++)
        for (size_t i = 0; i < counts[c]; i++)
            *tokens++ = (uint8_t)next_symbol(decoder, &tables[c]);
}

static size_t *elements_of(Range range, const Section *section, size_t c, size_t *count) {
    size_t *indexes = room(range.count, sizeof *indexes), itemsize = range.dtype->itemsize;
    *count = 0;
    for (size_t i = 0; i < range.count; i++)
        if (class_of(load(range.elements + i * itemsize, itemsize), range.dtype, section) == c)
            indexes[(*count)++] = i;
    return indexes;
}

static void place(Range range, const Section *section, const size_t *counts,
                  const uint8_t *tokens, Bits *low, size_t *changed) {
    for (size_t c = 0; c < section->class_count; c++) {
        size_t member_count, at = 0;
        size_t *members = elements_of(range, section, c, &member_count);
        for (size_t i = 0; i < counts[c]; i++, at++) {
            uint64_t gap = number_of(*tokens++, low);
            if (gap >= member_count - at) refuse("a gap beyond the class");
            *changed++ = members[at += (size_t)gap];
        }
    }
}

void decode_sparse_compact(Range range, Bytes payload, Bytes shared_tables) {
    Section *section = room(1, sizeof *section);
    find_section(shared_tables, range.dtype->name, section);
    size_t counts[MAX_CLASSES], total = 0, changed_count = range.changed_count;
    for (size_t c = 0; c < section->class_count; c++) total += counts[c] = take_leb128(&payload);
    if (total != changed_count) refuse("counts are not those of the header");
    Decoder decoder = take_decoder(&payload, 2 * changed_count);
    uint8_t *tokens = room(2 * changed_count, 1);
    take_tokens(&decoder, section->gaps, counts, section->class_count, tokens);
    take_tokens(&decoder, section->distances, counts, section->class_count, tokens + changed_count);
    finish(&decoder);
    Bits low = {payload, 0};
    size_t *changed = room(changed_count, sizeof *changed);
    place(range, section, counts, tokens, &low, changed);
    for (size_t i = 0; i < changed_count; i++) {
        uint64_t folded = number_of(tokens[changed_count + i], &low);
        move_units(range, changed[i], folded / 2 + 1, folded % 2 != 0);
    }
    no_bits_left(low);
}
