// Where a text is in a grammar, and which tokens may come next.
//
// A way through the grammar is a stack: the element that comes next, and below it, for each rule that has been entered,
// what follows there. Stacks that are equal are one node: (element, node below), found by a hash table. What follows
// behind a node's character is kept with it. A text is at a set of nodes, one for each way that fits it; equal sets are
// one as well, and where a character leads from a set is remembered. So ways that meet again are followed once, no step
// is taken twice, and a vocabulary is looked through at the price of a look-up for each character.
//
// Stacks and sets can still become many: they are counted. Each token brings an allowance of steps, of which some may
// be saved.
#include "sampling.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    EMPTY = 0,   // the node of the empty stack: the text may end
    NOWHERE = 0, // the empty set
    UNKNOWN = -1,
    MOST_NODES = 1 << 18,
    MOST_ITEMS = 1 << 20, // of a list
    MOST_WAYS = 1 << 16,  // that are remembered
    // How many are kept for texts that come back to them.
    KEPT_NODES = 1 << 12,
    KEPT_ITEMS = 1 << 18,
    EXPANSION = 8, // steps that a node costs when stacks are expanded
};
// Steps per token, which a third of a millisecond or so is enough for where the vocabulary is small, and more per entry
// of the vocabulary, which may have to be looked through; and how many tokens' steps can be saved.
static const int64_t STEPS = 1 << 20, STEPS_PER_ENTRY = 16, SAVED = 8;

struct node {
    int32_t element, below;
    int32_t behind, n_behind; // in `after`: the nodes behind its character; UNKNOWN
    uint64_t seen, member;    // stamps: of the expansion and of the set that it is in
};

struct list {
    int32_t * items;
    int32_t n, room;
};

struct set {
    int32_t start, n; // nodes in `members`, ascending
    bool tokens;      // one of them has a token on top
};

struct way { // from a set by a character
    int32_t from, to;
    uint32_t code; // 0: this entry is free
};

struct unfinished { // a character of which the first bytes have come
    uint32_t value, least;
    int32_t missing; // bytes
};

struct tb_grammar {
    struct tb_grammar_rules rules;
    const struct tb_pieces * pieces;
    struct node * nodes;
    int32_t n_nodes, node_room;
    int32_t * table; // node numbers, 0: free; its size is twice node_room
    struct set * sets;
    int32_t n_sets, set_room;
    int32_t * set_table; // as `table`
    struct way * ways;   // a hash table; its size is twice way_room
    int32_t n_ways, way_room;
    struct list after, members, todo, found;
    int32_t at; // the set where the text is
    struct unfinished part;
    int32_t kept; // nodes, before some are forgotten
    uint64_t stamp;
    int64_t steps, allowance;
    bool failed;
};

static bool push(struct list * list, int32_t item) {
    if (list->n == list->room) {
        const int32_t room = list->room == 0 ? 64 : 2 * list->room;
        int32_t * items = room > MOST_ITEMS ? NULL : realloc(list->items, (size_t)room * sizeof *items);
        if (items == NULL) {
            return false;
        }
        list->items = items;
        list->room = room;
    }
    list->items[list->n++] = item;
    return true;
}

static bool spend(struct tb_grammar * g, int64_t steps) {
    g->steps -= steps;
    return g->steps >= 0;
}

static uint32_t hash(uint32_t a, uint32_t b) {
    const uint64_t x = ((uint64_t)a << 32 | b) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(x >> 32) ^ (uint32_t)(x >> 13);
}

// A table of numbers for `room` things, in the place of another one.
static bool new_table(int32_t ** table, int32_t room) {
    int32_t * made = calloc((size_t)room * 2, sizeof *made);
    if (made == NULL) {
        return false;
    }
    free(*table);
    *table = made;
    return true;
}

static void enter(int32_t * table, int32_t room, uint32_t at, int32_t number) {
    const uint32_t mask = (uint32_t)room * 2 - 1;
    for (at &= mask; table[at] != 0; at = (at + 1) & mask) {
    }
    table[at] = number;
}

