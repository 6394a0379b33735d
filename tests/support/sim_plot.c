#include "sim_plot.h"

#include <errno.h>
#include <stdio.h>

enum {
    WIDTH = 760,
    HEIGHT = 460,
    LEFT = 50,
    TOP = 40,
    PLOT_WIDTH = 520,
    PLOT_HEIGHT = 360
};

static double x_at(double percent)
{
    return LEFT + percent * PLOT_WIDTH / 100;
}

static double y_at(double percent)
{
    return TOP + (100 - percent) * PLOT_HEIGHT / 100;
}

static void escaped(FILE *f, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '<' || *text == '>' || *text == '&')
            fprintf(f, "&#%d;", *text);
        else
            fputc(*text, f);
    }
}

static void axes(FILE *f, const char *title)
{
    fprintf(f, "<text x=\"%d\" y=\"20\" font-size=\"14\">", LEFT);
    escaped(f, title);
    fprintf(f, "</text>\n");
    for (int p = 0; p <= 100; p += 10) {
        fprintf(f,
                "<path d=\"M%.1f %.1f V%.1f M%.1f %.1f H%.1f\" stroke=\"#ddd\"/>\n"
                "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d</text>\n",
                x_at(p), y_at(0), y_at(100), x_at(0), y_at(p), x_at(100), x_at(p),
                TOP + PLOT_HEIGHT + 16, p, LEFT - 6, y_at(p) + 4, p);
    }
    fprintf(f,
            "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">resident, %% of expert bytes"
            "</text>\n<text x=\"12\" y=\"%.1f\" transform=\"rotate(-90 12 %.1f)\" "
            "text-anchor=\"middle\">hits, %%</text>\n",
            x_at(50), TOP + PLOT_HEIGHT + 36, y_at(50), y_at(50));
}

enum err_code sim_plot_write(const char *path, const char *title, const double *x, uint32_t n,
                             const struct sim_plot_curve *curves, uint32_t n_curves, struct err *e)
{
    static const char *const colours[] = {"#d62728", "#1f77b4", "#2ca02c",
                                          "#9467bd", "#8c564b", "#7f7f7f"};
    FILE *f = fopen(path, "we");
    if (f == NULL)
        return err_set_os(e, ERR_IO, errno, "%s", path);
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"11\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            WIDTH, HEIGHT);
    axes(f, title);
    for (uint32_t c = 0; c < n_curves; c++) {
        const char *colour = colours[c % (sizeof colours / sizeof *colours)];
        fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.8\" points=\"", colour);
        for (uint32_t i = 0; i < n; i++)
            fprintf(f, "%.1f,%.1f ", x_at(x[i]), y_at(curves[c].y[i]));
        fprintf(f,
                "\"/>\n<path d=\"M%d %u h24\" stroke=\"%s\" stroke-width=\"3\"/>\n"
                "<text x=\"%d\" y=\"%u\">",
                LEFT + PLOT_WIDTH + 16, TOP + 10 + 20 * c, colour, LEFT + PLOT_WIDTH + 46,
                TOP + 14 + 20 * c);
        escaped(f, curves[c].name);
        fprintf(f, "</text>\n");
    }
    fprintf(f, "</svg>\n");
    const int bad = ferror(f);
    if (fclose(f) != 0 || bad)
        return err_set_os(e, ERR_IO, errno, "%s", path);
    return ERR_OK;
}
