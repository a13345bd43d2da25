"""Per-thread code that picks the k largest of a list of bfloat16 scores, keeping their order.

One group of threads owns the list; thread i holds the consecutive entries of its part in registers,
two to a word. The least threshold t with count(score > t) < k is found by bisection over the bit
patterns of bfloat16 (16 rounds of packed compares), the entries above it and the first of those
equal to it are counted by a scan over the threads, and each thread writes its own in order. Equal
scores therefore go to the lowest index and nothing is ever sorted. -inf is never picked.
"""

from jaxlib.mlir.dialects import arith

from pallas_kernels.ptx import Threads, c, i32, less, ptx, repeat

MINUS_INF, PLUS_INF = 0x007F, 0xFF80  # as ordered patterns: see _pattern
ROUNDS = 16


def _pattern(ordered):
    """Ordered 16-bit pattern -> bfloat16 bits in both halves of a word."""
    return ptx(
        "{ .reg .pred p; .reg .b32 a, b; and.b32 a, $1, 0x8000; setp.ne.b32 p, a, 0;"
        " xor.b32 a, $1, 0x8000; not.b32 b, $1; and.b32 b, b, 0xffff;"
        " selp.b32 a, a, b, p; prmt.b32 $0, a, a, 0x1010; }",
        ordered,
    )


def _count(words, threshold, compare: str):
    """How many of this thread's scores compare so with the threshold."""
    zero = c(0)
    parts = [zero, zero]
    for i, word in enumerate(words):
        hit = ptx(f"set.{compare}.bf16x2.bf16x2 $0, $1, $2;", word, threshold)
        parts[i % 2] = ptx("add.rn.bf16x2 $0, $1, $2;", parts[i % 2], hit)
    total = "{ .reg .f32 a, b, d; .reg .b32 x, y;"
    total += " shl.b32 x, $1, 16; and.b32 y, $1, 0xffff0000; mov.b32 a, x; mov.b32 b, y;"
    total += " add.f32 d, a, b; cvt.rzi.s32.f32 $0, d; }"
    return arith.addi(ptx(total, parts[0]), ptx(total, parts[1]))


def threshold(threads: Threads, words, k: int):
    """Bits, in both halves, of the least t with fewer than k scores above it; at least -inf."""

    def round_(number, carry):
        low, high = carry
        middle = arith.shrui(arith.addi(low, high), c(1))
        above = _count(words, _pattern(middle), "gt")
        few = less(threads.total(above, arith.andi(number, c(1))), c(k))
        high_new = arith.select(few, middle, high)
        low_new = arith.select(few, low, arith.addi(middle, c(1)))
        done = less(high, arith.addi(low, c(1)))
        return [arith.select(done, low, low_new), arith.select(done, high, high_new)]

    return _pattern(repeat(ROUNDS, [c(MINUS_INF), c(PLUS_INF)], round_)[1])


def pick(threads: Threads, words, k: int, write):
    """Calls write(which, place, take) for each of the thread's entries; returns the number picked.

    `which` is the entry's number in the thread, `place` its place among the picked ones and `take`
    a predicate: whether it is picked.
    """
    threads.sync()  # the scratch may still be read from an earlier call
    limit = threshold(threads, words, k)
    above, same = _count(words, limit, "gt"), _count(words, limit, "eq")
    real = arith.cmpi(arith.CmpIPredicate.ne, limit, c(0xFF80FF80 - 2**32))
    same = arith.select(real, same, c(0))
    above_before, above_total = threads.scan(above, c(0))
    equal_before, equal_total = threads.scan(same, c(1))
    need = arith.minui(arith.subi(c(k), above_total), equal_total)
    rank, place = equal_before, arith.addi(above_before, arith.minui(equal_before, need))
    for i, word in enumerate(words):
        flags = ptx(
            "{ .reg .pred a, b, e, f; .reg .b32 x, y, z, w;"
            " setp.gt.bf16x2 a|b, $1, $2; setp.eq.bf16x2 e|f, $1, $2;"
            " selp.b32 x, 1, 0, a; selp.b32 y, 2, 0, e; selp.b32 z, 4, 0, b; selp.b32 w, 8, 0, f;"
            " or.b32 x, x, y; or.b32 z, z, w; or.b32 $0, x, z; }",
            word,
            limit,
        )
        for half in range(2):
            is_above = arith.andi(arith.shrui(flags, c(2 * half)), c(1))
            is_equal = arith.andi(arith.shrui(flags, c(2 * half + 1)), c(1))
            wanted = arith.extui(i32(), less(rank, need))
            chosen = arith.ori(is_above, arith.andi(is_equal, wanted))
            take = arith.cmpi(arith.CmpIPredicate.ne, chosen, c(0))
            write(2 * i + half, place, take)
            place = arith.addi(place, chosen)
            rank = arith.addi(rank, is_equal)
    return arith.addi(above_total, need)
