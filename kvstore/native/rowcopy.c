/* Chunks between their canonical bytes and paged buffers, in one call that needs no interpreter.
 *
 * A load checks each chunk and spreads it over pages that lie far apart, in rows of some hundred
 * bytes to some thousand. Two things make this quick. A chunk is checked and copied while it is in
 * the processor's nearest cache. And what is written to the pages is not read again before it has
 * left the caches, so it is written past them: a store that first fetches the line it is about to
 * overwrite moves half as many bytes again.
 *
 * Called through ctypes, see kvstore/rowcopy.py, or by the pump of an I/O engine. */

#include "native.h"

#include <stddef.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define CRC_BYTES 4
#define LIMIT (INT64_MAX / 8) /* of any offset or size: no sum below overflows */

/* How the rows of one part of the content lie on both sides; as in rowcopy.py. */
typedef struct {
    const int64_t *starts;     /* offset in the pages of each chunk; negative: not of this part */
    const int64_t *page_units; /* offset in the pages of each unit, from its chunk's */
    const int64_t *data_units; /* offset in the chunk of each unit */
    int64_t units;
    int64_t content;   /* offset of the part in a unit */
    int64_t count;     /* items of a unit */
    int64_t nbytes;    /* of an item */
    int64_t page_step; /* from an item to the next, in the pages */
    int64_t data_step; /* the same in the chunk */
} part_t;

/* CRC-32C of `count` bytes, going on from that of what came before; as libcrc32c has it. */
typedef uint32_t (*crc_t)(uint32_t, const uint8_t *, size_t);

/* Pages, and the chunks whose rows lie in them; as in rowcopy.py. */
typedef struct {
    char *memory;
    int64_t nbytes;
    const part_t *parts;
    int64_t number; /* of parts */
    int64_t chunks;
    int64_t chunk_bytes;
    int64_t stride;
    crc_t crc;
} pages_t;

/* Whole cache lines, past the caches. The target is aligned to a line. */
static void stream(char *target, const char *source, int64_t nbytes)
{
#if defined(__SSE2__)
    for (int64_t i = 0; i < nbytes; i += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + i + 48));
        _mm_stream_si128((__m128i *)(target + i), a);
        _mm_stream_si128((__m128i *)(target + i + 16), b);
        _mm_stream_si128((__m128i *)(target + i + 32), c);
        _mm_stream_si128((__m128i *)(target + i + 48), d);
    }
#else
    memcpy(target, source, (size_t)nbytes);
#endif
}

/* Whether base + offsets[...] + reach lies within 0 to size for all offsets that are not skipped. */
static int within(const int64_t *offsets, int64_t count, int64_t size, int64_t reach, int skips)
{
    for (int64_t i = 0; i < count; i++) {
        if (offsets[i] < 0 ? !skips : offsets[i] > size - reach)
            return 0;
    }
    return 1;
}

static int64_t largest(const int64_t *values, int64_t count)
{
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++)
        most = values[i] > most ? values[i] : most;
    return most;
}

static int fits(const part_t *p, int64_t first, int64_t chunks, int64_t pages_bytes,
                int64_t chunk_bytes)
{
    if (p->units < 0 || p->content < 0 || p->count < 1 || p->nbytes < 1 || p->page_step < 0
        || p->data_step < 0 || p->content > LIMIT || p->nbytes > LIMIT)
        return 0;
    if (p->count > 1 && (p->page_step > LIMIT / p->count || p->data_step > LIMIT / p->count))
        return 0;
    int64_t page_reach = (p->count - 1) * p->page_step + p->nbytes;
    int64_t data_reach = (p->count - 1) * p->data_step + p->nbytes + p->content;
    if (page_reach > pages_bytes || data_reach > chunk_bytes)
        return p->units == 0;
    return within(p->data_units, p->units, chunk_bytes, data_reach, 0)
        && within(p->page_units, p->units, pages_bytes, page_reach, 0)
        && within(p->starts + first, chunks, pages_bytes,
                  largest(p->page_units, p->units) + page_reach, 1);
}