static uint32_t node_hash(const struct tb_grammar * g, int32_t node) {
    return hash((uint32_t)g->nodes[node].element, (uint32_t)g->nodes[node].below);
}

static uint32_t members_hash(const int32_t * members, int32_t n) {
    uint32_t x = (uint32_t)n;
    for (int32_t i = 0; i < n; ++i) {
        x = hash(x, (uint32_t)members[i]);
    }
    return x;
}

// Room for one more node.
static bool grow_nodes(struct tb_grammar * g) {
    if (g->n_nodes < g->node_room) {
        return true;
    }
    const int32_t room = g->node_room == 0 ? 256 : 2 * g->node_room;
    struct node * nodes = room > MOST_NODES ? NULL : realloc(g->nodes, (size_t)room * sizeof *nodes);
    if (nodes == NULL) {
        return false;
    }
    g->nodes = nodes;
    if (!new_table(&g->table, room)) {
        return false;
    }
    g->node_room = room;
    for (int32_t node = 1; node < g->n_nodes; ++node) {
        enter(g->table, room, node_hash(g, node), node);
    }
    return true;
}

// Room for one more set.
static bool grow_sets(struct tb_grammar * g) {
    if (g->n_sets < g->set_room) {
        return true;
    }
    const int32_t room = g->set_room == 0 ? 64 : 2 * g->set_room;
    struct set * sets = room > MOST_NODES ? NULL : realloc(g->sets, (size_t)room * sizeof *sets);
    if (sets == NULL) {
        return false;
    }
    g->sets = sets;
    if (!new_table(&g->set_table, room)) {
        return false;
    }
    g->set_room = room;
    for (int32_t set = 1; set < g->n_sets; ++set) {
        const struct set * s = &g->sets[set];
        enter(g->set_table, room, members_hash(g->members.items + s->start, s->n), set);
    }
    return true;
}

// No nodes but that of the empty stack, no sets but the empty one, and no ways.
static bool begin(struct tb_grammar * g) {
    free(g->table);
    free(g->set_table);
    free(g->sets);
    free(g->ways);
    g->nodes = NULL;
    g->sets = NULL;
    g->table = g->set_table = NULL;
    g->ways = NULL;
    g->n_nodes = g->node_room = g->n_sets = g->set_room = g->n_ways = g->way_room = 0;
    g->after.n = g->members.n = 0;
    if (!grow_nodes(g) || !grow_sets(g)) {
        return false;
    }
    g->nodes[g->n_nodes++] = (struct node){UNKNOWN, UNKNOWN, UNKNOWN, 0, 0, 0};
    g->sets[g->n_sets++] = (struct set){0, 0, false};
    return true;
}

// The node of a stack; UNKNOWN: there is no room for it.
static int32_t node_of(struct tb_grammar * g, int32_t element, int32_t below) {
    const uint32_t mask = (uint32_t)g->node_room * 2 - 1;
    const uint32_t code = hash((uint32_t)element, (uint32_t)below);
    for (uint32_t i = code & mask; g->table[i] != 0; i = (i + 1) & mask) {
        const struct node * node = &g->nodes[g->table[i]];
        if (node->element == element && node->below == below) {
            return g->table[i];
        }
    }
    if (!grow_nodes(g)) {
        return UNKNOWN;
    }
    const int32_t id = g->n_nodes++;
    g->nodes[id] = (struct node){element, below, UNKNOWN, 0, 0, 0};
    enter(g->table, g->node_room, code, id);
    return id;
}

static struct tb_grammar_element top(const struct tb_grammar * g, int32_t node) {
    return g->rules.elements[g->nodes[node].element];
}

