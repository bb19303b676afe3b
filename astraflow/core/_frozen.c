/* Sets the fields of an object of a frozen dataclass; see frozen.py. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* fill(object, names, *values): past the __setattr__ that refuses. */
static PyObject *fill(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count < 2 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != count - 2) {
        PyErr_SetString(PyExc_TypeError, "fill() takes an object, a tuple of names, and as many values");
        return NULL;
    }
    for (Py_ssize_t i = 2; i < count; i++)
        if (PyObject_GenericSetAttr(args[0], PyTuple_GetItem(args[1], i - 2), args[i]) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", (PyCFunction)(void (*)(void))fill, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frozen", "Fields of frozen objects; see frozen.py.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frozen(void) { return PyModule_Create(&module); }
