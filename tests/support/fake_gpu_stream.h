/* Streams of the fake GPU: what they hold runs as late as events and waits allow. */
#ifndef ISLET_FAKE_GPU_STREAM_H
#define ISLET_FAKE_GPU_STREAM_H

#include "fake_gpu_inner.h"

void fake_gpu_stream_fill(struct k_ops *ops);
/* A command behind the others, to be filled in; then fake_gpu_stream_pushed, which runs it at once
 * if the device is eager. */
struct fake_command *fake_gpu_stream_push(struct k_stream *stream, enum fake_kind kind);
enum err_code fake_gpu_stream_pushed(struct k_stream *stream);

#endif
