/* Digests of pages by sha256, for all pages of a call at once. hashing.py does the same with hashlib, which takes two
   calls and an allocation a page. SHA-256 itself is that of the libcrypto which hashlib has loaded, so this is built
   without OpenSSL's headers. If there is none, importing this module fails, and hashing.py uses hashlib. chained.pyi
   documents arguments, results and errors. The GIL is held throughout. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DIGEST = 32 }; /* bytes */

/* SHA256_CTX, 112 bytes in OpenSSL and its forks. Only libcrypto looks inside. */
typedef struct { uint64_t words[16]; } State;

/* These always return 1. */
static int (*sha_init)(State *);
static int (*sha_update)(State *, const void *, size_t);
static int (*sha_final)(unsigned char *, State *);

typedef struct {
    PyObject_HEAD
    State state;     /* after all pages so far */
    PyObject *known; /* the digests of these pages, a bytearray */
} Chain;

static Chain *new_chain(PyTypeObject *type, const char *known, Py_ssize_t length)
{
    PyObject *digests = PyByteArray_FromStringAndSize(known, length);
    Chain *self = digests == NULL ? NULL : PyObject_New(Chain, type);
    if (self == NULL) Py_XDECREF(digests);
    else self->known = digests;
    return self;
}

static PyObject *chain_new(PyTypeObject *type, PyObject *args, PyObject *by_name)
{
    static char *names[] = {"", NULL};
    Py_buffer seed;
    if (!PyArg_ParseTupleAndKeywords(args, by_name, "y*:Sha256Chain", names, &seed)) return NULL;
    Chain *self = new_chain(type, NULL, 0);
    if (self != NULL) {
        memset(&self->state, 0, sizeof self->state);
        sha_init(&self->state);
        sha_update(&self->state, seed.buf, (size_t)seed.len);
    }
    PyBuffer_Release(&seed);
    return (PyObject *)self;
}

static void chain_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((Chain *)self)->known);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *chain_copy(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *known = ((Chain *)self)->known;
    Chain *twin = new_chain(Py_TYPE(self), PyByteArray_AsString(known), PyByteArray_Size(known));
    if (twin != NULL) twin->state = ((Chain *)self)->state;
    return (PyObject *)twin;
}

static PyObject *chain_update(PyObject *self, PyObject *data)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(data, &bytes, PyBUF_SIMPLE) < 0) return NULL;
    sha_update(&((Chain *)self)->state, bytes.buf, (size_t)bytes.len);
    PyBuffer_Release(&bytes);
    Py_RETURN_NONE;
}

/* Hashes the pages and returns their digests. On NULL an exception is set, and nothing has changed. */
static const char *hash_pages(Chain *self, const char *pages, Py_ssize_t size, Py_ssize_t count)
{
    Py_ssize_t before = PyByteArray_Size(self->known);
    if (count > (PY_SSIZE_T_MAX - before) / DIGEST) return (char *)PyErr_NoMemory();
    if (PyByteArray_Resize(self->known, before + count * DIGEST) < 0) return NULL;
    char *digests = PyByteArray_AsString(self->known) + before;
    for (Py_ssize_t at = 0; at < count; at++) {
        sha_update(&self->state, pages + at * size, (size_t)size);
        State ended = self->state; /* sha_final ends a copy */
        sha_final((unsigned char *)digests + at * DIGEST, &ended);
    }
    return digests;
}

static PyObject *chain_extend(PyObject *self, PyObject *args)
{
    Py_buffer pages;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y*n:extend", &pages, &size)) return NULL;
    const char *digests = NULL;
    if (size > 0 && pages.len % size == 0) digests = hash_pages((Chain *)self, pages.buf, size, pages.len / size);
    else PyErr_Format(PyExc_ValueError, "%zd bytes do not fill pages of %zd bytes evenly", pages.len, size);
    PyBuffer_Release(&pages);
    return digests == NULL ? NULL : Py_NewRef(Py_None);
}

