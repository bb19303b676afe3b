/* Elements byte by byte of like weight, compiled once per level; included by _kernels_body.h. */

/* Four tables in turn: equal neighbours do not wait for each other. */
static ALWAYS_INLINE void FN(count_bytes)(const uint8_t *bytes, size_t n, uint32_t tables[4][256]) {
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
        uint64_t v = load(bytes + j, 0, 8);
        for (int t = 0; t < 8; t++) tables[t & 3][v >> (8 * t) & 255]++;
    }
    for (; j < n; j++) tables[0][bytes[j]]++;
}

/* Plane p of n bytes has byte p, the lowest first, of each element's bits, rotated left by one or not. */
static ALWAYS_INLINE void FN(split_planes_of)(const uint8_t *bits, size_t n, int size, int rotate, uint8_t *planes, uint32_t *histograms) {
    uint32_t tables[8][4][256];
    memset(tables, 0, (size_t)size * sizeof tables[0]);
    for (size_t from = 0; from < n; from += SEGMENT) {
        size_t to = n - from < SEGMENT ? n : from + SEGMENT;
        for (int p = 0; p < size; p++) {
            uint8_t *restrict plane = planes + (size_t)p * n;
            for (size_t j = from; j < to; j++) {
                uint64_t v = load(bits, j, size);
                if (rotate) v = v << 1 | v >> (8 * size - 1);
                plane[j] = (uint8_t)(v >> (8 * p));
            }
            FN(count_bytes)(plane + from, to - from, tables[p]);
        }
    }
    for (int p = 0; p < size; p++)
        for (int s = 0; s < 256; s++) histograms[256 * p + s] = tables[p][0][s] + tables[p][1][s] + tables[p][2][s] + tables[p][3][s];
}

static void FN(split_planes)(const uint8_t *bits, size_t n, int size, int rotate, uint8_t *planes, uint32_t *histograms) {
    if (rotate) BY_SIZE(size, { FN(split_planes_of)(bits, n, S, 1, planes, histograms); return; });
    BY_SIZE(size, FN(split_planes_of)(bits, n, S, 0, planes, histograms));
}

static ALWAYS_INLINE void FN(join_planes_of)(const uint8_t *const *planes, size_t n, int size, int rotate, uint8_t *restrict bits) {
    for (size_t j = 0; j < n; j++) {
        uint64_t v = 0;
        for (int p = 0; p < size; p++) v |= (uint64_t)planes[p][j] << (8 * p);
        if (rotate) v = v >> 1 | v << (8 * size - 1);
        store(bits, j, v, size);
    }
}

static void FN(join_planes)(const uint8_t *const *planes, size_t n, int size, int rotate, uint8_t *bits) {
    if (rotate) BY_SIZE(size, { FN(join_planes_of)(planes, n, S, 1, bits); return; });
    BY_SIZE(size, FN(join_planes_of)(planes, n, S, 0, bits));
}
