/* Kernels of the weight codec; docs/codec.md has the bytes, kernels.py the interface.
 *
 * Every function takes the level of the processor as its first argument (0 portable, 1 AVX2,
 * 2 AVX-512, 3 NEON), so that tests can run each level that the machine has. All levels give the
 * same bytes as the numpy code. The interpreter's lock is released while a loop runs that is not
 * brief. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_kernels_levels.h"

static int fail(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return 0;
}

static int fits(const Py_buffer *buffer, size_t count, int size, const char *name) {
    if ((size == 1 || size == 2 || size == 4 || size == 8) && (size_t)buffer->len / (size_t)size >= count) return 1;
    PyErr_Format(PyExc_BufferError, "%s is too small", name);
    return 0;
}

static PyObject *highest_level(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    long level = 3;
    while (!is_level_here(level)) level--;
    return PyLong_FromLong(level);
}

static PyObject *bytes_of(const stream_t *stream) { return PyBytes_FromStringAndSize((const char *)stream->at, (Py_ssize_t)stream->used); }

static PyObject *encode_fast(PyObject *self, PyObject *args) {
    (void)self;
    int level, size;
    Py_buffer old, new_;
    unsigned long long first;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "iy*y*iKn", &level, &old, &new_, &size, &first, &limit)) return NULL;
    PyObject *result = NULL;
    size_t n = size ? (size_t)old.len / (size_t)size : 0;
    fast_out_t out = {0};
    int done = 0;
    if (fits(&new_, n, size, "new")) {
        out.limit = (size_t)limit;
        Py_BEGIN_ALLOW_THREADS
        done = AT(level, encode_fast)(old.buf, new_.buf, n, first, size, &out);
        Py_END_ALLOW_THREADS
        if (!done) PyErr_NoMemory();
    }
    if (done && (out.too_long || streams_nbytes(&out) > out.limit))
        result = Py_BuildValue("nKKO", (Py_ssize_t)out.count, (unsigned long long)out.sums.low, (unsigned long long)out.sums.high, Py_None);
    else if (done)
        result = Py_BuildValue("nKK(NNNNN)", (Py_ssize_t)out.count, (unsigned long long)out.sums.low, (unsigned long long)out.sums.high, bytes_of(&out.gaps), bytes_of(&out.ups.bytes), bytes_of(&out.marks.bytes), bytes_of(&out.steps), bytes_of(&out.escapes));
    free(out.gaps.at), free(out.ups.bytes.at), free(out.marks.bytes.at), free(out.steps.at), free(out.escapes.at);
    PyBuffer_Release(&old);
    PyBuffer_Release(&new_);
    return result;
}

static PyObject *decode_fast(PyObject *self, PyObject *args) {
    (void)self;
    int level, size, back;
    Py_buffer old, gaps, ups, marks, steps, escapes, indices, before, values;
    unsigned long long first;
    if (!PyArg_ParseTuple(args, "iy*iiK(y*y*y*y*y*)w*w*w*", &level, &old, &size, &back, &first, &gaps, &ups, &marks, &steps, &escapes, &indices, &before, &values)) return NULL;
    size_t count = (size_t)indices.len / 4;
    changes_t out = {indices.buf, before.buf, values.buf, {0, 0}};
    int ok = fits(&before, count, size, "before") && fits(&values, count, size, "values") && fits(&ups, (count + 7) / 8, 1, "ups") && fits(&marks, (count + 7) / 8, 1, "marks");
    if (ok) {
        fast_in_t in = {gaps.buf, ups.buf, marks.buf, steps.buf, escapes.buf, (size_t)gaps.len, (size_t)steps.len, (size_t)(escapes.len / size), 0, 0};
        const char *why;
        Py_BEGIN_ALLOW_THREADS
        why = AT(level, decode_fast)(old.buf, (size_t)(old.len / size), size, back, &in, count, first, &out);
        Py_END_ALLOW_THREADS
        if (why) ok = fail(why);
    }
    PyBuffer_Release(&old), PyBuffer_Release(&gaps), PyBuffer_Release(&ups), PyBuffer_Release(&marks), PyBuffer_Release(&steps), PyBuffer_Release(&escapes);
    PyBuffer_Release(&indices), PyBuffer_Release(&before), PyBuffer_Release(&values);
    return ok ? Py_BuildValue("KK", (unsigned long long)out.sums.low, (unsigned long long)out.sums.high) : NULL;
}

static PyObject *digest_array(PyObject *self, PyObject *args) {
    (void)self;
    int level, size;
    Py_buffer bits;
    unsigned long long first;
    if (!PyArg_ParseTuple(args, "iy*iK", &level, &bits, &size, &first)) return NULL;
    sums_t sums = {0, 0};
    int ok = fits(&bits, 0, size, "bits");
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        sums = AT(level, digest_array)(bits.buf, (size_t)(bits.len / size), first, size);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bits);
    return ok ? Py_BuildValue("KK", (unsigned long long)sums.low, (unsigned long long)sums.high) : NULL;
}

static PyObject *digest_changes(PyObject *self, PyObject *args) {
    (void)self;
    int level, size;
    Py_buffer positions, before, values;
    if (!PyArg_ParseTuple(args, "iy*y*y*i", &level, &positions, &before, &values, &size)) return NULL;
    sums_t sums = {0, 0};
    size_t count = (size_t)positions.len / 8;
    int ok = fits(&before, count, size, "before") && fits(&values, count, size, "values");
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        sums = AT(level, digest_changes)(positions.buf, before.buf, values.buf, count, size);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&positions), PyBuffer_Release(&before), PyBuffer_Release(&values);
    return ok ? Py_BuildValue("KK", (unsigned long long)sums.low, (unsigned long long)sums.high) : NULL;
}

static PyObject *scatter(PyObject *self, PyObject *args) {
    (void)self;
    int size;
    Py_buffer bits, indices, values;
    if (!PyArg_ParseTuple(args, "w*y*y*i", &bits, &indices, &values, &size)) return NULL;
    size_t count = (size_t)indices.len / 4;
    int ok = fits(&values, count, size, "values");
    if (ok) {
        const uint32_t *at = indices.buf;
        size_t n = (size_t)(bits.len / size);
        Py_BEGIN_ALLOW_THREADS
        ok = are_below(at, count, n);
        if (ok) BY_SIZE(size, scatter_of(bits.buf, at, values.buf, count, S));
        Py_END_ALLOW_THREADS
        if (!ok) PyErr_SetString(PyExc_IndexError, "a change lies beyond the state");
    }
    PyBuffer_Release(&bits), PyBuffer_Release(&indices), PyBuffer_Release(&values);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *round_bf16(PyObject *self, PyObject *args) {
    (void)self;
    int level;
    Py_buffer values, bits;
    if (!PyArg_ParseTuple(args, "iy*w*", &level, &values, &bits)) return NULL;
    size_t n = (size_t)values.len / 4;
    int ok = fits(&bits, n, 2, "bits");
    if (ok && n < BRIEF)
        AT(level, round_bf16)(values.buf, bits.buf, n);
    else if (ok) {
        Py_BEGIN_ALLOW_THREADS
        AT(level, round_bf16)(values.buf, bits.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values), PyBuffer_Release(&bits);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *exponents(PyObject *self, PyObject *args) {
    (void)self;
    int level, size, shift;
    unsigned field;
    Py_buffer old, new_, histogram;
    if (!PyArg_ParseTuple(args, "iy*y*iiIw*", &level, &old, &new_, &size, &shift, &field, &histogram)) return NULL;
    size_t n = size ? (size_t)old.len / (size_t)size : 0;
    int ok = fits(&new_, n, size, "new") && fits(&histogram, (size_t)field + 1, 4, "histogram");
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        AT(level, exponents)(old.buf, new_.buf, n, size, shift, field, histogram.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&old), PyBuffer_Release(&new_), PyBuffer_Release(&histogram);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *scan_classes(PyObject *self, PyObject *args) {
    (void)self;
    int level, size;
    rule_t rule;
    Py_buffer old, new_, histogram;
    unsigned long long first;
    if (!PyArg_ParseTuple(args, "iy*y*iKiIIIw*", &level, &old, &new_, &size, &first, &rule.shift, &rule.field, &rule.low, &rule.top, &histogram)) return NULL;
    scan_t scan = {0};
    uint32_t counts[CLASSES] = {0};
    uint8_t *tokens = NULL, *low_bits = NULL, *sorted = NULL;
    size_t n = size ? (size_t)old.len / (size_t)size : 0, low_nbytes = 0;
    PyObject *result = NULL;
    int done = 0;
    if (!fits(&new_, n, size, "new") || !fits(&histogram, 2 * CLASSES * 256, 4, "histogram") || rule.top >= CLASSES) goto end;
    Py_BEGIN_ALLOW_THREADS
    done = AT(level, scan_classes)(old.buf, new_.buf, n, first, size, &rule, &scan);
    if (done) {
        tokens = malloc(2 * scan.count + 1);
        sorted = malloc((4 + (size_t)size) * scan.count + 8);
        low_bits = malloc(16 * scan.count + 16);
        done = tokens && sorted && low_bits;
        if (done) low_nbytes = AT(level, tokenise)(&scan, size, counts, histogram.buf, tokens, sorted, low_bits);
    }
    Py_END_ALLOW_THREADS
    if (done)
        result = Py_BuildValue("KKy#y#y#", (unsigned long long)scan.sums.low, (unsigned long long)scan.sums.high, counts, (Py_ssize_t)sizeof counts, tokens, (Py_ssize_t)(2 * scan.count), low_bits, (Py_ssize_t)low_nbytes);
    else
        PyErr_NoMemory();
end:
    free(scan.classes), free(scan.gaps), free(scan.distances), free(tokens), free(sorted), free(low_bits);
    PyBuffer_Release(&old), PyBuffer_Release(&new_), PyBuffer_Release(&histogram);
    return result;
}

static PyObject *decode_compact(PyObject *self, PyObject *args) {
    (void)self;
    int level, size;
    rule_t rule;
    Py_buffer old, payload, slots, indices, before, values;
    unsigned long long first;
    if (!PyArg_ParseTuple(args, "iy*iKiIIIy*y*w*w*w*", &level, &old, &size, &first, &rule.shift, &rule.field, &rule.low, &rule.top, &payload, &slots, &indices, &before, &values)) return NULL;
    size_t n = (size_t)indices.len / 4;
    const char *why = "needs a rule of fewer classes";
    changes_t out = {indices.buf, before.buf, values.buf, {0, 0}};
    int ok = fits(&before, n, size, "before") && fits(&values, n, size, "values") && fits(&slots, 2 * CLASSES * 4096, 4, "slots");
    if (ok) {
        compact_t from;
        Py_BEGIN_ALLOW_THREADS
        if (rule.top < CLASSES) why = read_compact(payload.buf, (size_t)payload.len, (size_t)rule.top + 1, n, &from);
        from.symbols.slots = slots.buf;
        if (!why) why = apply_compact(level, old.buf, (size_t)(old.len / size), size, first, &rule, &from, n, &out);
        Py_END_ALLOW_THREADS
        if (why) ok = fail(why);
    }
    PyBuffer_Release(&old), PyBuffer_Release(&payload), PyBuffer_Release(&slots);
    PyBuffer_Release(&indices), PyBuffer_Release(&before), PyBuffer_Release(&values);
    return ok ? Py_BuildValue("KK", (unsigned long long)out.sums.low, (unsigned long long)out.sums.high) : NULL;
}

static int check_runs(const Py_buffer *counts, const Py_buffer *tables, size_t n, size_t table_count, size_t lanes) {
    size_t runs = (size_t)counts->len / 4, sum = 0;
    int ok = runs == (size_t)tables->len / 4 && lanes && lanes <= MAX_LANES && !(lanes & (lanes - 1)) && lanes >= 16;
    for (size_t run = 0; ok && run < runs; run++) {
        sum += ((const uint32_t *)counts->buf)[run];
        ok = ((const uint32_t *)tables->buf)[run] < table_count;
    }
    return ok && sum == n ? 1 : fail("runs do not fit");
}

static PyObject *rans_encode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer symbols, counts, tables, frequencies, starts;
    int level;
    Py_ssize_t lanes;
    if (!PyArg_ParseTuple(args, "iy*y*y*y*y*n", &level, &symbols, &counts, &tables, &frequencies, &starts, &lanes)) return NULL;
    size_t n = (size_t)symbols.len;
    PyObject *result = NULL;
    uint8_t *room = NULL, *word = NULL;
    uint32_t x[MAX_LANES];
    if (fits(&starts, (size_t)frequencies.len / 2, 2, "starts") && check_runs(&counts, &tables, n, (size_t)frequencies.len / 512, (size_t)lanes)) {
        room = malloc(2 * n + 2);
        if (room) {
            uint8_t *end = room + 2 * n + 2;
            rans_out_t out = {symbols.buf, n, (size_t)lanes, (size_t)counts.len / 4, counts.buf, tables.buf, frequencies.buf, starts.buf};
            Py_BEGIN_ALLOW_THREADS
            word = AT(level, rans_encode)(&out, x, end);
            Py_END_ALLOW_THREADS
            if (word) result = Py_BuildValue("y#y#", x, 4 * lanes, word, (Py_ssize_t)(end - word));
            else result = Py_BuildValue("OO", Py_None, Py_None);
        } else
            PyErr_NoMemory();
    }
    free(room);
    PyBuffer_Release(&symbols), PyBuffer_Release(&counts), PyBuffer_Release(&tables), PyBuffer_Release(&frequencies), PyBuffer_Release(&starts);
    return result;
}

static PyObject *rans_decode(PyObject *self, PyObject *args) {
    (void)self;
    int level;
    Py_buffer states, words, counts, tables, slots, out;
    if (!PyArg_ParseTuple(args, "iy*y*y*y*y*w*", &level, &states, &words, &counts, &tables, &slots, &out)) return NULL;
    size_t lanes = (size_t)states.len / 4;
    int ok = check_runs(&counts, &tables, (size_t)out.len, (size_t)slots.len / 16384, lanes);
    if (ok) {
        rans_in_t in = {states.buf, words.buf, (size_t)words.len / 2, lanes, (size_t)counts.len / 4, counts.buf, tables.buf, slots.buf};
        const char *why;
        Py_BEGIN_ALLOW_THREADS
        why = AT(level, rans_decode)(&in, out.buf);
        Py_END_ALLOW_THREADS
        if (why) ok = fail(why);
    }
    PyBuffer_Release(&states), PyBuffer_Release(&words), PyBuffer_Release(&counts), PyBuffer_Release(&tables), PyBuffer_Release(&slots), PyBuffer_Release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *split_planes(PyObject *self, PyObject *args) {
    (void)self;
    int level, size, rotate;
    Py_buffer bits, planes, histograms;
    if (!PyArg_ParseTuple(args, "iy*iiw*w*", &level, &bits, &size, &rotate, &planes, &histograms)) return NULL;
    size_t n = size ? (size_t)bits.len / (size_t)size : 0;
    int ok = fits(&bits, n, size, "bits") && fits(&planes, n, size, "planes") && fits(&histograms, 256 * (size_t)size, 4, "histograms");
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        AT(level, split_planes)(bits.buf, n, size, rotate, planes.buf, histograms.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bits), PyBuffer_Release(&planes), PyBuffer_Release(&histograms);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *join_planes(PyObject *self, PyObject *args) {
    (void)self;
    int level, size, rotate;
    Py_buffer bits, given[8] = {{0}};
    PyObject *planes;
    if (!PyArg_ParseTuple(args, "iOiiw*", &level, &planes, &size, &rotate, &bits)) return NULL;
    int ok = fits(&bits, 0, size, "bits"), held = 0;
    size_t n = ok ? (size_t)bits.len / (size_t)size : 0;
    const uint8_t *each[8];
    for (; ok && held < size; held++) {
        PyObject *plane = PySequence_GetItem(planes, held);
        ok = plane && !PyObject_GetBuffer(plane, &given[held], PyBUF_SIMPLE);
        Py_XDECREF(plane);
        if (!ok) break;
        each[held] = given[held].buf;
        ok = fits(&given[held], n, 1, "a plane");
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        AT(level, join_planes)(each, n, size, rotate, bits.buf);
        Py_END_ALLOW_THREADS
    }
    while (held-- > 0) PyBuffer_Release(&given[held]);
    PyBuffer_Release(&bits);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"highest_level", highest_level, METH_NOARGS, NULL},
    {"encode_fast", encode_fast, METH_VARARGS, NULL},
    {"decode_fast", decode_fast, METH_VARARGS, NULL},
    {"digest_array", digest_array, METH_VARARGS, NULL},
    {"digest_changes", digest_changes, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {"round_bf16", round_bf16, METH_VARARGS, NULL},
    {"exponents", exponents, METH_VARARGS, NULL},
    {"scan_classes", scan_classes, METH_VARARGS, NULL},
    {"decode_compact", decode_compact, METH_VARARGS, NULL},
    {"split_planes", split_planes, METH_VARARGS, NULL},
    {"join_planes", join_planes, METH_VARARGS, NULL},
    {"rans_encode", rans_encode, METH_VARARGS, NULL},
    {"rans_decode", rans_decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Loops of the weight codec; see kernels.py.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
