"""Small helpers to write per-thread code inside Mosaic GPU kernels (`plgpu.inline_mgpu`).

Mosaic GPU has no row gather on Hopper and no four-bit conversions; both are a few PTX instructions a
thread. Values are 32-bit words (`ir.Value` of type i32). What a thread keeps between two pieces of
code travels through Pallas as an array of n words a thread, type `words(n)`: `pack` makes it of a
list and `unpack` gives the list back.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

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


def load128(base, offset: int = 0):
    """Four words from device memory, which are not kept in the L1 cache."""
    text = f"ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return ptx(text, base, outputs=4, effects=True)


def load_byte(base):
    """One byte from device memory."""
    text = "{ .reg .b16 h; ld.global.nc.b8 h, [$1]; cvt.u32.u16 $0, h; }"
    return ptx(text, base, effects=True)


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
