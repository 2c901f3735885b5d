/* A range of a file, read piece by piece into memory that stays in the processor's nearest cache,
 * and handed on from there, with no interpreter in between. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64

#include "native.h"

#include <unistd.h>

/* Read `nbytes` at `position` of `fd`, `piece` bytes at a time, and hand each piece to the sink.
 *
 * Returns the bytes that the sink took: fewer than asked for where a read failed or came up short,
 * or the sink did not take a piece. The caller goes on from there, and finds out why. */
EXPORT int64_t kvstore_pump(int fd, int64_t position, int64_t nbytes, char *staging, int64_t piece,
                            sink_t sink, void *context)
{
    int64_t done = 0;
    while (done < nbytes) {
        int64_t size = nbytes - done < piece ? nbytes - done : piece;
        for (int64_t got = 0; got < size;) {
            ssize_t more = pread(fd, staging + got, (size_t)(size - got), (off_t)(position + done + got));
            if (more <= 0)
                return done;
            got += more;
        }
        if (sink(context, staging, done, size))
            return done;
        done += size;
    }
    return done;
}
