"""Small helpers to write per-thread code inside Mosaic GPU kernels (`plgpu.inline_mgpu`).

Mosaic GPU has no row gather on Hopper and no four-bit conversions; both are a few PTX instructions
a thread. Values are 32-bit words (`ir.Value` of type i32). What a thread keeps between two pieces
of code travels through Pallas as an array of n words a thread, type `words(n)`: `pack` makes it of
a list and `unpack` gives the list back.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

PARAMETERS = plgpu.CompilerParams(
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
"""Compiler parameters of a kernel that is all per-thread code, which has its own barriers."""
SCALAR = plgpu.Layout.WG_SPLAT(())
NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def i32():
    """The type of a word."""
    return ir.IntegerType.get_signless(32)


def i64():
    """The type of an address in device memory."""
    return ir.IntegerType.get_signless(64)


def c(x: int):
    """A constant word."""
    return mgpu.c(x, i32())


def ptx(text: str, *args, outputs: int = 1, effects: bool = False):
    """Inline PTX whose results are words; effects keeps it in its place."""
    out = utils.inline_ptx(text, *args, result_types=[i32()] * outputs, has_side_effects=effects)
    return out[0] if outputs == 1 else out


def do(text: str, *args, predicate=None):
    """Inline PTX without a result."""
    utils.inline_ptx(text, *args, predicate=predicate, has_side_effects=True)


def layout(count: int):
    """Layout of an array of `count` words a thread."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)


def words(count: int):
    """Type of an array of `count` words a thread."""
    return plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=layout(count))


