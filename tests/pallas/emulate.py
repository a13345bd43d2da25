"""Runs the per-thread code of the Hopper and Blackwell kernels in numpy, 128 threads in lockstep.

`with emulated(...)` replaces what that code emits its instructions through, so that calling one of
its functions computes instead: words are uint32 arrays [128], addresses point into `Memory`, and
PTX text is interpreted. It checks what every thread reads, computes and writes; it knows nothing of
timing, and of asynchronous copies only that they have happened when they are started.
"""

import contextlib
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array

from tests.pallas.words import (
    FLOATS,
    as_float,
    compare,
    e4m3_pair,
    f16_pair,
    halves,
    join,
    of_floats,
    permute,
    power,
    times,
)

THREADS = 128
BF16 = ml_dtypes.bfloat16


class Memory:
    """Device and shared memory as one array of bytes; a reference is an address in it."""

    def __init__(self, size: int = 1 << 22):
        self.bytes = np.full(size, 0xA5, np.uint8)
        self.used = 1024

    def place(self, array: np.ndarray) -> SimpleNamespace:
        """A reference to a copy of an array."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        base, self.used = self.used, self.used + -(-raw.size // 1024) * 1024
        self.bytes[base : base + raw.size] = raw
        return SimpleNamespace(base=base, shape=array.shape, dtype=array.dtype, type=array.shape)

    def read(self, ref: SimpleNamespace) -> np.ndarray:
        """The array behind a reference."""
        count = int(np.prod(ref.shape)) * ref.dtype.itemsize
        return self.bytes[ref.base : ref.base + count].view(ref.dtype).reshape(ref.shape)


class Machine:
    """Interprets PTX statements on words of 128 threads."""

    def __init__(self, memory: Memory):
        self.memory, self.active = memory, np.ones(THREADS, bool)

    def run(self, text: str, args: list, outputs: int):
        """Operands $0.. are the outputs, then the arguments."""
        registers = {f"${outputs + i}": arg for i, arg in enumerate(args)}
        body = text.strip().removeprefix("{").removesuffix("}")
        for statement in (s.strip() for s in body.split(";")):
            if not statement or statement.startswith(".reg"):
                continue
            mask = self.active
            if statement.startswith("@"):
                name, statement = statement[1:].split(None, 1)
                flag = registers[name.lstrip("!")].astype(bool)
                mask = mask & (~flag if name.startswith("!") else flag)
            op, _, rest = statement.partition(" ")
            operands = [x.strip() for x in re.split(r",(?![^{]*})", rest)] if rest else []
            self.step(op, operands, registers, mask)
        found = [registers[f"${i}"] for i in range(outputs)]
        return found[0] if outputs == 1 else found

    def value(self, text: str, registers: dict):
        if text in registers:
            return registers[text]
        number = int(text[2:], 16) if text.startswith("0f") else int(text, 0) & 0xFFFFFFFF
        return np.full(THREADS, number, np.uint32)

    def where(self, text: str, registers: dict) -> np.ndarray:
        inner = text.strip("[]").split("+")
        base = registers[inner[0].strip()].astype(np.int64)
        return base + (int(inner[1]) if len(inner) > 1 else 0)

    def put(self, name: str, new, registers: dict, mask):
        old = registers.get(name)
        keep = mask.all() or old is None
        registers[name] = new if keep else np.where(mask, new, old)

    def step(self, op: str, operands: list, registers: dict, mask):
        kind, *_ = op.split(".")
        if op.startswith(("fence", "cp.async.commit", "cp.async.wait", "bar.")):
            return
        if kind in ("ld", "st") or op.startswith(("cp.async.cg", "cp.async.ca")):
            self.move(op, operands, registers, mask)
            return
        if kind == "setp" and "|" in operands[0]:
            names = [x.strip() for x in operands[0].split("|")]
            a, b = (halves(self.value(x, registers)) for x in operands[1:])
            for name, x, y in zip(names, a, b, strict=True):
                registers[name] = compare(op, x, y)
            return
        if kind == "red":
            at, value = self.where(operands[0], registers), self.value(operands[1], registers)
            words = self.memory.bytes.view(np.uint32)
            np.add.at(words, at[mask] // 4, value[mask])
            return
        if kind == "shfl":
            registers.update(shuffle(op, operands, registers, self))
            return
        values = [self.value(x, registers) for x in operands[1:]]
        self.put(operands[0], compute(op, values), registers, mask)

    def move(self, op: str, operands: list, registers: dict, mask):
        bytes_ = self.memory.bytes
        if op.startswith("cp.async"):
            to, start = self.where(operands[0], registers), self.where(operands[1], registers)
            whole, size = int(operands[2]), self.value(operands[3], registers)
            for thread in np.flatnonzero(mask):
                piece = np.zeros(whole, np.uint8)
                count = int(size[thread])
                piece[:count] = bytes_[start[thread] : start[thread] + count]
                bytes_[to[thread] : to[thread] + whole] = piece
            return
        load = op.startswith("ld")
        names, where = (operands[0], operands[1]) if load else (operands[1], operands[0])
        names = [x.strip() for x in names.strip("{}").split(",")]
        start = self.where(where, registers)
        width = int(re.search(r"[bu](8|16|32)$", op).group(1)) // 8
        for i, name in enumerate(names):
            lanes = start[:, None] + i * width + np.arange(width)
            if load:
                raw = np.zeros((THREADS, 4), np.uint8)
                raw[mask, :width] = bytes_[lanes[mask]]
                self.put(name, raw.view(np.uint32)[:, 0], registers, mask)
            else:
                word = self.value(name, registers)
                word = word if word.dtype == np.float32 else word.astype(np.uint32)
                word = word[:, None].view(np.uint8)
                for thread in np.flatnonzero(mask):
                    bytes_[lanes[thread]] = word[thread, :width]


def shuffle(op: str, operands: list, registers: dict, machine: Machine) -> dict:
    """shfl within warps: idx, bfly, or up with a predicate of whether the lane exists."""
    lane = np.arange(THREADS) % 32
    value, distance = registers[operands[1]], int(operands[2])
    if ".idx" in op:
        return {operands[0]: value[(np.arange(THREADS) - lane) + distance]}
    if ".bfly" in op:
        return {operands[0]: value[(np.arange(THREADS) - lane) + (lane ^ distance)]}
    names = [x.strip() for x in operands[0].split("|")]
    inside = lane >= distance
    moved = value[np.where(inside, np.arange(THREADS) - distance, np.arange(THREADS))]
    return {names[0]: moved, names[1]: inside}


def compute(op: str, v: list):
    """The value of an arithmetic instruction."""
    signed = [x.view(np.int32) if x.dtype == np.uint32 else x for x in v]
    if op == "mad.wide.s32":
        return signed[0].astype(np.int64) * signed[1].astype(np.int64) + v[2]
    if op.startswith("set."):
        pairs = zip(halves(v[0]), halves(v[1]), strict=True)
        return join(*(compare(op[3:], a, b).astype(np.float32) for a, b in pairs))
    if op in ("mul.rn.bf16x2", "add.rn.bf16x2"):
        do = np.multiply if op.startswith("mul") else np.add
        (a, b), (x, y) = halves(v[0]), halves(v[1])
        return join(do(a, x), do(b, y))
    if op in FLOATS:
        return of_floats(FLOATS[op], v)
    if op.startswith("setp"):
        return compare(op, *v)
    if op.startswith("redux.sync."):
        do = {"add": np.add, "max": np.maximum, "min": np.minimum}[op.split(".")[2]]
        found = do.reduce(signed[0].reshape(-1, 32), axis=-1, keepdims=True, dtype=np.int32)
        return np.broadcast_to(found, (THREADS // 32, 32)).reshape(-1).view(np.uint32)
    if op == "match.any.sync.b32":
        warps = v[0].reshape(-1, 32)
        same = warps[:, :, None] == warps[:, None, :]
        return (same << np.arange(32)).sum(-1).astype(np.uint32).reshape(-1)
    table = {
        "popc.b32": lambda: np.bitwise_count(v[0]).astype(np.uint32),
        "div.u32": lambda: v[0] // v[1],
        "and.b32": lambda: v[0] & v[1],
        "or.b32": lambda: v[0] | v[1],
        "xor.b32": lambda: v[0] ^ v[1],
        "not.b32": lambda: ~v[0],
        "shl.b32": lambda: v[0] << v[1],
        "shr.u32": lambda: v[0] >> v[1],
        "mov.b32": lambda: v[0].view(np.float32) if v[0].dtype == np.uint32 else v[0],
        "selp.b32": lambda: np.where(v[2], v[0], v[1]),
        "max.s32": lambda: np.maximum(*signed).view(np.uint32),
        "max.u32": lambda: np.maximum(*v),
        "max.u16x2": lambda: np.maximum(*(x.view(np.uint16) for x in v)).view(np.uint32),
        "add.s32": lambda: v[0] + v[1],
        "add.u32": lambda: v[0] + v[1],
        "sub.u32": lambda: v[0] - v[1],
        "mul.rn.f32": lambda: times(as_float(v[0]), as_float(v[1])).view(np.uint32),
        "add.f32": lambda: as_float(v[0]) + as_float(v[1]),
        "min.NaN.f32": lambda: np.minimum(*map(as_float, v)).view(np.uint32),
        "max.NaN.f32": lambda: np.maximum(*map(as_float, v)).view(np.uint32),
        "ex2.approx.ftz.f32": lambda: power(as_float(v[0])).view(np.uint32),
        "rcp.approx.ftz.f32": lambda: (1 / as_float(v[0])).view(np.uint32),
        "div.rn.f32": lambda: as_float(v[0]) / as_float(v[1]),
        "rsqrt.approx.f32": lambda: np.float32(1) / np.sqrt(as_float(v[0])),
        "prmt.b32": lambda: permute(*v),
        "cvt.rzi.s32.f32": lambda: as_float(v[0]).astype(np.int32).view(np.uint32),
        "cvt.u32.u16": lambda: v[0] & np.uint32(0xFFFF),
        "cvt.u16.u32": lambda: v[0] & np.uint32(0xFFFF),
        "cvt.f32.f16": lambda: v[0].astype(np.uint16).view(np.float16).astype(np.float32),
        "cvt.rn.satfinite.e4m3x2.f32": lambda: e4m3_pair(as_float(v[1]), as_float(v[0])),
        "cvt.rn.f16x2.e4m3x2": lambda: f16_pair(v[0]),
        "cvt.rn.bf16x2.f32": lambda: join(as_float(v[1]), as_float(v[0])),
        "cvt.rn.bf16.f32": lambda: join(as_float(v[0]), np.zeros(THREADS, np.float32)),
        "cvt.rn.relu.bf16x2.f32": lambda: join(*(np.maximum(as_float(x), 0) for x in v[::-1])),
    }
    out = table[op]()
    return out.view(np.uint32) if op == "mov.b32" else out


def _cmp(kind, a, b):
    return compare(f".{kind}.s32", a, b)


@contextlib.contextmanager
def emulated(monkeypatch, memory: Memory, ptx, *modules):
    """Inside the block the modules' per-thread functions compute on `memory`."""
    machine = Machine(memory)
    u32 = np.uint32

    def signed(f):
        return lambda a, b: f(a.view(np.int32), b.view(np.int32)).view(u32)

    arith = SimpleNamespace(
        addi=lambda a, b: a + b,
        subi=lambda a, b: a - b,
        muli=lambda a, b: a * b,
        andi=lambda a, b: a & b,
        ori=lambda a, b: a | b,
        xori=lambda a, b: a ^ b,
        shli=lambda a, b: a << b,
        shrui=lambda a, b: a >> b,
        divui=lambda a, b: a // b,
        shrsi=signed(np.right_shift),
        maxsi=signed(np.maximum),
        minsi=signed(np.minimum),
        minui=np.minimum,
        select=np.where,
        cmpi=_cmp,
        CmpIPredicate=SimpleNamespace(eq="eq", ne="ne", slt="lt"),
        extui=lambda _, x: x.astype(u32),
        index_cast=lambda _, x: x,
        subf=lambda a, b: a - b,
        addf=lambda a, b: a + b,
        maximumf=np.maximum,
    )

    def inline(text, *args, result_types=None, predicate=None, has_side_effects=False):
        del has_side_effects
        if predicate is not None:
            text, args = f"@${len(args)} {text}", (*args, predicate)
        outputs = len(result_types) if isinstance(result_types, list) else int(bool(result_types))
        out = machine.run(text, list(args), outputs)
        return [out] if isinstance(result_types, list) and outputs == 1 else out

    def constant(x, kind="i32"):
        if kind == "i1":
            return np.full(THREADS, bool(x))
        dtype = {"i32": u32, "i64": np.int64, "f32": np.float32}[kind]
        return np.full(THREADS, x if kind != "i32" else x & 0xFFFFFFFF, dtype)

    def array(values):
        return SimpleNamespace(registers=np.array([*values, None], dtype=object)[:-1])

    def repeat(count, carry, body):
        for number in range(count):
            carry = body(constant(number), carry)
        return carry

    def spread(first, last, body):
        number = first + np.arange(THREADS, dtype=u32)
        before = machine.active
        while (inside := number.view(np.int32) < last.view(np.int32)).any():
            machine.active = before & inside
            body(number)
            number = number + u32(THREADS)
        machine.active = before

    def load(kind, address, alignment):
        count, each = kind if isinstance(kind, tuple) else (1, kind)
        assert not (address % alignment).any()
        width = 1 if each == "i8" else 4
        raw = memory.bytes[address[:, None].astype(np.int64) + np.arange(count * width)]
        found = raw.astype(u32) if each == "i8" else raw.view(np.float32 if each == "f32" else u32)
        return found if isinstance(kind, tuple) else found[:, 0]

    def bitcast(kind, x):
        return x.view(np.float32) if kind == "f32" and x.dtype == u32 else x.view(u32)

    ir = SimpleNamespace(
        F32Type=SimpleNamespace(get=lambda: "f32"),
        BF16Type=SimpleNamespace(get=lambda: "bf16"),
        VectorType=SimpleNamespace(get=lambda shape, kind: (shape[0], kind)),
        DenseI64ArrayAttr=SimpleNamespace(get=list),
        IntegerType=SimpleNamespace(get_signless=lambda n: f"i{n}"),
        MemRefType=lambda shape: SimpleNamespace(shape=shape),
    )
    real = ptx.plgpu
    plgpu = SimpleNamespace(
        inline_mgpu=lambda **_: lambda f: lambda *args: f(None, *args),
        RefType=real.RefType,
        Layout=real.Layout,
        ShapeDtypeStruct=real.ShapeDtypeStruct,
    )
    fakes = {
        "arith": arith,
        "llvm": SimpleNamespace(
            bitcast=bitcast, extractelement=lambda x, n: x[int(n[0])], load=load, ptrtoint=None
        ),
        "vector": SimpleNamespace(
            extract=lambda x, dynamic_position, static_position: x.T[static_position[0]]
        ),
        "gpu": SimpleNamespace(
            thread_id=lambda _: np.arange(THREADS, dtype=u32), Dimension=SimpleNamespace(x=0)
        ),
        "utils": SimpleNamespace(
            inline_ptx=inline,
            c=constant,
            bitcast=lambda x, kind: bitcast(kind, x),
            memref_ptr=lambda ref: np.full(THREADS, ref.base, u32),
            getelementptr=lambda pointer, offsets, _: pointer + offsets[0],
            thread_idx=lambda: np.arange(THREADS, dtype=u32),
            warpgroup_barrier=lambda: None,
        ),
        "ir": ir,
        "plgpu": plgpu,
        "i32": lambda: "i32",
        "i64": lambda: "i64",
        "c": constant,
        "pack": array,
        "unpack": lambda x: list(x.registers.flat),
        "number": lambda x: x,
        "scalar": lambda x: x,
        "address": lambda ref: np.full(THREADS, ref.base, np.int64).astype(u32),
        "repeat": repeat,
        "spread": spread,
        "thread": lambda: np.arange(THREADS, dtype=u32),
    }
    mgpu = SimpleNamespace(
        c=constant,
        WGMMA_LAYOUT=fragmented_array.WGMMA_LAYOUT,
        FragmentedArray=lambda _registers, **_: SimpleNamespace(registers=_registers),
    )
    with monkeypatch.context() as patch:
        for module in (ptx, *modules):
            for name, fake in (*fakes.items(), ("mgpu", mgpu), ("fa", mgpu)):
                if name in vars(module):
                    patch.setattr(module, name, fake)
        yield machine
