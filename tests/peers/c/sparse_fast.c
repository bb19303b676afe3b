#include "codec.h"
#include "inflate.h"

static Bytes stream(Bytes *payload, size_t packed_nbytes, size_t nbytes) {
    if (packed_nbytes > nbytes) refuse("a stream is longer packed than unpacked");
    Bytes packed = take(payload, packed_nbytes);
    return packed_nbytes < nbytes ? inflated(packed, nbytes) : packed;
}

static int take_bit(Bytes bits, size_t index) { return bits.at[index / 8] >> index % 8 & 1; }

static void no_bits_from(Bytes bits, size_t count) {
    for (size_t i = count; i < 8 * bits.nbytes; i++)
        if (take_bit(bits, i)) refuse("a bit of no change");
}

static size_t take_gap(Bytes *gaps) {
    size_t gap = 0, part;
    do gap += part = (size_t)take_integer(gaps, 1);
    while (part == 255);
    return gap;
}

static uint64_t take_extra(Bytes *steps, Bytes *escapes, size_t itemsize) {
    uint64_t step = take_integer(steps, 1);
    if (step == 0) refuse("a step of 0");
    if (step < 255) return step;
    uint64_t escape = take_integer(escapes, itemsize);
    if (escape < 255) refuse("an escape that needed none");
    return escape;
}

void decode_sparse_fast(Range range, Bytes payload) {
    size_t lengths[4], packed[4], itemsize = range.dtype->itemsize;
    size_t flag_nbytes = (range.changed_count + 7) / 8;
    lengths[0] = (size_t)take_integer(&payload, 4);
    lengths[1] = lengths[2] = flag_nbytes;
    lengths[3] = (size_t)take_integer(&payload, 4);
    size_t escape_count = (size_t)take_integer(&payload, 4);
    if (lengths[0] > range.count || lengths[3] > range.changed_count)
        refuse("a stream is longer than the range allows");
    for (int i = 0; i < 4; i++) packed[i] = (size_t)take_integer(&payload, 4);
    Bytes gaps = stream(&payload, packed[0], lengths[0]);
    Bytes ups = stream(&payload, packed[1], lengths[1]);
    Bytes marks = stream(&payload, packed[2], lengths[2]);
    Bytes steps = stream(&payload, packed[3], lengths[3]);
    Bytes escapes = take(&payload, escape_count * itemsize);
    no_bits_from(ups, range.changed_count);
    no_bits_from(marks, range.changed_count);
    size_t at = 0;
    for (size_t i = 0; i < range.changed_count; i++, at++) {
        at += take_gap(&gaps);
        if (at >= range.count) refuse("a gap beyond the range");
        uint64_t extra = take_bit(marks, i) ? take_extra(&steps, &escapes, itemsize) : 0;
        if (extra == UINT64_MAX) refuse("a distance out of range");
        move_units(range, at, extra + 1, take_bit(ups, i));
    }
    if (gaps.nbytes || steps.nbytes || escapes.nbytes || payload.nbytes)
        refuse("bytes behind the end");
}
