// Steps without a look at any text between them, see tb_run_steps in sampling.h.
#define _POSIX_C_SOURCE 199309L // clock_gettime

#include "sampling.h"

#include <stddef.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Give every row's token to its batch entry, one position on; or take that back.
static void move_on(const struct tb_steps * s, const struct tb_draw_row * rows, int32_t by) {
    for (int32_t i = 0; i < s->batch.n_tokens; ++i) {
        s->batch.token[i] = rows[i].token;
        s->batch.pos[i] += by;
    }
}

int32_t tb_run_steps(const struct tb_draw_context * c, struct tb_steps * s, struct tb_draw_row * rows, int32_t most) {
    const int32_t n = s->batch.n_tokens;
    const int64_t end = now_ns() + s->limit_ns;
    int64_t longest = s->step_ns;
    for (int32_t step = 0; step < most; ++step) {
        const int64_t began = now_ns();
        if (began + longest > end || __atomic_load_n(&s->stop, __ATOMIC_RELAXED)) {
            return step;
        }
        move_on(s, rows, 1);
        if (s->decode(s->context, s->batch) != 0) {
            move_on(s, rows, -1);
            return step;
        }
        s->times[3 * step] = began;
        s->times[3 * step + 1] = now_ns();
        tb_find_logits(s->context, s->get, rows, n);
        tb_draw_rows(c, rows, n);
        s->ends = false;
        for (int32_t i = 0; i < n; ++i) {
            const int32_t token = rows[i].token;
            s->tokens[(size_t)step * (size_t)n + (size_t)i] = token;
            s->logprobs[(size_t)step * (size_t)n + (size_t)i] = (double)rows[i].logit - rows[i].norm;
            s->ends = s->ends || token < 0 || (s->is_end != NULL && s->is_end(s->vocab, token));
        }
        const int64_t ended = now_ns();
        s->times[3 * step + 2] = ended;
        if (s->ends) {
            return step + 1;
        }
        longest = ended - began > longest ? ended - began : longest;
    }
    return most;
}
