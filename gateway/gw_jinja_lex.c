#include "gw_jinja_lex.h"

#include <string.h>

#include "gw_jinja_run.h"
#include "gw_jinja_text.h"
#include "utf8.h"

struct lexer {
    struct gw_jinja_run *run;
    const char *at, *end;
    const char *counted; /* lines are counted up to here */
    bool line_starting;  /* the last thing taken ended a line */
    struct gw_jinja_lex_token *tokens;
    size_t n, capacity;
    char closers[GW_JINJA_RUN_MAX_DEPTH]; /* brackets that are open in this tag */
    size_t n_closers;
};

static bool fail(struct lexer *l, const char *what)
{
    gw_jinja_run_fail(l->run, ERR_FORMAT, "%s", what);
    return false;
}

static void count_lines(struct lexer *l)
{
    for (; l->counted < l->at; l->counted++)
        l->run->line += *l->counted == '\n';
}

static void add(struct lexer *l, enum gw_jinja_lex_kind kind, const char *text, size_t n)
{
    if (l->n == l->capacity) {
        size_t capacity = l->capacity * 2 + 64;
        struct gw_jinja_lex_token *grown = gw_jinja_run_get(l->run, capacity, sizeof *grown);
        if (!grown)
            return;
        if (l->n > 0)
            memcpy(grown, l->tokens, l->n * sizeof *grown);
        l->tokens = grown;
        l->capacity = capacity;
    }
    l->tokens[l->n++] = (struct gw_jinja_lex_token){kind, l->run->line, {text, n}};
}

static bool looking_at(const struct lexer *l, const char *word)
{
    size_t n = strlen(word);
    return n <= (size_t)(l->end - l->at) && memcmp(l->at, word, n) == 0;
}

static void skip_space(struct lexer *l)
{
    l->at = gw_jinja_text_skip_space(l->at, l->end);
}

/* Text in front of a tag: `sign` is '-', '+' or another character of the tag. */
static void add_data(struct lexer *l, const char *text, const char *end, char sign,
                     bool is_variable)
{
    if (sign == '-') {
        end = gw_jinja_text_strip_right(text, end);
    } else if (sign != '+' && !is_variable) {
        const char *line = memrchr(text, '\n', (size_t)(end - text));
        line = line ? line + 1 : text;
        if ((line > text || l->line_starting) && gw_jinja_text_skip_space(line, end) == end)
            end = line;
    }
    if (end > text)
        add(l, GW_JINJA_LEX_DATA, text, (size_t)(end - text));
}

/* Behind the end of a tag, whose first character was `sign`. */
static void after_tag(struct lexer *l, char sign)
{
    if (sign == '-')
        skip_space(l);
    else if (sign != '+' && l->at < l->end && *l->at == '\n')
        l->at++;
    l->line_starting = l->at[-1] == '\n';
    count_lines(l);
}

static bool comment(struct lexer *l)
{
    const char *close = memmem(l->at + 2, (size_t)(l->end - l->at - 2), "#}", 2);
    if (!close)
        return fail(l, "a comment {# without #}");
    char sign = close > l->at + 2 ? close[-1] : ' ';
    l->at = close + 2;
    after_tag(l, sign);
    return true;
}

/* At "{%": takes `{% word %}`; false and nothing taken if it is another tag. *ret_open,
 * *ret_close: the signs. */
static bool word_tag(struct lexer *l, const char *word, char *ret_open, char *ret_close)
{
    const char *start = l->at;
    l->at += 2;
    *ret_open = l->at < l->end ? *l->at : ' ';
    if (*ret_open == '-' || *ret_open == '+')
        l->at++;
    skip_space(l);
    if (looking_at(l, word)) {
        l->at += strlen(word);
        skip_space(l);
        *ret_close = l->at < l->end ? *l->at : ' ';
        if (*ret_close == '-' || *ret_close == '+')
            l->at++;
        if (looking_at(l, "%}")) {
            l->at += 2;
            return true;
        }
    }
    l->at = start;
    return false;
}

