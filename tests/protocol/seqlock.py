"""Word-level model of one slot: the owner reuses it while a reader matches it.

Owns: the argument that `find` may be one step in model.py.  The owner drains,
frees, rewrites and posts a slot for operations 1, 2, ...; each key has two
words.  The reader looks for one operation word by word, and must never take
words of two operations for a match, nor match a post that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE, POSTED, REQ = range(3)


@dataclass(frozen=True)
class Order:
    """The defaults are the protocol's; each switch breaks it."""

    free_first: bool = True  # state := FREE before the key words change
    reread: bool = True  # the reader compares the generation at the end
    generation: bool = True  # ... and the state word holds one
    payload_before_post: bool = True


def check(order: Order = Order(), posts: int = 3) -> tuple[int, list[str] | None]:
    """(states, counterexample or None); breadth first over all interleavings.

    Owner: (post number, step).  Memory: generation, phase, two key words, the
    payload.  Reader: step, state word first seen, key words seen.
    """
    want = 2
    first = ((1, 0), (0, FREE, 0, 0, 0), (0, None, None))
    parent: dict = {first: None}
    level = [first]

    def word(memory: tuple) -> tuple:
        return (memory[0] if order.generation else 0, memory[1])

    while level:
        following = []
        for state in level:
            for label, new in _steps(state, order, posts, want, word):
                if new is None:
                    chain, at = [label], state
                    while parent[at] is not None:
                        chain.append(parent[at][1])
                        at = parent[at][0]
                    return len(parent), chain[::-1]
                if new not in parent:
                    parent[new] = (state, label)
                    following.append(new)
        level = following
    return len(parent), None


def _steps(state, order, posts, want, word):
    (post, step), memory, (at, seen, keys) = state
    gen, phase, key0, key1, payload = memory
    program = ["free", "key0", "key1", "payload", "post"]
    if not order.free_first:
        program = ["key0", "key1", "payload", "post"]
    if not order.payload_before_post:
        program = ["free", "key0", "key1", "post", "payload"]
    if post <= posts:
        action = program[step]
        new = {
            "free": (gen, FREE, key0, key1, payload),
            "key0": (gen, phase, post, key1, payload),
            "key1": (gen, phase, key0, post, payload),
            "payload": (gen, phase, key0, key1, post),
            "post": (gen + 1, POSTED, key0, key1, payload),
        }[action]
        after = (post, step + 1) if step + 1 < len(program) else (post + 1, 0)
        # A matched operation is not acknowledged, so it is not drained.
        if not (at == 4 and action == program[0] and post == want + 1):
            yield f"owner: {action} of operation {post}", (after, new, state[2])
    # The phase of the wanted post may move without a new generation.
    if phase == POSTED and key0 == want and at < 4:
        yield "owner: request", (state[0], (gen, REQ, key0, key1, payload), state[2])
    if phase == REQ:
        yield "owner: retract", (state[0], (gen, POSTED, *memory[2:]), state[2])
    if at == 0 and phase != FREE:
        yield "reader: state", (state[0], memory, (1, word(memory), None))
    elif at == 1:
        yield "reader: key0", (state[0], memory, (2, seen, key0))
    elif at == 2:
        if keys == want and key1 == want:
            yield "reader: key1", (state[0], memory, (3, seen, None))
        else:
            yield "reader: other key", (state[0], memory, (0, None, None))
    elif at == 3:
        same = word(memory)[0] == seen[0] and phase != FREE
        if order.reread and not same:
            yield "reader: state moved", (state[0], memory, (0, None, None))
        elif (key0, key1) == (want, want) and phase != FREE:
            yield "reader: match", (state[0], memory, (4, seen, None))
        else:
            yield "reader: FALSE MATCH", None
    elif at == 4 and payload != want:
        yield "reader: WRONG PAYLOAD", None
