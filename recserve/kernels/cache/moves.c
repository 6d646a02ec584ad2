/* Moves keys and values of accepted paths. */
#include "functions.h"

/* keys, values: [layers, slots, bytes]. sources, targets: [paths, steps] slots. lengths: [paths]
 * steps of each path to move, in order: a target is no source of a later step. */
void move_paths(char *keys, char *values, const int64_t *sources, const int64_t *targets,
                const int64_t *lengths, int64_t paths, int64_t steps, int64_t layers, int64_t slots,
                int64_t bytes) {
    for (int64_t path = 0; path < paths; path++)
        for (int64_t step = 0; step < lengths[path]; step++) {
            int64_t source = sources[path * steps + step], target = targets[path * steps + step];
            if (source == target) continue;
            for (int64_t layer = 0; layer < layers; layer++) {
                int64_t from = (layer * slots + source) * bytes, to = (layer * slots + target) * bytes;
                memcpy(keys + to, keys + from, bytes);
                memcpy(values + to, values + from, bytes);
            }
        }
}