static int ascending(const void * a, const void * b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// The set of the nodes in `found`; UNKNOWN: there is no room for it.
static int32_t set_of_found(struct tb_grammar * g) {
    const int32_t n = g->found.n;
    if (n == 0) {
        return NOWHERE;
    }
    qsort(g->found.items, (size_t)n, sizeof *g->found.items, ascending);
    const uint32_t code = members_hash(g->found.items, n), mask = (uint32_t)g->set_room * 2 - 1;
    for (uint32_t i = code & mask; g->set_table[i] != 0; i = (i + 1) & mask) {
        const struct set * set = &g->sets[g->set_table[i]];
        if (set->n == n && memcmp(g->members.items + set->start, g->found.items, (size_t)n * sizeof(int32_t)) == 0) {
            return g->set_table[i];
        }
    }
    struct set made = {g->members.n, n, false};
    for (int32_t i = 0; i < n; ++i) {
        const int32_t id = g->found.items[i];
        made.tokens = made.tokens || (id != EMPTY && top(g, id).kind != TB_GRAMMAR_SET);
        if (!push(&g->members, id)) {
            return UNKNOWN;
        }
    }
    if (!grow_sets(g)) {
        return UNKNOWN;
    }
    g->sets[g->n_sets] = made;
    enter(g->set_table, g->set_room, code, g->n_sets);
    return g->n_sets++;
}

// The stack with `element` on it, which may be the end of its alternative.
static int32_t with(struct tb_grammar * g, int32_t element, int32_t below) {
    return g->rules.elements[element].kind == TB_GRAMMAR_END ? below : node_of(g, element, below);
}

// Expand the stacks of the nodes in `todo` until none has a rule on top: to the end of `after`.
static bool expand(struct tb_grammar * g) {
    ++g->stamp;
    while (g->todo.n > 0) {
        const int32_t id = g->todo.items[--g->todo.n];
        if (!spend(g, 1)) {
            return false;
        }
        if (g->nodes[id].seen == g->stamp) {
            continue;
        }
        g->nodes[id].seen = g->stamp;
        if (!spend(g, EXPANSION)) {
            return false;
        }
        if (id == EMPTY || top(g, id).kind != TB_GRAMMAR_RULE) {
            if (!push(&g->after, id)) {
                return false;
            }
            continue;
        }
        const int32_t rule = top(g, id).value;
        const int32_t rest = with(g, g->nodes[id].element + 1, g->nodes[id].below);
        for (int32_t i = g->rules.rules[rule]; rest != UNKNOWN && i < g->rules.rules[rule + 1]; ++i) {
            const int32_t entered = with(g, g->rules.alternatives[i], rest);
            if (entered == UNKNOWN || !spend(g, 1)) {
                return false;
            }
            if (g->nodes[entered].seen != g->stamp && !push(&g->todo, entered)) {
                return false;
            }
        }
        if (rest == UNKNOWN) {
            return false;
        }
    }
    return true;
}

// Add the nodes behind the character or token on top of a node to `found`, whose members have the stamp.
static bool follow(struct tb_grammar * g, int32_t id, uint64_t stamp) {
    if (g->nodes[id].behind == UNKNOWN) {
        const int32_t rest = with(g, g->nodes[id].element + 1, g->nodes[id].below);
        const int32_t start = g->after.n;
        g->todo.n = 0;
        if (rest == UNKNOWN || !push(&g->todo, rest) || !expand(g)) {
            return false;
        }
        g->nodes[id].behind = start;
        g->nodes[id].n_behind = g->after.n - start;
    }
    const struct node * node = &g->nodes[id];
    for (int32_t i = node->behind; i < node->behind + node->n_behind; ++i) {
        const int32_t next = g->after.items[i];
        if (g->nodes[next].member != stamp) {
            g->nodes[next].member = stamp;
            if (!push(&g->found, next)) {
                return false;
            }
        }
    }
    return spend(g, 1 + node->n_behind);
}

// Whether a set holds a character from `low` to `high`.
static bool holds(const struct tb_grammar * g, int32_t set, uint32_t low, uint32_t high) {
    for (int32_t i = g->rules.sets[set]; i < g->rules.sets[set + 1]; ++i) {
        if (high < g->rules.ranges[2 * i]) {
            return false;
        }
        if (low <= g->rules.ranges[2 * i + 1]) {
            return true;
        }
    }
    return false;
}

// Where a character leads from a set, not looked up; UNKNOWN: too many steps.
static int32_t led(struct tb_grammar * g, int32_t from, uint32_t code) {
    // Stamps of sets and of expansions are of one count, so that none is used twice.
    const uint64_t stamp = ++g->stamp;
    const struct set set = g->sets[from];
    g->found.n = 0;
    for (int32_t i = set.start; i < set.start + set.n; ++i) {
        const int32_t id = g->members.items[i];
        if (id == EMPTY || top(g, id).kind != TB_GRAMMAR_SET) {
            continue;
        }
        const int32_t chars = top(g, id).value;
        if (!spend(g, 1 + (g->rules.sets[chars + 1] - g->rules.sets[chars]) / 4)) {
            return UNKNOWN;
        }
        if (holds(g, chars, code, code) && !follow(g, id, stamp)) {
            return UNKNOWN;
        }
    }
    return spend(g, 4 * (int64_t)g->found.n) ? set_of_found(g) : UNKNOWN;
}

// More room for ways, or if they are many, none of them any more.
static bool grow_ways(struct tb_grammar * g) {
    const int32_t room = g->way_room == 0 ? 128 : g->way_room == MOST_WAYS ? MOST_WAYS : 2 * g->way_room;
    struct way * ways = calloc((size_t)room * 2, sizeof *ways);
    if (ways == NULL) {
        return false;
    }
    const uint32_t mask = (uint32_t)room * 2 - 1;
    for (int32_t i = 0; room > g->way_room && i < 2 * g->way_room; ++i) {
        const struct way way = g->ways[i];
        if (way.code != 0) {
            uint32_t at = hash((uint32_t)way.from, way.code) & mask;
            while (ways[at].code != 0) {
                at = (at + 1) & mask;
            }
            ways[at] = way;
        }
    }
    g->n_ways = room > g->way_room ? g->n_ways : 0;
    free(g->ways);
    g->ways = ways;
    g->way_room = room;
    return true;
}

// Where a character leads from a set; UNKNOWN: too many steps.
static int32_t lead(struct tb_grammar * g, int32_t from, uint32_t code) {
    if (g->n_ways == g->way_room && !grow_ways(g)) {
        return UNKNOWN;
    }
    const uint32_t mask = (uint32_t)g->way_room * 2 - 1;
    uint32_t at = hash((uint32_t)from, code) & mask;
    for (; g->ways[at].code != 0; at = (at + 1) & mask) {
        if (g->ways[at].from == from && g->ways[at].code == code) {
            return g->ways[at].to;
        }
    }
    const int32_t to = led(g, from, code);
    if (to != UNKNOWN) {
        g->ways[at] = (struct way){from, to, code};
        ++g->n_ways;
    }
    return to;
}

// A byte of a character. False: no text has it here.
static bool take_byte(struct unfinished * part, uint8_t byte) {
    if (part->missing > 0) {
        part->value = part->value << 6 | (byte & 0x3F);
        return byte >> 6 == 2 && (--part->missing > 0 || part->value >= part->least);
    }
    if (byte < 0x80) {
        *part = (struct unfinished){byte, 0, 0};
        return byte != 0;
    }
    if (byte >> 5 == 6) {
        *part = (struct unfinished){byte & 0x1F, 0x80, 1};
    } else if (byte >> 4 == 14) {
        *part = (struct unfinished){byte & 0x0F, 0x800, 2};
    } else if (byte >> 3 == 30) {
        *part = (struct unfinished){byte & 0x07, 0x10000, 3};
    } else {
        return false;
    }
    return true;
}

// The set, if the character that has begun may be one that comes next, else NOWHERE; UNKNOWN: too many steps.
static int32_t may_become_one(struct tb_grammar * g, int32_t set, struct unfinished part) {
    const int32_t bits = 6 * part.missing;
    const uint32_t first = part.value << bits, high = first | ((1u << bits) - 1);
    const uint32_t low = first < part.least ? part.least : first;
    for (int32_t i = 0; low <= high && i < g->sets[set].n; ++i) {
        const int32_t id = g->members.items[g->sets[set].start + i];
        if (id == EMPTY || top(g, id).kind != TB_GRAMMAR_SET) {
            continue;
        }
        const int32_t chars = top(g, id).value;
        if (!spend(g, 1 + (g->rules.sets[chars + 1] - g->rules.sets[chars]) / 4)) {
            return UNKNOWN;
        }
        if (holds(g, chars, low, high)) {
            return set;
        }
    }
    return NOWHERE;
}

// Where the characters of a token lead; UNKNOWN: too many steps.
static int32_t by_text(struct tb_grammar * g, int32_t token, struct unfinished * part) {
    const uint8_t * byte = g->pieces->bytes + g->pieces->starts[token];
    const uint8_t * end = g->pieces->bytes + g->pieces->starts[token + 1];
    int32_t set = byte < end ? g->at : NOWHERE;
    *part = g->part;
    for (; byte < end && set != NOWHERE; ++byte) {
        if (!spend(g, 1)) {
            return UNKNOWN;
        }
        if (!take_byte(part, *byte)) {
            return NOWHERE;
        }
        if (part->missing == 0) {
            set = lead(g, set, part->value);
            if (set == UNKNOWN) {
                return UNKNOWN;
            }
        }
    }
    return part->missing > 0 ? may_become_one(g, set, *part) : set;
}

static bool is_token(struct tb_grammar_element element, int32_t token) {
    return (element.kind == TB_GRAMMAR_TOKEN && element.value == token) ||
           (element.kind == TB_GRAMMAR_NOT_TOKEN && element.value != token);
}

// Where a token leads by its text, to `set`, or as this very token.
static int32_t by_itself(struct tb_grammar * g, int32_t token, int32_t set) {
    const struct set from = g->sets[g->at], other = g->sets[set];
    const uint64_t stamp = ++g->stamp;
    g->found.n = 0;
    for (int32_t i = other.start; i < other.start + other.n; ++i) {
        g->nodes[g->members.items[i]].member = stamp;
        if (!push(&g->found, g->members.items[i])) {
            return UNKNOWN;
        }
    }
    for (int32_t i = from.start; i < from.start + from.n; ++i) {
        const int32_t id = g->members.items[i];
        if (id != EMPTY && is_token(top(g, id), token) && !follow(g, id, stamp)) {
            return UNKNOWN;
        }
    }
    return spend(g, 4 * (int64_t)g->found.n) ? set_of_found(g) : UNKNOWN;
}

static bool may_end(const struct tb_grammar * g) {
    // Of the nodes, which are in ascending order, that of the empty stack is the first.
    const struct set at = g->sets[g->at];
    return g->part.missing == 0 && at.n > 0 && g->members.items[at.start] == EMPTY;
}

// Where a token leads that does not end the text; UNKNOWN: that takes too many steps.
static int32_t take(struct tb_grammar * g, int32_t token, struct unfinished * part) {
    int32_t set = g->failed ? UNKNOWN : by_text(g, token, part);
    if (set == NOWHERE) {
        *part = (struct unfinished){0, 0, 0};
    }
    if (set != UNKNOWN && g->sets[g->at].tokens && g->part.missing == 0) {
        // As itself a token is whole, whatever its bytes; a text that ends within a character cannot go on beside it.
        const int32_t own = by_itself(g, token, part->missing > 0 ? NOWHERE : set);
        if (own != NOWHERE || part->missing == 0) {
            set = own;
            *part = (struct unfinished){0, 0, 0};
        }
    }
    g->failed = set == UNKNOWN;
    return set;
}

static bool allows(struct tb_grammar * g, int32_t token) {
    struct unfinished part;
    return g->pieces->ends[token] != 0 ? may_end(g) : take(g, token, &part) > NOWHERE;
}

bool tb_grammar_apply(struct tb_grammar * g, struct tb_candidate * candidates, int32_t n) {
    for (int32_t i = 0; i < n && !g->failed; ++i) {
        if (candidates[i].logit != -INFINITY && !allows(g, candidates[i].id)) {
            candidates[i].logit = -INFINITY;
        }
    }
    return !g->failed;
}

// Copy a stack into a grammar that has no nodes but those copied; UNKNOWN: no room.
static int32_t copy_stack(struct tb_grammar * g, const struct node * nodes, int32_t * copies, int32_t id) {
    g->todo.n = 0;
    for (; id != EMPTY && copies[id] == UNKNOWN; id = nodes[id].below) {
        if (!push(&g->todo, id)) {
            return UNKNOWN;
        }
    }
    int32_t below = id == EMPTY ? EMPTY : copies[id];
    while (g->todo.n > 0 && below != UNKNOWN) {
        const int32_t from = g->todo.items[--g->todo.n];
        below = copies[from] = node_of(g, nodes[from].element, below);
    }
    return below;
}

// Forget the nodes that are in no stack any more, and what is known of sets.
static bool compact(struct tb_grammar * g) {
    const struct set at = g->sets[g->at];
    struct node * old = g->nodes;
    int32_t * copies = malloc((size_t)g->n_nodes * sizeof *copies);
    g->found.n = 0;
    bool done = copies != NULL;
    for (int32_t i = at.start; done && i < at.start + at.n; ++i) {
        done = push(&g->found, g->members.items[i]);
    }
    if (!done) {
        free(copies);
        return false;
    }
    memset(copies, 0xFF, (size_t)g->n_nodes * sizeof *copies);
    done = begin(g);
    for (int32_t i = 0; done && i < g->found.n; ++i) {
        g->found.items[i] = copy_stack(g, old, copies, g->found.items[i]);
        done = g->found.items[i] != UNKNOWN;
    }
    free(copies);
    free(old);
    g->kept = 2 * g->n_nodes > KEPT_NODES ? 2 * g->n_nodes : KEPT_NODES;
    g->at = done ? set_of_found(g) : UNKNOWN;
    return g->at != UNKNOWN;
}

bool tb_grammar_accept(struct tb_grammar * g, int32_t token) {
    if (g->pieces->ends[token] != 0) {
        return !g->failed && may_end(g);
    }
    struct unfinished part;
    const int32_t set = take(g, token, &part);
    if (set <= NOWHERE) {
        return false;
    }
    const int64_t steps = g->steps + g->allowance;
    g->steps = steps < SAVED * g->allowance ? steps : SAVED * g->allowance;
    g->at = set;
    g->part = part.missing > 0 ? part : (struct unfinished){0, 0, 0};
    if (g->n_nodes > g->kept || g->after.n > KEPT_ITEMS || g->members.n > KEPT_ITEMS) {
        g->failed = !spend(g, g->n_nodes) || !compact(g);
    }
    return !g->failed;
}

struct tb_grammar * tb_grammar_new(const struct tb_grammar_rules * rules, const struct tb_pieces * pieces) {
    struct tb_grammar * g = calloc(1, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    g->rules = *rules;
    g->pieces = pieces;
    g->allowance = STEPS + STEPS_PER_ENTRY * pieces->n_vocab;
    g->steps = SAVED * g->allowance;
    g->kept = KEPT_NODES;
    bool made = begin(g);
    for (int32_t i = rules->rules[0]; made && i < rules->rules[1]; ++i) {
        const int32_t entered = with(g, rules->alternatives[i], EMPTY);
        made = entered != UNKNOWN && push(&g->todo, entered);
    }
    made = made && expand(g);
    for (int32_t i = 0; made && i < g->after.n; ++i) {
        made = push(&g->found, g->after.items[i]);
    }
    g->at = made ? set_of_found(g) : UNKNOWN;
    if (g->at == UNKNOWN) {
        tb_grammar_free(g);
        return NULL;
    }
    return g;
}

void tb_grammar_free(struct tb_grammar * g) {
    if (g != NULL) {
        free(g->nodes);
        free(g->table);
        free(g->sets);
        free(g->set_table);
        free(g->ways);
        free(g->after.items);
        free(g->members.items);
        free(g->todo.items);
        free(g->found.items);
        free(g);
    }
}
