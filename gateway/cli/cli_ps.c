#include "cli_ps.h"

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>

#include <jansson.h>

#include "cli_figures.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_stop.h"
#include "cli_term.h"
#include "ticks.h"
#include "units.h"

enum {
    BETWEEN_MS = 500,
    EXIT_NO_SERVER = 69
};

struct reading {
    json_t *status;
    uint64_t at_ns;
};

static double worker(const struct reading *r, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "worker.%s", name);
    return cli_figures_number(r->status, path);
}

/* Growth of a counter in units a second; 0 if the worker was started anew in between. */
static double rate(const struct reading *a, const struct reading *b, const char *name)
{
    double grown = worker(b, name) - worker(a, name);
    double seconds = (double)(b->at_ns - a->at_ns) / 1e9;
    return grown > 0 && seconds > 0 ? grown / seconds : 0;
}

static struct units_text bytes(double n)
{
    return units_bytes(n > 0 ? (uint64_t)n : 0);
}

static void heading(const struct cli_term *t, const char *text)
{
    printf("%s%-10s%s", cli_term_out(t, CLI_TERM_BOLD), text, cli_term_out(t, CLI_TERM_PLAIN));
}

static void sequences_print(const struct cli_term *t, const struct reading *r)
{
    size_t i;
    json_t *s;
    json_t *all = json_object_get(json_object_get(r->status, "worker"), "sequences");
    heading(t, "sequences");
    printf("%.0f running, %.0f waiting for KV pages, %.0f in the queue of the gateway\n",
           worker(r, "sequences_running"), worker(r, "sequences_waiting"),
           cli_figures_number(r->status, "gateway.queued"));
    if (json_array_size(all) == 0)
        return;
    printf("  %8s %-8s %8s %9s %9s %8s %10s\n", "id", "state", "prompt", "prefilled", "generated",
           "kv pages", "age");
    json_array_foreach(all, i, s)
    {
        printf("  %8.0f %-8s %8.0f %9.0f %9.0f %8.0f %10s\n", cli_figures_number(s, "id"),
               cli_figures_text(s, "state"), cli_figures_number(s, "prompt"),
               cli_figures_number(s, "prefilled"), cli_figures_number(s, "generated"),
               cli_figures_number(s, "kv_pages"),
               units_ms((uint64_t)cli_figures_number(s, "age_ms")).s);
    }
}

/* The GPU as other programs use it too. */
static void device_print(const struct cli_term *t, const struct reading *r)
{
    const double total = worker(r, "gpu_memory_total_bytes");
    const double given = worker(r, "vram_given_back_bytes");
    const double celsius = worker(r, "gpu_temperature_celsius");
    const double limit = worker(r, "governor_batch_limit");
    if (total == 0)
        return;
    heading(t, "");
    printf("%s of %s in use by all programs", bytes(worker(r, "gpu_memory_used_bytes")).s,
           bytes(total).s);
    if (given > 0)
        printf(", %s of islands given back", bytes(given).s);
    if (celsius > 0)
        printf("; %.0f C, %.0f W, busy %.0f %%", celsius, worker(r, "gpu_power_milliwatts") / 1000,
               worker(r, "gpu_utilization_percent"));
    if (limit > 0)
        printf("; %.0f sequences a step", limit);
    putchar('\n');
}

/* Nothing where no GPU computes. */
static void gpu_print(const struct cli_term *t, const struct reading *r)
{
    if (worker(r, "vram_budget_bytes") == 0)
        return;
    heading(t, "gpu");
    printf(
        "VRAM budget %s: islands %s of %s in use (%.0f of %.0f experts), %.0f hits; %.0f experts "
        "copied (%s), CPU %s beside it\n",
        bytes(worker(r, "vram_budget_bytes")).s, bytes(worker(r, "vram_islands_used_bytes")).s,
        bytes(worker(r, "vram_islands_bytes")).s, worker(r, "experts_in_vram"),
        worker(r, "experts_total"), worker(r, "expert_hits_vram_total"),
        worker(r, "expert_copies_total"), bytes(worker(r, "expert_copy_bytes_total")).s,
        units_ms((uint64_t)(worker(r, "cpu_experts_us_total") / 1000)).s);
    device_print(t, r);
}

static void memory_print(const struct cli_term *t, const struct reading *r)
{
    double page = worker(r, "kv_page_bytes");
    heading(t, "memory");
    printf("%s resident, budget %s: weights %s, work space %s\n",
           bytes(worker(r, "resident_bytes")).s, bytes(worker(r, "ram_budget_bytes")).s,
           bytes(worker(r, "weights_bytes")).s, bytes(worker(r, "work_bytes")).s);
    heading(t, "kv");
    printf("%s of %s in use (%.0f of %.0f pages), %s kept for later prompts\n",
           bytes(worker(r, "kv_pages_used") * page).s, bytes(worker(r, "kv_pages_total") * page).s,
           worker(r, "kv_pages_used"), worker(r, "kv_pages_total"),
           bytes(worker(r, "kv_pages_cached") * page).s);
    double hits = worker(r, "expert_hits_ram_total"), misses = worker(r, "expert_misses_total");
    heading(t, "experts");
    printf("RAM %s of %s in use (%.0f of %.0f experts)%s, %.0f hits (%.1f %%), %.0f evictions\n",
           bytes(worker(r, "ram_slots_used_bytes")).s, bytes(worker(r, "ram_slots_bytes")).s,
           worker(r, "experts_resident"), worker(r, "experts_total"),
           worker(r, "ram_locked") != 0 ? ", locked" : ", not locked", hits,
           hits + misses > 0 ? 100 * hits / (hits + misses) : 100.0,
           worker(r, "expert_evictions_total"));
    gpu_print(t, r);
    heading(t, "ssd");
    printf("%.0f misses, %s read in %.0f reads (%.0f failed), %s waited; %s\n", misses,
           bytes(worker(r, "ssd_bytes_total")).s, worker(r, "ssd_reads_total"),
           worker(r, "ssd_errors_total"),
           units_ms((uint64_t)(worker(r, "ssd_wait_us_total") / 1000)).s,
           cli_figures_text(r->status, "worker.storage"));
}

