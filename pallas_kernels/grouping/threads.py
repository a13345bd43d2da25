"""Per-thread code of the grouping kernels; see hopper.py for what they do."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t
from pallas_kernels.ptx import Threads, c, do, equal, less, ptx

plgpu: Any = mosaic_gpu  # its decorators are beyond the type checker

READ, WALKED = 16, 4
"""Steps of 32 pairs whose loads, from device and from shared memory, are in flight at once."""


def _word(base, index):
    """Shared address of a word."""
    return arith.addi(base, arith.shli(index, c(2)))


def _load(address):
    return ptx("ld.shared.b32 $0, [$1];", address, effects=True)


def _store(address, value, predicate=None):
    do("st.shared.b32 [$0], $1;", address, value, predicate=predicate)


def _divided(word, number: int):
    return ptx(f"div.u32 $0, $1, {number};", word)


def _running(values):
    """(sum before each value, sum of all)."""
    total, before = c(0), []
    for value in values:
        before.append(total)
        total = arith.addi(total, value)
    return before, total


def group(
    expert, order, row, place, sizes, keys, counts, scratch,
    *, pairs: int, experts: int, per_row: int, held: int,
):  # fmt: skip
    """Fills order, row and place [pairs] and sizes [experts].

    keys [pairs, to 128], counts [4 held] and scratch [64] are shared; held is a multiple of 128
    above experts + 1: the last groups are of pairs without an expert, and of no pair.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 8)
    def run(ctx, expert, order, row, place, sizes, keys, counts, scratch):
        del ctx
        threads = Threads(t.address(scratch))
        source, keys, counts = t.address(expert), t.address(keys), t.address(counts)
        order, row = t.address(order), t.address(row)
        place, sizes = t.address(place), t.address(sizes)
        steps = -(-pairs // threads.count)
        first = arith.addi(arith.muli(threads.warp, c(32 * steps)), threads.lane)
        mine = _word(counts, arith.muli(threads.warp, c(held)))
        t.spread(c(0), c(4 * held), lambda number: _store(_word(counts, number), c(0)))
        threads.sync()

        def pairs_of(turn, together):
            """(pair, whether this warp owns one) for each step of a turn."""
            found = []
            for i in range(together):
                step = arith.addi(arith.muli(turn, c(together)), c(i))
                pair = arith.addi(first, arith.shli(step, c(5)))
                found.append((pair, arith.andi(less(step, c(steps)), less(pair, c(pairs)))))
            return found

        def count(turn, carry):
            found = pairs_of(turn, READ)
            loaded = [t.load_where(inside, pair, source, experts + 1) for pair, inside in found]
            for (pair, inside), key in zip(found, loaded, strict=True):
                _store(_word(keys, pair), key, inside)
                do("red.shared.add.u32 [$0], $1;", _word(mine, key), c(1), predicate=inside)
            return carry

        t.repeat(-(-steps // READ), [], count)
        threads.sync()
        _places(threads, counts, sizes, experts, held)
        threads.sync()
        lower = arith.subi(arith.shli(c(1), threads.lane), c(1))

        def put(turn, carry):
            found = pairs_of(turn, WALKED)
            loaded = []
            for pair, inside in found:
                key = _load(_word(keys, arith.select(inside, pair, c(0))))
                key = arith.select(inside, key, c(experts + 1))
                same = ptx("match.any.sync.b32 $0, $1, 0xffffffff;", key, effects=True)
                loaded.append((key, same))
            for (pair, inside), (key, same) in zip(found, loaded, strict=True):
                rank = ptx("popc.b32 $0, $1;", arith.andi(same, lower))
                many = ptx("popc.b32 $0, $1;", same)
                at = _word(mine, key)
                start = _load(at)
                do("bar.warp.sync 0xffffffff;")
                _store(at, arith.addi(start, many), equal(rank, c(0)))
                do("bar.warp.sync 0xffffffff;")
                where = arith.addi(start, rank)
                t.store_word(pair, place, where, inside)
                t.store_word(where, order, pair, inside)
                t.store_word(where, row, _divided(pair, per_row), inside)
            return carry

        t.repeat(-(-steps // WALKED), [], put)

    run(expert, order, row, place, sizes, keys, counts, scratch)


def _places(threads, counts, sizes, experts: int, held: int):
    """Turns counts [warp, group] into first places, and writes the sizes of the groups."""
    part = held // threads.count
    first = arith.muli(threads.index, c(part))
    words, totals = [], []
    for i in range(part):
        number = arith.addi(first, c(i))
        words.append([_word(counts, arith.addi(number, c(w * held))) for w in range(threads.warps)])
        before, total = _running([_load(word) for word in words[-1]])
        totals.append(total)
        words[-1] = list(zip(words[-1], before, strict=True))
        t.store_word(number, sizes, total, less(number, c(experts)))
    starts, total = _running(totals)
    base, _ = threads.scan(total, c(0))
    for start, each in zip(starts, words, strict=True):
        for word, before in each:
            _store(word, arith.addi(arith.addi(base, start), before))


def row_tiles(
    sizes, table, first_row, first_tile, scratch,
    *, experts: int, rows: int, height: int, lines: int, held: int,
):  # fmt: skip
    """Fills table [3 lines]; first_row and first_tile [held] and scratch [64] are shared, held a
    multiple of 128 above the experts."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 5)
    def run(ctx, sizes, table, first_row, first_tile, scratch):
        del ctx
        threads = Threads(t.address(scratch))
        source, table = t.address(sizes), t.address(table)
        row_at, tile_at = t.address(first_row), t.address(first_tile)
        part = held // threads.count
        first = arith.muli(threads.index, c(part))
        numbers = [arith.addi(first, c(i)) for i in range(part)]
        size = [t.load_where(less(n, c(experts)), n, source) for n in numbers]

        def tiles_of(count):
            return _divided(arith.addi(count, c(height - 1)), height)

        row, row_total = _running(size)
        tile, tile_total = _running([tiles_of(count) for count in size])
        row_base, used = threads.scan(row_total, c(0))
        tile_base, tiles = threads.scan(tile_total, c(1))
        for number, r, n in zip(numbers, row, tile, strict=True):
            _store(_word(row_at, number), arith.addi(row_base, r))
            _store(_word(tile_at, number), arith.addi(tile_base, n))
        threads.sync()
        steps = (held - 1).bit_length()

        def one(line):
            found = c(0)
            for step in reversed(range(steps)):
                further = arith.addi(found, c(1 << step))
                inside = less(further, c(held))
                start = _load(_word(tile_at, arith.select(inside, further, c(0))))
                here = arith.andi(inside, less(start, arith.addi(line, c(1))))
                found = arith.select(here, further, found)
            real = less(line, tiles)
            found = arith.select(real, found, c(0))
            after = arith.select(real, arith.addi(found, c(1)), c(0))
            start = arith.select(real, _load(_word(row_at, found)), used)
            end = arith.select(real, _load(_word(row_at, after)), c(rows))
            before = arith.select(real, _load(_word(tile_at, found)), tiles)
            inner = arith.subi(line, before)
            start = arith.addi(start, arith.muli(inner, c(height)))
            some = less(start, end)
            left = arith.subi(end, start)
            left = arith.select(less(left, c(height)), left, c(height))
            matrix = arith.select(real, found, c(-1))
            last = equal(line, c(lines - 1))
            every = arith.addi(tiles, tiles_of(arith.subi(c(rows), used)))
            ends = (every, used, c(0))
            for column, value in enumerate((matrix, start, left)):
                value = arith.select(some, value, c(0))
                value = arith.select(last, ends[column], value)
                t.store_word(arith.addi(line, c(column * lines)), table, value)

        t.spread(c(0), c(lines), one)

    run(sizes, table, first_row, first_tile, scratch)
