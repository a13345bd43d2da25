"""Per-thread code of the indexer that makes lists: the k best of a chunk, of lists, or as a mask.

A list holds k scores in bfloat16 and their indices, ascending by index, and ends with -inf and -1;
its places are a multiple of eight. See `pick.py` for how the k best are found.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t
from pallas_kernels.index_topk.keys import TILE, row_length, swizzled
from pallas_kernels.index_topk.pick import pick
from pallas_kernels.ptx import Threads, c, do, i32, i64, less, ptx

EMPTY = 0xFF80FF80 - 2**32  # -inf, twice


def _store16(base, place, word, take):
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b16 [$0], h; }"
    do(text, t.wide(place, 2, base), word, take)


def _store32(base, place, word, take):
    do("st.global.b32 [$0], $1;", t.wide(place, 4, base), word, predicate=take)


def _yes():
    return mgpu.c(1, ir.IntegerType.get_signless(1))


def _half(words, which: int):
    word = words[which // 2]
    return arith.shrui(word, c(16)) if which % 2 else arith.andi(word, c(0xFFFF))


def _fill_list(best, index, found, keep: int):
    def write(place):
        _store16(best, place, c(0xFF80), _yes())
        _store32(index, place, c(-1), _yes())

    t.spread(found, c(keep), write)


def finish(scores, scratch, count, start, place, k: int, keep: int, out, maxima):
    """Writes a chunk's k best scores and their indices, ascending, into its `keep` places."""
    rows, chunk = scores.shape
    part = chunk // 128
    refs = (plgpu.RefType(),) * (4 + len(maxima))

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, t.SCALAR, t.SCALAR, *refs))
    def run(ctx, count, start, place, scores, scratch, best, index, *maxima):
        del ctx
        threads = Threads(t.address(scratch))
        threads.sync()
        count, start, place = t.number(count), t.number(start), t.number(place)
        first = arith.muli(threads.index, c(part))
        scored = less(first, arith.muli(count, c(TILE)))
        list_start = arith.muli(place, c(keep))
        for row in range(rows):
            words = []
            for chunk_of_8 in range(part // 8):
                byte = swizzled(arith.addi(arith.muli(first, c(2)), c(16 * chunk_of_8)))
                address = arith.addi(t.address(scores), arith.addi(byte, c(2 * chunk * row)))
                text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
                words += ptx(text, address, outputs=4, effects=True)
            words = [arith.select(scored, word, c(EMPTY)) for word in words]
            base = mgpu.c(row * row_length(best), i64())
            best_row = arith.addi(t.address(best), arith.muli(base, mgpu.c(2, i64())))
            index_row = arith.addi(t.address(index), arith.muli(base, mgpu.c(4, i64())))
            best_row, index_row = t.wide(list_start, 2, best_row), t.wide(list_start, 4, index_row)
            key = arith.addi(start, first)

            def write(which, place, take, words=words, key=key, to=(best_row, index_row)):
                _store16(to[0], place, _half(words, which), take)
                _store32(to[1], place, arith.addi(key, c(which)), take)

            found = pick(threads, words, k, write)
            _fill_list(best_row, index_row, found, keep)
            if maxima:
                blocks = row_length(maxima[0])
                row_base = arith.addi(t.address(maxima[0]), mgpu.c(2 * row * blocks, i64()))
                low = arith.shrui(arith.addi(start, arith.muli(count, c(TILE))), c(3))
                high = arith.minui(arith.shrui(arith.addi(start, c(chunk)), c(3)), c(blocks))

                def empty(block, base=row_base):
                    _store16(base, block, c(0xFF80), _yes())

                t.spread(low, high, empty)

    run(count, start, place, scores, scratch, *out, *maxima)


def _load_part(threads: Threads, scores, size: int):
    """(this thread's first entry, its scores as words) of a list in device memory."""
    part = -(-size // (8 * threads.count)) * 8
    first = arith.muli(threads.index, c(part))
    words = []
    for step in range(part // 8):
        position = arith.addi(first, c(8 * step))
        inside = less(position, c(size))
        address = t.wide(arith.select(inside, position, c(0)), 2, t.address(scores))
        text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        loaded = ptx(text, address, outputs=4, effects=True)
        words += [arith.select(inside, word, c(EMPTY)) for word in loaded]
    return first, words


def merge(best, index, best_out, index_out, scratch, places, size: int, k: int, keep: int):
    """The k best of a list of scores and indices in order, into `keep` places."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6)
    def run(ctx, best, index, best_out, index_out, scratch, places):
        del ctx
        threads = Threads(t.address(scratch))
        first, words = _load_part(threads, best, size)
        source, best_to, index_to = t.address(index), t.address(best_out), t.address(index_out)
        chosen = t.address(places)

        def write(which, place, take):
            _store16(best_to, place, _half(words, which), take)
            to = arith.addi(chosen, arith.muli(place, c(4)))
            do("st.shared.b32 [$0], $1;", to, arith.addi(first, c(which)), predicate=take)

        found = pick(threads, words, k, write)
        threads.sync()

        def fetch(place):
            at = arith.addi(chosen, arith.muli(place, c(4)))
            position = ptx("ld.shared.b32 $0, [$1];", at, effects=True)
            entry = ptx("ld.global.b32 $0, [$1];", t.wide(position, 4, source), effects=True)
            _store32(index_to, place, entry, _yes())

        t.spread(c(0), found, fetch)
        _fill_list(best_to, index_to, found, keep)

    run(best, index, best_out, index_out, scratch, places)


def mask(maxima, out, scratch, blocks: int, k: int):
    """One byte a block: whether it is among the k best of its row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def run(ctx, maxima, out, scratch):
        del ctx
        threads = Threads(t.address(scratch))
        first, words = _load_part(threads, maxima, blocks)
        to = t.address(out)

        def write(which, place, take):
            del place
            position = arith.addi(first, c(which))
            value = arith.extui(i32(), take)
            inside = less(position, c(blocks))
            text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b8 [$0], h; }"
            do(text, t.wide(position, 1, to), value, inside)

        pick(threads, words, k, write)

    run(maxima, out, scratch)
