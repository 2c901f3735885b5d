/* What the sources of this folder share.
 *
 * Plain C99 without Python's headers: the functions are called through ctypes, which lets the
 * interpreter's lock go during a call. */

#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Takes bytes of a range as they are read: `nbytes` at `offset` of it, in order. They may be changed
 * and are gone after the call. Returns 0 to go on; anything else leaves these bytes, and all after
 * them, to the slower way, which says what is wrong with them. */
typedef int64_t (*sink_t)(void *context, char *data, int64_t offset, int64_t nbytes);

#endif