static bool raw(struct lexer *l, char close)
{
    char open;
    if (close == '-')
        skip_space(l);
    l->line_starting = l->at[-1] == '\n';
    count_lines(l);
    for (const char *text = l->at; l->at < l->end; l->at++) {
        const char *end = l->at;
        if (looking_at(l, "{%") && word_tag(l, "endraw", &open, &close)) {
            add_data(l, text, end, open, false);
            after_tag(l, close);
            return true;
        }
    }
    return fail(l, "{% raw %} without {% endraw %}");
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_word(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static void digits(struct lexer *l)
{
    while (l->at < l->end && (is_digit(*l->at) || *l->at == '_'))
        l->at++;
}

static bool digit_behind(const struct lexer *l, size_t skip)
{
    return skip < (size_t)(l->end - l->at) && is_digit(l->at[skip]);
}

static bool number(struct lexer *l)
{
    const char *start = l->at;
    bool is_float = false;
    bool after_dot = l->n > 0 && l->tokens[l->n - 1].kind == GW_JINJA_LEX_OPERATOR &&
                     *l->tokens[l->n - 1].text.data == '.';
    digits(l);
    if (!after_dot && digit_behind(l, 1) && *l->at == '.') {
        l->at++;
        digits(l);
        is_float = true;
    }
    if (!after_dot && l->at < l->end && (*l->at == 'e' || *l->at == 'E')) {
        size_t sign = digit_behind(l, 1) ? 0 : 1;
        if (sign == 0 || ((l->at[1] == '+' || l->at[1] == '-') && digit_behind(l, 2))) {
            l->at += 1 + sign;
            digits(l);
            is_float = true;
        }
    }
    if (l->at < l->end && is_word(*l->at))
        return fail(l, "a number that this version cannot read (decimal only)");
    add(l, is_float ? GW_JINJA_LEX_FLOAT : GW_JINJA_LEX_INT, start, (size_t)(l->at - start));
    return true;
}

/* The code point behind \x, \u, \U. */
static bool hex(struct lexer *l, size_t n, char **out)
{
    uint32_t code = 0;
    for (size_t i = 0; i < n; i++, l->at++) {
        char c = l->at < l->end ? *l->at : ' ';
        uint32_t digit = is_digit(c)              ? (uint32_t)(c - '0')
                         : (c >= 'a' && c <= 'f') ? (uint32_t)(c - 'a' + 10)
                         : (c >= 'A' && c <= 'F') ? (uint32_t)(c - 'A' + 10)
                                                  : 16;
        if (digit == 16)
            return fail(l, "a broken \\x, \\u or \\U in a text");
        code = code << 4 | digit;
    }
    *out += utf8_encode(code, (uint8_t *)*out);
    return true;
}

static bool escape(struct lexer *l, char **out)
{
    static const char from[] = "ntr\\'\"abfv", to[] = "\n\t\r\\'\"\a\b\f\v";
    char c = *l->at++;
    const char *known = memchr(from, c, sizeof from - 1);
    if (known) {
        *(*out)++ = to[known - from];
    } else if (c == 'x' || c == 'u' || c == 'U') {
        return hex(l, c == 'x' ? 2 : c == 'u' ? 4 : 8, out);
    } else if (c >= '0' && c <= '7') {
        uint32_t code = (uint32_t)(c - '0');
        for (int i = 0; i < 2 && l->at < l->end && *l->at >= '0' && *l->at <= '7'; i++)
            code = code * 8 + (uint32_t)(*l->at++ - '0');
        *out += utf8_encode(code, (uint8_t *)*out);
    } else if (c == 'N') {
        return fail(l, "\\N{...} in a text is not built in");
    } else if (c != '\n') {
        *(*out)++ = '\\';
        *(*out)++ = c;
    }
    return true;
}

static bool literal(struct lexer *l)
{
    char quote = *l->at++;
    const char *close = l->at;
    while (close < l->end && *close != quote)
        close += *close == '\\' && close + 1 < l->end ? 2 : 1;
    if (close >= l->end)
        return fail(l, "a text without its closing quote");
    char *text = gw_jinja_run_get(l->run, 1, (size_t)(close - l->at)), *out = text;
    if (!text)
        return false;
    while (l->at < close) {
        if (*l->at != '\\') {
            *out++ = *l->at++;
            continue;
        }
        l->at++;
        if (!escape(l, &out))
            return false;
    }
    l->at = close + 1;
    add(l, GW_JINJA_LEX_TEXT, text, (size_t)(out - text));
    return true;
}

static bool operator(struct lexer *l)
{
    static const char *const operators[] = {"==", "!=", ">=", "<=", "//", "**", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    static const char opening[] = "([{", closing[] = ")]}";
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        if (!looking_at(l, operators[i]))
            continue;
        char c = *l->at;
        const char *open = memchr(opening, c, 3);
        if (open && l->n_closers == sizeof l->closers) {
            gw_jinja_run_fail(l->run, ERR_LIMIT, "nested more than %zu deep", sizeof l->closers);
            return false;
        }
        if (open)
            l->closers[l->n_closers++] = closing[open - opening];
        if (memchr(closing, c, 3) && (l->n_closers == 0 || l->closers[--l->n_closers] != c))
            return fail(l, "a closing bracket that nothing opened");
        add(l, GW_JINJA_LEX_OPERATOR, l->at, strlen(operators[i]));
        l->at += strlen(operators[i]);
        return true;
    }
    return fail(l, "a character that has no meaning in a tag");
}

static bool tag_end(struct lexer *l, bool is_variable)
{
    const char *close = is_variable ? "}}" : "%}";
    char sign = *l->at;
    size_t n = sign == '-' || (sign == '+' && !is_variable);
    if (l->n_closers > 0 || n + 2 > (size_t)(l->end - l->at) || memcmp(l->at + n, close, 2) != 0)
        return false;
    add(l, is_variable ? GW_JINJA_LEX_VARIABLE_END : GW_JINJA_LEX_BLOCK_END, l->at, n + 2);
    l->at += n + 2;
    after_tag(l, is_variable && sign != '-' ? '+' : sign);
    return true;
}

static bool tag(struct lexer *l, bool is_variable)
{
    add(l, is_variable ? GW_JINJA_LEX_VARIABLE_BEGIN : GW_JINJA_LEX_BLOCK_BEGIN, l->at, 2);
    l->at += 2;
    if (l->at < l->end && (*l->at == '-' || *l->at == '+'))
        l->at++;
    l->n_closers = 0;
    while (gw_jinja_run_ok(l->run)) {
        skip_space(l);
        count_lines(l);
        if (l->at == l->end)
            return fail(l, is_variable ? "{{ without }}" : "{% without %}");
        if (tag_end(l, is_variable))
            return true;
        const char *start = l->at;
        if (is_digit(*l->at)) {
            (void)number(l);
        } else if (is_word(*l->at)) {
            while (l->at < l->end && is_word(*l->at))
                l->at++;
            add(l, GW_JINJA_LEX_NAME, start, (size_t)(l->at - start));
        } else if (*l->at == '\'' || *l->at == '"') {
            (void)literal(l);
        } else {
            (void)operator(l);
        }
    }
    return false;
}

static bool next(struct lexer *l)
{
    const char *text = l->at, *at = text;
    char open, close;
    while ((at = memchr(at, '{', (size_t)(l->end - at))) != NULL) {
        if (l->end - at >= 2 && (at[1] == '{' || at[1] == '%' || at[1] == '#'))
            break;
        at++;
    }
    if (!at) {
        add_data(l, text, l->end, '+', true);
        l->at = l->end;
        return true;
    }
    char sign = l->end - at > 2 ? at[2] : ' ';
    add_data(l, text, at, sign, at[1] == '{');
    l->at = at;
    count_lines(l);
    if (at[1] == '#')
        return comment(l);
    if (at[1] == '%' && word_tag(l, "raw", &open, &close))
        return raw(l, close);
    return tag(l, at[1] == '{');
}

/* One kind of newline, and none at the end. */
static char *normalise(struct gw_jinja_run *r, const char *source, size_t n, size_t *ret_n)
{
    char *copy = gw_jinja_run_get(r, 1, n + 1);
    size_t made = 0;
    if (!copy)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        if (source[i] == '\r' && i + 1 < n && source[i + 1] == '\n')
            continue;
        copy[made++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (made > 0 && copy[made - 1] == '\n')
        made--;
    *ret_n = made;
    return copy;
}

const struct gw_jinja_lex_token *gw_jinja_lex(struct gw_jinja_run *r, const char *source, size_t n)
{
    struct lexer l = {.run = r, .line_starting = true};
    r->line = 1;
    if (!utf8_valid(source, n)) {
        (void)fail(&l, "it is not UTF-8");
        return NULL;
    }
    char *text = normalise(r, source, n, &n);
    if (!text)
        return NULL;
    l.at = l.counted = text;
    l.end = text + n;
    while (l.at < l.end && gw_jinja_run_ok(r))
        if (!next(&l))
            return NULL;
    count_lines(&l);
    add(&l, GW_JINJA_LEX_END, l.end, 0);
    return gw_jinja_run_ok(r) ? l.tokens : NULL;
}