/* 1 if each chain knows as many pages as `firsts` says, else 0; -1 if an exception is set. */
static int all_at(PyObject *type, PyObject *chains, PyObject *firsts)
{
    int ready = 1;
    for (Py_ssize_t at = 0; at < PyList_Size(chains); at++) {
        PyObject *chain = PyList_GetItem(chains, at);
        if ((PyObject *)Py_TYPE(chain) != type)
            return PyErr_Format(PyExc_TypeError, "what is at %zd of the list is no Sha256Chain", at), -1;
        Py_ssize_t first = PyLong_AsSsize_t(PyList_GetItem(firsts, at));
        if (first == -1 && PyErr_Occurred()) return -1;
        Py_ssize_t known = PyByteArray_Size(((Chain *)chain)->known);
        ready &= known % DIGEST == 0 && known / DIGEST == first;
    }
    return ready;
}

static PyObject *chain_extend_each(PyObject *type, PyObject *args)
{
    PyObject *chains, *firsts, *found = NULL;
    Py_buffer pages;
    if (!PyArg_ParseTuple(args, "O!O!y*:extend_each", &PyList_Type, &chains, &PyList_Type, &firsts, &pages)) return NULL;
    Py_ssize_t count = PyList_Size(chains), size = count == 0 ? 0 : pages.len / count;
    int ready = -1;
    if (PyList_Size(firsts) == count && count * size == pages.len && (count == 0) == (size == 0))
        ready = all_at(type, chains, firsts);
    else
        PyErr_Format(PyExc_ValueError, "%zd bytes are no page each for %zd chains after %zd pages", pages.len, count,
                     PyList_Size(firsts));
    if (ready == 0) found = Py_NewRef(Py_None);
    if (ready == 1) found = PyBytes_FromStringAndSize(NULL, count * DIGEST);
    /* From here on no Python code runs that could change the lists. */
    for (Py_ssize_t at = 0; ready == 1 && found != NULL && at < count; at++) {
        Chain *chain = (Chain *)PyList_GetItem(chains, at);
        const char *digest = hash_pages(chain, (const char *)pages.buf + at * size, size, 1);
        if (digest == NULL) Py_CLEAR(found);
        else memcpy(PyBytes_AsString(found) + at * DIGEST, digest, DIGEST);
    }
    PyBuffer_Release(&pages);
    return found;
}

/* Looks in the library of hashlib's module, then in the system's libcrypto. */
static int find_sha256(void)
{
    PyObject *hashlib = PyImport_ImportModule("_hashlib"), *path = NULL;
    PyObject *file = hashlib == NULL ? NULL : PyObject_GetAttrString(hashlib, "__file__");
    if (file == NULL || !PyUnicode_FSConverter(file, &path)) PyErr_Clear(); /* it is built into the interpreter */
    const char *places[] = {path == NULL ? NULL : PyBytes_AsString(path), "libcrypto.so.3"};
    for (int at = 0; at < 2 && sha_final == NULL; at++) {
        void *library = dlopen(places[at], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) continue;
        sha_init = (int (*)(State *))dlsym(library, "SHA256_Init");
        sha_update = (int (*)(State *, const void *, size_t))dlsym(library, "SHA256_Update");
        if (sha_init && sha_update) sha_final = (int (*)(unsigned char *, State *))dlsym(library, "SHA256_Final");
    }
    Py_XDECREF(path);
    Py_XDECREF(file);
    Py_XDECREF(hashlib);
    if (sha_final == NULL) PyErr_SetString(PyExc_ImportError, "no libcrypto with SHA256_Update is found");
    return sha_final == NULL ? -1 : 0;
}

static PyMethodDef methods[] = {{"copy", chain_copy, METH_NOARGS, NULL},
                                {"update", chain_update, METH_O, NULL},
                                {"extend", chain_extend, METH_VARARGS, NULL},
                                {"extend_each", chain_extend_each, METH_VARARGS | METH_CLASS, NULL},
                                {NULL, NULL, 0, NULL}};
static PyMemberDef members[] = {{"known", T_OBJECT_EX, offsetof(Chain, known), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot chain[] = {{Py_tp_new, chain_new},
                              {Py_tp_dealloc, chain_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_members, members},
                              {0, NULL}};
static PyType_Spec spec = {"kvcache.replica.chained.Sha256Chain", sizeof(Chain), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, chain};

static int fill(PyObject *module)
{
    PyObject *type = find_sha256() < 0 ? NULL : PyType_FromModuleAndSpec(module, &spec, NULL);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, "Sha256Chain", type);
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chained", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_chained(void)
{
    return PyModuleDef_Init(&definition);
}
