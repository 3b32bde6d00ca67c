"""Which tokens of a packed row a rank holds."""

import itertools


def shares(offsets, rank, size, sp_rank=0, sp_size=1):
    """Megatron's load-balanced split as a loop, chunks r and 2·size−1−r of 2·size equal ones of each sequence, then a
    slice of what the rank holds; (place in the row, place in the sequence) of each token."""
    places = []
    for start, end in itertools.pairwise(offsets):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places += [(start + t, t) for t in range(number * chunk, (number + 1) * chunk)]
    if size == 1:
        places = [(start + t, t) for start, end in itertools.pairwise(offsets) for t in range(end - start)]
    each = len(places) // sp_size
    return places[sp_rank * each : (sp_rank + 1) * each]