def pack(values):
    """Words of this thread as an array."""
    one = ir.VectorType.get((1,), i32())
    registers = np.array([llvm.bitcast(one, x) for x in values], dtype=object)
    fragments = mgpu.WGStridedFragLayout((128 * len(values),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=fragments, _is_signed=True)


def unpack(array):
    """The list of words of an array."""
    return [llvm.bitcast(i32(), x) for x in array.registers.flat]


def number(array):
    """The word in a scalar argument."""
    return array.registers.item()


def scalar(value):
    """A word, the same for every thread, as a scalar result."""
    registers = np.array(value, dtype=object)
    fragments = mgpu.WGSplatFragLayout(())
    return mgpu.FragmentedArray(_registers=registers, _layout=fragments, _is_signed=True)


def address(ref):
    """Address of a reference: 64 bits in device memory, 32 bits in shared memory."""
    pointer = utils.memref_ptr(ref)
    return llvm.ptrtoint(i32() if utils.is_smem_ref(ref) else i64(), pointer)


def wide(index, stride: int, base):
    """base + index * stride in device memory."""
    text = "mad.wide.s32 $0, $1, $2, $3;"
    return utils.inline_ptx(text, index, c(stride), base, result_types=i64())


def thread():
    """Number of this thread in its warpgroup."""
    return arith.andi(utils.thread_idx(), c(127))


def less(a, b):
    """Signed a < b."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def equal(a, b):
    """a == b."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def repeat(count: int, carry: list, body) -> list:
    """body(number, carry) -> carry, `count` times."""
    loop = scf.ForOp(c(0), c(count), c(1), carry)
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def spread(first, last, body) -> None:
    """body(number) for first .. last - 1, one number in 128 a thread."""
    loop = scf.ForOp(arith.addi(first, thread()), last, c(128), [])
    with ir.InsertionPoint(loop.body):
        body(loop.induction_variable)
        scf.YieldOp([])


class Threads:
    """A warpgroup and its scratch of 64 words at shared address `scratch`."""

    count, warps = 128, 4

    def __init__(self, scratch):
        self.index = thread()
        self.lane = arith.andi(self.index, c(31))
        self.warp = arith.shrui(self.index, c(5))
        self.scratch = scratch

    def sync(self):
        """Waits for all threads of the warpgroup."""
        utils.warpgroup_barrier()

    def _gather(self, value, bank):
        """The value of each warp's last lane, for every thread."""
        base = arith.addi(self.scratch, arith.muli(bank, c(128)))
        mine = arith.addi(base, arith.muli(self.warp, c(4)))
        last = equal(self.lane, c(31))
        do("st.shared.b32 [$0], $1;", mine, value, predicate=last)
        self.sync()
        text = "ld.shared.b32 $0, [$1 + {}];"
        return [ptx(text.format(4 * i), base, effects=True) for i in range(self.warps)]

    def total(self, value, bank):
        """Sum over the threads; `bank` alternates between 0 and 1 from call to call."""
        value = ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", value, effects=True)
        total = c(0)
        for part in self._gather(value, bank):
            total = arith.addi(total, part)
        return total

    def float_total(self, value):
        """Sum over the threads of a float32 in a word, in an order that is always the same; once a
        block, for it has no bank."""
        for distance in (1, 2, 4, 8, 16):
            value = ptx(
                "{ .reg .b32 t;"
                f" shfl.sync.bfly.b32 t, $1, {distance}, 31, 0xffffffff; add.f32 $0, $1, t; }}",
                value,
                effects=True,
            )
        total, *others = self._gather(value, c(0))
        for part in others:
            total = ptx("add.f32 $0, $1, $2;", total, part)
        return total

    def scan(self, value, bank):
        """(sum over the threads before this one, sum over all)."""
        own, total = value, c(0)
        for distance in (1, 2, 4, 8, 16):
            value = ptx(
                "{ .reg .pred p; .reg .b32 t;"
                f" shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;"
                " @!p mov.b32 t, 0; add.s32 $0, $1, t; }",
                value,
                effects=True,
            )
        before = arith.subi(value, own)
        for i, part in enumerate(self._gather(value, bank)):
            earlier = less(c(i), self.warp)
            before = arith.addi(before, arith.select(earlier, part, c(0)))
            total = arith.addi(total, part)
        return before, total


_FIND = "setp.ge.s32 p, {slot}, 0; max.s32 r, {slot}, 0; mad.wide.s32 a, r, {stride}, {base};"


def load_row(slot, stride: int, base, offset: int = 0):
    """Four words at base + slot * stride + offset in device memory, zeros if slot < 0.

    Nothing here waits for the load: what is computed from a load in the piece of code that issues
    it would wait for it there.
    """
    find = _FIND.format(slot="$4", stride=stride, base="$5")
    text = "{ .reg .pred p; .reg .b32 r; .reg .b64 a; " + find
    text += "".join(f" mov.b32 ${i}, 0;" for i in range(4))
    text += " @p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3},"
    return ptx(f"{text} [a + {offset}]; }}", slot, base, outputs=4, effects=True)


def load_if(kind: str, slot, stride: int, base, offset: int = 0, otherwise: int = 0):
    """A b32, or u8 or u16 widened to a word, as in load_row; `otherwise` if slot < 0."""
    find = _FIND.format(slot="$1", stride=stride, base="$2")
    text = "{ .reg .pred p; .reg .b32 r; .reg .b64 a; " + find
    text += f" mov.b32 $0, {otherwise}; @p ld.global.nc.{kind} $0, [a + {offset}]; }}"
    return ptx(text, slot, base, effects=True)


def load_where(inside, index, base, otherwise: int = 0):
    """The word number `index` at base in device memory, `otherwise` where not inside."""
    return load_if("b32", arith.select(inside, index, c(-1)), 4, base, otherwise=otherwise)


def store_word(index, base, value, predicate=None):
    """Writes the word number `index` at base in device memory."""
    do("st.global.b32 [$0], $1;", wide(index, 4, base), value, predicate=predicate)


def copy_row(size: int, slot, stride: int, base, to):
    """Starts copying 4 or 16 bytes at base + slot * stride to shared memory, zeros if slot < 0."""
    find = _FIND.format(slot="$0", stride=stride, base="$1")
    text = "{ .reg .pred p; .reg .b32 r; .reg .b64 a; " + find
    text += f" selp.b32 r, {size}, 0, p;"
    level = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    do(f"{text} cp.async.{level} [$2], [a], {size}, r; }}", slot, base, to)


def commit_copies():
    """Ends a group of started copies."""
    do("cp.async.commit_group;")


def wait_copies(pending: int):
    """Waits until at most `pending` groups of this thread's copies are under way."""
    do(f"cp.async.wait_group {pending};")


E2M1_WORD = (
    """{
.reg .b32 w, t<4>, s<4>;
shr.u32 w, $4, 8;
shl.b32 s0, $4, 12; shl.b32 t0, $4, 6; shl.b32 s1, $4, 8; shl.b32 t1, $4, 2;
shl.b32 s2, w, 12; shl.b32 t2, w, 6; shl.b32 s3, w, 8; shl.b32 t3, w, 2;
"""
    + "".join(
        f"and.b32 s{i}, s{i}, 0x80008000; and.b32 t{i}, t{i}, 0x01c001c0; or.b32 t{i}, t{i}, s{i};"
        f" mul.rn.bf16x2 t{i}, t{i}, $5;\n"
        for i in range(4)
    )
    + "mov.b32 $0, t0; mov.b32 $1, t1; mov.b32 $2, t2; mov.b32 $3, t3;\n}"
)
"""Eight e2m1 codes of a word, times 2^-126 and a bfloat16 pair, as the pairs (0, 4), (1, 5), (2, 6)
and (3, 7): bits s ee m become s 000000ee m000000."""
