/* Replays fuzz inputs without libFuzzer: each argument is a file or a folder of files. Prints the
 * count; a crash is the failure. Used by `make check-fuzz`, so that the committed corpora run on
 * every check. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        return 1;
    }
    uint8_t *data = NULL;
    size_t size = 0, capacity = 0, n = 0;
    do {
        if (capacity - size < 65536) {
            capacity += 65536 + capacity / 2;
            uint8_t *grown = realloc(data, capacity);
            if (grown == NULL)
                abort();
            data = grown;
        }
        n = fread(data + size, 1, 65536, f);
        size += n;
    } while (n > 0);
    fclose(f);
    /* A copy of exactly `size` bytes, so that the sanitiser sees one byte too far. */
    uint8_t *exact = malloc(size ? size : 1);
    if (exact == NULL)
        abort();
    memcpy(exact, data, size);
    free(data);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 0;
}

int main(int argc, char **argv)
{
    unsigned n = 0;
    for (int i = 1; i < argc; i++) {
        struct stat st;
        if (stat(argv[i], &st) != 0) {
            perror(argv[i]);
            return 1;
        }
        if (!S_ISDIR(st.st_mode)) {
            if (replay_file(argv[i]) != 0)
                return 1;
            n++;
            continue;
        }
        DIR *d = opendir(argv[i]);
        if (d == NULL) {
            perror(argv[i]);
            return 1;
        }
        for (struct dirent *entry; (entry = readdir(d)) != NULL;) {
            char path[4096];
            if (entry->d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (replay_file(path) != 0)
                return 1;
            n++;
        }
        closedir(d);
    }
    printf("replayed %u inputs\n", n);
    return n == 0;
}
