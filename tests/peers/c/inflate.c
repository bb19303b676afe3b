#include "inflate.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef size_t Decompress(void *to, size_t room_nbytes, const void *from, size_t nbytes);
typedef unsigned long long ContentSize(const void *from, size_t nbytes);

// Exit code 3: not a fault of the bytes.
static void *symbol(const char *name) {
    void *library = dlopen("libzstd.so.1", RTLD_NOW);
    if (library == NULL) library = dlopen("libzstd.1.dylib", RTLD_NOW);
    void *found = library ? dlsym(library, name) : NULL;
    if (found != NULL) return found;
    fprintf(stderr, "no libzstd on this machine\n");
    exit(3);
}

Bytes inflated(Bytes frame, size_t nbytes) {
    Decompress *decompress;
    ContentSize *content_size;
    *(void **)&decompress = symbol("ZSTD_decompress");
    *(void **)&content_size = symbol("ZSTD_getFrameContentSize");
    if (content_size(frame.at, frame.nbytes) != nbytes) refuse("a frame says another size");
    uint8_t *made = room(nbytes, 1);
    if (decompress(made, nbytes, frame.at, frame.nbytes) != nbytes) refuse("a frame is damaged");
    return (Bytes){made, nbytes};
}