static void rates_print(const struct cli_term *t, const struct reading *a, const struct reading *b)
{
    double steps = rate(a, b, "steps_total");
    heading(t, "rates");
    printf("%.1f tok/s generated, %.1f tok/s of prompts, %.1f steps/s",
           rate(a, b, "generated_tokens_total"), rate(a, b, "prompt_tokens_total"), steps);
    if (steps > 0)
        printf(" of %.1f rows and %.2f ms", rate(a, b, "rows_total") / steps,
               rate(a, b, "step_us_total") / steps / 1e3);
    putchar('\n');
    heading(t, "requests");
    printf("%.0f accepted, %.0f done, %.0f failed, %.0f cancelled, %.0f pre-empted\n",
           worker(b, "requests_total"), worker(b, "requests_done_total"),
           worker(b, "requests_failed_total"), worker(b, "requests_cancelled_total"),
           worker(b, "preemptions_total"));
}

/* What is not as it should be; nothing if it is. */
static void note_print(const struct cli_term *t, const char *what, const char *text)
{
    if (text[0] == '\0')
        return;
    heading(t, what);
    puts(text);
}

static void view_print(const struct cli_term *t, const struct reading *a, const struct reading *b)
{
    heading(t, "model");
    printf("%s, %s, %s kernels, %.0f threads, up %s\n", cli_figures_text(b->status, "model"),
           cli_figures_text(b->status, "state"), cli_figures_text(b->status, "worker.backend"),
           worker(b, "cpu_threads"), units_ms((uint64_t)worker(b, "uptime_ms")).s);
    note_print(t, "reason", cli_figures_text(b->status, "reason"));
    note_print(t, "degraded", cli_figures_text(b->status, "worker.degraded"));
    sequences_print(t, b);
    memory_print(t, b);
    rates_print(t, a, b);
}

static enum err_code read_once(const struct cli_server *server, struct reading *ret, struct err *e)
{
    json_decref(ret->status);
    *ret = (struct reading){.at_ns = ticks_ns(ticks_real())};
    return cli_figures_status(server, &ret->status, NULL, e);
}

/* True if Ctrl-C came meanwhile. */
static bool wait_ms(int stop_fd, int ms)
{
    struct pollfd p = {.fd = stop_fd, .events = POLLIN};
    return poll(&p, 1, ms) > 0;
}

static enum err_code show(const struct cli_options *o, const struct cli_server *server, int stop_fd,
                          struct err *e)
{
    struct cli_term term;
    struct reading a = {0}, b = {0};
    bool again = true;
    cli_term_init(&term);
    enum err_code code = read_once(server, &a, e);
    int between = o->watch != CLI_NOT_GIVEN ? (int)o->watch * 1000 : BETWEEN_MS;
    while (code == ERR_OK && again && !wait_ms(stop_fd, between)) {
        code = read_once(server, &b, e);
        if (code != ERR_OK)
            break;
        if (o->watch != CLI_NOT_GIVEN && term.out_tty)
            fputs("\033[H\033[J", stdout);
        view_print(&term, &a, &b);
        fflush(stdout);
        struct reading older = a;
        a = b;
        b = older;
        again = o->watch != CLI_NOT_GIVEN;
    }
    json_decref(a.status);
    json_decref(b.status);
    return code;
}

static enum err_code show_json(const struct cli_server *server, struct err *e)
{
    struct reading r = {0};
    enum err_code code = read_once(server, &r, e);
    if (code == ERR_OK) {
        json_dumpf(json_object_get(r.status, "worker"), stdout, JSON_INDENT(2));
        putchar('\n');
    }
    json_decref(r.status);
    return code;
}

int cli_ps_main(const struct cli_options *o)
{
    struct cli_server server;
    struct err e = {0};
    int stop_fd = -1;
    enum err_code code = cli_server_find(o, &server, &e);
    if (code == ERR_OK)
        code = cli_stop_open(&stop_fd, &e);
    if (code == ERR_OK)
        code = o->json ? show_json(&server, &e) : show(o, &server, stop_fd, &e);
    cli_stop_close(stop_fd);
    if (code != ERR_OK)
        fprintf(stderr, "islet ps: %s\n", e.text);
    return code == ERR_OK ? 0 : code == ERR_IO ? EXIT_NO_SERVER : 1;
}