static void copy(const part_t *p, char *page, char *chunk, int to_pages)
{
    int64_t count = p->count, nbytes = p->nbytes;
    if (p->page_step == nbytes && p->data_step == nbytes) {
        nbytes *= count;
        count = 1;
    }
    for (int64_t u = 0; u < p->units; u++) {
        char *far = page + p->page_units[u], *near = chunk + p->content + p->data_units[u];
        for (int64_t k = 0; k < count; k++, far += p->page_step, near += p->data_step) {
            if (!to_pages)
                memcpy(near, far, (size_t)nbytes);
            else if (nbytes % LINE == 0 && (uintptr_t)far % LINE == 0)
                stream(far, near, nbytes);
            else
                memcpy(far, near, (size_t)nbytes);
        }
    }
}

static uint32_t loaded(const char *at)
{
    const uint8_t *b = (const uint8_t *)at;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static void put(char *at, uint32_t value)
{
    for (int i = 0; i < CRC_BYTES; i++)
        at[i] = (char)(value >> 8 * i & 0xff);
}

/* Move `chunks` chunks, the `first` of those that the parts speak of and what follows.
 *
 * The data has a chunk of `chunk_bytes` every `stride` bytes. With `sums`, its checksum follows it:
 * compared before the chunk is copied to the pages, put there after one was copied from them.
 * Returns the number of chunks moved: fewer than asked for if one does not match its checksum. -1
 * if an offset leads out of either memory; then nothing was touched. */
EXPORT int64_t kvstore_move(const pages_t *pages, char *data, int64_t data_bytes, int64_t first,
                            int64_t chunks, int to_pages, int sums)
{
    int64_t pages_bytes = pages->nbytes, chunk_bytes = pages->chunk_bytes, stride = pages->stride;
    const part_t *parts = pages->parts;
    crc_t crc = sums ? pages->crc : NULL;
    int64_t used = chunk_bytes + (crc ? CRC_BYTES : 0);
    if (chunks <= 0)
        return chunks ? -1 : 0;
    if (first < 0 || first > pages->chunks || chunks > pages->chunks - first
        || chunk_bytes < 0 || chunk_bytes > LIMIT || stride < 1 || stride < used
        || pages_bytes < 0 || pages_bytes > LIMIT
        || data_bytes > LIMIT || data_bytes < used || (data_bytes - used) / stride < chunks - 1)
        return -1;
    for (int64_t i = 0; i < pages->number; i++)
        if (!fits(parts + i, first, chunks, pages_bytes, chunk_bytes))
            return -1;
    int64_t c = 0;
    for (; c < chunks; c++) {
        char *chunk = data + c * stride;
        if (crc && to_pages
            && crc(0, (const uint8_t *)chunk, (size_t)chunk_bytes) != loaded(chunk + chunk_bytes))
            break;
        for (int64_t i = 0; i < pages->number; i++) {
            int64_t start = parts[i].starts[first + c];
            if (start >= 0)
                copy(parts + i, pages->memory + start, chunk, to_pages);
        }
        if (crc && !to_pages)
            put(chunk + chunk_bytes, crc(0, (const uint8_t *)chunk, (size_t)chunk_bytes));
    }
#if defined(__SSE2__)
    if (to_pages)
        _mm_sfence();
#endif
    return c;
}

static int64_t sink(pages_t *pages, char *data, int64_t offset, int64_t nbytes, int sums)
{
    if (pages->stride < 1 || offset < 0 || offset % pages->stride || nbytes < 1)
        return 1;
    int64_t chunks = (nbytes - 1) / pages->stride + 1;
    return kvstore_move(pages, data, nbytes, offset / pages->stride, chunks, 1, sums) != chunks;
}

/* Sinks, see native.h: into the pages, checked or not. */
EXPORT int64_t kvstore_sink_checked(void *pages, char *data, int64_t offset, int64_t nbytes)
{
    return sink(pages, data, offset, nbytes, 1);
}

EXPORT int64_t kvstore_sink(void *pages, char *data, int64_t offset, int64_t nbytes)
{
    return sink(pages, data, offset, nbytes, 0);
}
