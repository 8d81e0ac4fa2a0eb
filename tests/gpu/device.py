"""A simulated CUDA device, so that GPU work can be counted and checked without a GPU.

Its tensors report `cuda:0` and live in main memory. While `pretended()` is open, `torch.cuda` has devices, streams,
events and graphs, and these rules of CUDA and torch apply:

Counts. Every operation counts as the kernels that it starts on a GPU (`KERNELS`, otherwise one; views and empty memory
none), and every wait of the host for the device as a synchronisation. Nothing is timed.

Devices. Tensors of several devices must not be mixed. Products of integers are rejected.

Streams. Memory that one stream writes must not be used on another one that has not waited for it, nor be written while
another stream reads it, nor be freed while a stream other than its own uses it (`Race`). An asynchronous copy to the
host contains nonsense until the host waits for it. Pinned memory must not change before it is copied.

Graphs. A graph is a tape. Its capture records the operations and their memory and leaves nonsense in the results; its
replay runs the operations on the same memory, so that values computed by the host meanwhile stay constant. A capture
must not wait, copy from pageable memory or read results back. Graphs of one pool overwrite each other's results;
destroying a graph frees the workspace of its stream for all other graphs on it (pytorch #175276); a pool ends with its
last graph. An operation that is not permitted in a capture ends it with an error and leaves the state that torch 2.11
leaves: the thread on the capture's stream, the allocator still serving the capture, the pool referenced.

Memory. The memory of tensors and of the pools of graphs is counted and limited (`World.total`).

Kernels. Grouped products wait, except where a GPU has a kernel for them (`World.capability`).
`scaled_dot_product_attention` chooses its kernel as torch does, and the columns that each kernel reads are counted.

Debugging. `torch.cuda.set_sync_debug_mode` warns once, as torch does. A synchronisation raises in mode "error" and
warns in mode "warn".

It cannot show time and rounding.
"""

import os
import warnings
import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import count
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo  # import it before torch is patched
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specdemo.core.sampling import PositionNoise
from specdemo.core.tree import chain_parents

STREAMS = 32  # streams of torch per device and priority, reused in turn
# Kernels per operation, where there are several.
KERNELS = {"topk": 2, "sort": 2, "argsort": 2, "nonzero": 3, "scatter": 2, "index_put": 2, "masked_fill": 2}
KERNELS |= {"index_copy": 2, "constant_pad_nd": 2, "logsumexp": 5, "eye": 2, "_grouped_mm": 2, "tree_attention": 2}
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias"}
NO_KERNEL |= {"_unsafe_view", "lift_fresh", "_reshape_alias", "set_", "is_pinned", "is_same_size"}
WAITING = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_local_scalar_dense", "item"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_grouped_mm"}  # these need a workspace
GROUPED = ((9, 0), (10, 0))  # capabilities with a grouped product in bfloat16 that does not wait
SYNC_MODES = ("default", "warn", "error")
COPIES = {"copy_", "_to_copy", "to", "_copy_from"}
MIXED = {*COPIES, "index", "index_put", "index_put_"}  # these accept tensors of the host
SPECIAL = {"to", "cpu", "cuda", "scaled_dot_product_attention", "rms_norm"}  # functions that `_Functions` replaces
SEQUENCES = (tuple, list)
NESTED = (tuple, list, dict)


class OnDevice(torch.Tensor):
    """A tensor on the simulated device. `here` holds the numbers. To C++ it is a CPU tensor, like a ZeroGPU tensor
    before its GPU is attached.
    """

    @staticmethod
    def __new__(cls, here, where):
        return torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype
        )

    def __init__(self, here, where):
        self.here, self.where = here, where
        the.hold(self)

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.where)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return the.operation(func, args, kwargs or {}) if OnDevice in types else func(*args, **(kwargs or {}))

    def __repr__(self):
        return f"OnDevice({self.here}, {self.where})"

    def __deepcopy__(self, memo):
        made = OnDevice(self.here.clone(), self.where)
        return nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made

    def _read(self, how):
        the.use(self.where, [self])
        the.wait(f"{how} of a tensor", current_stream(self.where))
        return self.here

    def tolist(self):
        return self._read("tolist").tolist()

    def item(self):
        return self._read("item").item()

    def __bool__(self):
        return bool(self._read("bool"))

    def __int__(self):
        return int(self._read("int"))

    def __float__(self):
        return float(self._read("float"))

    def __index__(self):
        return int(self._read("index"))

    def numpy(self, **_):
        raise TypeError("can't convert a cuda tensor to numpy")


class Race(AssertionError):
    """Memory is used by two streams in no order. Not an error of torch, so that no fallback hides it."""


class Order:
    """What uses each memory address, and what each stream and the host have waited for. Streams are known by `key`."""

    def __init__(self):
        self.clock = count(1)
        self.complete = 0  # everything until this time is complete
        self.waited = defaultdict(Counter)  # waiter -> stream -> until when; the host is waiter None
        self.writes = {}  # address -> stream of the last write and its time
        self.reads = defaultdict(dict)  # address -> stream -> time of the last read

    def done(self, stream):
        """Return until when each stream is done once `stream` has done its work so far."""
        return self.waited[stream] | Counter({stream: next(self.clock)})

    def wait(self, waiter, done):
        self.waited[waiter] |= done

    def precedes(self, stream, when, waiter):
        """Return whether work of a stream at a time is complete before the next work of `waiter`."""
        return stream == waiter or when <= max(self.complete, self.waited[None][stream], self.waited[waiter][stream])

    def use(self, stream, reads, writes):
        """Note that work on a stream reads and writes memory. Raise Race if it does not wait for other work there."""
        for address in reads | writes:
            if address in self.writes and not self.precedes(*self.writes[address], stream):
                raise Race(f"a race: stream {stream} does not wait for what stream {self.writes[address][0]} writes")
        for address in writes:
            for reader, when in self.reads.pop(address, {}).items():
                if not self.precedes(reader, when, stream):
                    raise Race(f"a race: stream {stream} writes what stream {reader} still reads")
        now = next(self.clock)
        self.writes |= dict.fromkeys(writes, (stream, now))
        for address in reads:
            self.reads[address][stream] = now

    def free(self, address, stream):
        """Forget freed memory. Return whether it can be allocated again on `stream`, where it was allocated before."""
        uses = [*self.reads.pop(address, {}).items(), *filter(None, [self.writes.pop(address, None)])]
        return all(self.precedes(*use, stream) for use in uses)


class Memory:
    """Sizes of the tensors in memory now and at most, in bytes."""

    def __init__(self):
        self.allocated = self.peak = 0

    def add(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class World:
    """The counters, and the state of the simulated device."""

    def __init__(self, devices):
        self.devices = devices
        self.kernels = Counter()  # by operation name
        self.on = Counter()  # kernels and replays by device
        self.waits = Counter()  # by reason
        self.replays = 0
        self.columns = Counter()  # columns that attention read, by kernel
        self.recorded = []  # weak references to every graph
        self.refuse = None  # an error for the first operation of the next captures
        self.capability = (9, 0)
        self.underway = []  # pools of captures that the allocator still serves
        self.silent = 0
        self.capturing = None
        self.current = 0
        self.streams = defaultdict(Stream)  # device -> the current stream
        self.made = Counter()  # streams by device and priority
        self.generation = Counter()  # of each stream's workspace
        self.pools = Counter()  # references by pool handle
        self.order = Order()
        self.copies = []  # of asynchronous copies to the host: stream, time, tensor on the host and its values
        self.sent_from = []  # of asynchronous copies to the device: stream, time, pinned tensor and its version
        self.freed_early = ""  # the last race of memory that was freed
        self.held = Counter()  # tensors by address of their memory
        self.blocks = {}  # address -> the memory that it is part of, its size and stream
        self.memory = Memory()  # of tensors, without those of graphs
        self.total = 1 << 36  # bytes
        self.pool_memory = {}  # by pool handle; a pool keeps the memory that its graphs need at most
        self.sync_mode, self.sync_mode_warned = "default", False

    @property
    def launches(self):
        return sum(self.kernels.values())

    @property
    def syncs(self):
        return sum(self.waits.values())

    @property
    def alive(self):
        """Return the number of graphs that were not freed."""
        return sum(graph() is not None for graph in self.recorded)

    @property
    def free(self):
        """Return the free memory in bytes."""
        return self.total - self.memory.allocated - sum(memory.peak for memory in self.pool_memory.values())

    def wait(self, why, stream=None, done=None):
        """Let the host wait for a stream, or for a moment `done` of one, or for everything."""
        if self.capturing is not None:
            self.capturing.invalid = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        if self.sync_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        if self.sync_mode == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {why}", stacklevel=2)
        if stream is None and done is None:
            self.order.complete = next(self.order.clock)
        else:
            self.order.wait(None, self.order.done(stream.key) if done is None else done)
        self.arrive()
        if not self.silent:
            self.waits[why] += 1

    def arrive(self):
        """Fill the host tensors of copies that the host has waited for."""
        for stream, when, tensor, values in self.copies:
            if self.order.precedes(stream, when, None):
                tensor.copy_(values)
        self.copies = [copy for copy in self.copies if not self.order.precedes(*copy[:2], None)]
        for stream, when, source, version in self.sent_from:
            tensor = source()
            if self.order.precedes(stream, when, None) and tensor is not None and tensor._version != version:
                raise Race("a race: pinned memory was changed before the device had read it")
        self.sent_from = [copy for copy in self.sent_from if not self.order.precedes(*copy[:2], None)]

    def use(self, device, reads, writes=()):
        """Note what memory the next work on the current stream of a device, or of the graph, uses."""
        if self.capturing is not None:
            self.capturing.reads |= _addresses(reads)
            self.capturing.writes |= _addresses(writes)
            return
        if self.freed_early:
            raise Race(self.freed_early)
        self.order.use(current_stream(device).key, _addresses(reads), _addresses(writes))

    def hold(self, tensor):
        """Count the memory of a tensor until it is freed."""
        storage = tensor.here.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.held:
            pool = self.capturing and self.pool_memory[self.capturing.handle]
            if size > self.free + (pool.peak - pool.allocated if pool else 0):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            memory = pool or self.memory
            memory.add(size)
            self.order.free(address, None)  # other memory, which was at this address
            self.blocks[address] = memory, size, current_stream(tensor.where).key
        self.held[address] += 1
        weakref.finalize(tensor, self.let_go, address)

    def let_go(self, address):
        self.held[address] -= 1
        if not self.held[address]:
            del self.held[address]
            memory, size, stream = self.blocks.pop(address)
            memory.allocated -= size
            if not self.order.free(address, stream) and memory is self.memory:  # torch waits before it frees a pool
                self.freed_early = f"a race: memory of stream {stream} was freed while another stream used it"

    def drop_pool(self, pool):
        """Drop a reference to a pool, and the pool with the last one."""
        self.pools[pool] -= 1
        if not self.pools[pool]:
            self.pool_memory.pop(pool, None)

    def launch(self, name, device, kernels=1):
        if not self.silent:
            self.kernels[name] += kernels
            self.on[device.index or 0] += kernels

    def sent(self, tensor, device, pinned):
        """Copy a tensor from main memory to the device."""
        if not pinned and tensor.numel():
            self.wait("a copy from pageable memory", current_stream(device))
        self.launch("sent", device)
        made = OnDevice(tensor.detach().clone(), device)
        self.use(device, (), [made])
        if pinned:
            self.note_pinned([tensor], current_stream(device))
        return self.put(made)

    def note_pinned(self, tensors, stream):
        """Note asynchronous copies of pinned tensors to the device."""
        for tensor in tensors:
            self.sent_from.append((stream.key, next(self.order.clock), weakref.ref(tensor), tensor._version))

    def put(self, tensor):
        return tensor

    def operation(self, func, args, kwargs):
        name = _schema(func).name
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = _one_device(name, tensors)
        if device is None:
            return func(*args, **kwargs)
        if name in PRODUCTS and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            raise RuntimeError(f'"{name}_cuda" not implemented for {tensors[0].dtype}')
        stream = current_stream(device)
        for other in {t.device for t in tensors if isinstance(t, OnDevice)} - {device}:  # a copy between devices
            other = current_stream(other)
            other.wait_stream(stream)
            stream.wait_stream(other)
        if name in WAITING or (name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            self.wait(name, stream)
        if name == "_grouped_mm" and not (self.capability in GROUPED and tensors[0].dtype == torch.bfloat16):
            self.wait("the sizes of groups", stream)
        asynchronous = name == "copy_" and True in (*args[2:], kwargs.get("non_blocking"))
        from_host = [t for t in tensors if t.dim() and not isinstance(t, OnDevice)]
        unpinned = [t for t in from_host if not (asynchronous and getattr(t, "pinned", False))]
        if name in ("index", "index_put", "index_put_", "copy_") and unpinned:
            self.wait(f"{name} with a tensor of the host", stream)
        elif name == "copy_":
            self.note_pinned(from_host, stream)
        plain = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        return self.run(func, args, plain, device, name)

    def run(self, func, args, kwargs, device, name, kernels=None):
        """Run `func` on the numbers and count `kernels` kernels; None: as many as the torch operation has."""
        schema = _schema(func) if kernels is None else _Schema(name)
        if kernels is None:
            kernels = schema.kernels
        if kernels:
            self.launch(name, device, kernels)
        inputs = _leaves((args, kwargs))
        written = [args[i] for i in schema.written if i < len(args)]
        a, k = map_leaves(_here, (args, kwargs))
        if kernels:
            self.use(device, inputs, written)
        if self.capturing is not None and kernels:
            self.capturing.before += [(_here(x), _here(x).clone()) for x in written]
        fixed = _fixed(func, name)
        result = fixed(*a, **k)
        if self.capturing is not None and kernels:
            self.capturing.note(fixed, a, k, () if schema.in_place else _leaves(result), name)
        if schema.in_place:
            return args[0]
        result = map_leaves(lambda x: OnDevice(x, device) if isinstance(x, torch.Tensor) else x, result)
        if kernels:
            self.use(device, (), _leaves(result))
        return result


class _Schema(NamedTuple):
    """What the schema of an operation contains. written: indices of the arguments that it writes to."""

    name: str
    kernels: int = 0
    in_place: bool = False
    written: tuple[int, ...] = ()


@cache
def _schema(func):
    """Return the schema of a torch operation. torch creates new objects for every access."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliases = [value.alias_info for value in schema.returns if value.alias_info]
    view, in_place = any(not alias.is_write for alias in aliases), any(alias.is_write for alias in aliases)
    written = [i for i, value in enumerate(schema.arguments) if value.alias_info and value.alias_info.is_write]
    kernels = 0 if view or name in NO_KERNEL else KERNELS.get(name, 1)
    return _Schema(name, kernels, in_place, tuple(written))


def _leaves(value, leaves=None):
    """Return the values in nested tuples, lists and dicts, added to `leaves`.

    torch's pytree takes ten times as long.
    """
    leaves = [] if leaves is None else leaves
    if not isinstance(value, NESTED):
        leaves.append(value)
        return leaves
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, NESTED):
            _leaves(part, leaves)
        else:
            leaves.append(part)
    return leaves


def map_leaves(function, value):
    """Return a copy of nested tuples, lists and dicts with `function` applied to every value in them.

    torch's pytree takes ten times as long.
    """
    if isinstance(value, SEQUENCES):
        parts = [map_leaves(function, part) if isinstance(part, NESTED) else function(part) for part in value]
        return type(value)(parts)
    if isinstance(value, dict):
        return {name: map_leaves(function, part) for name, part in value.items()}
    return function(value)


def _addresses(tensors):
    """Return the addresses of the memory of those tensors that are on the device and not empty."""
    return {x.here.untyped_storage().data_ptr() for x in tensors if isinstance(x, OnDevice)} - {0}


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled, and skipping takes time in every operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return the.operation(func, args, kwargs or {}) if OnDevice in types else func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Functions that differ from the operations inside them: factories, copies between devices, fused kernels."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if not kwargs and name not in SPECIAL:
            return func(*args)
        kwargs = dict(kwargs or {})
        if name in ("to", "cpu", "cuda") and isinstance(args[0], torch.Tensor):
            return _moved(name, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return _made(func, name, args, kwargs, _indexed(device))
        if kwargs.get("pin_memory"):
            tensor = func(*args, **{**kwargs, "pin_memory": False})
            tensor.pinned = True
            return tensor
        if name in ("scaled_dot_product_attention", "rms_norm") and isinstance(args[0], OnDevice):
            return _fused(func, name, args, kwargs)
        return func(*args, **kwargs)


def _made(func, name, args, kwargs, device):
    """Run a factory function, or a conversion of another tensor to a device."""
    del kwargs["device"]
    kwargs.pop("pin_memory", None)
    if any(isinstance(x, OnDevice) for x in args):
        return func(*args, **kwargs)
    made = func(*args, **kwargs, device="cpu")
    if name in ("tensor", "as_tensor"):
        return the.sent(made, device, pinned=False)
    kernels = 0 if name.startswith(("empty", "new_empty")) or not made.numel() else KERNELS.get(name, 1)
    if kernels:
        the.launch(name, device, kernels)
    if the.capturing is not None and kernels:
        the.capturing.note(func, args, {**kwargs, "device": "cpu"}, [made], name)
    result = OnDevice(made, device)
    if kernels:
        the.use(device, (), [result])
    return result


def _moved(name, args, kwargs):
    x, more = args[0], args[1:]
    if name != "to":
        device, dtype = torch.device(more[0] if more else kwargs.get("device", name)), None
    elif more and isinstance(more[0], torch.Tensor):
        device, dtype = torch._C.TensorBase.device.__get__(more[0]), more[0].dtype  # as seen from C++
    else:
        with torch._C.DisableTorchFunction():
            device, dtype, *_ = torch._C._nn._parse_to(*more, **{k: v for k, v in kwargs.items() if k != "copy"})
    if device is not None and (x.device.type != device.type or (device.index not in (None, x.device.index))):
        x = _crossed(x, device, kwargs.get("non_blocking", False))
    if dtype is not None and dtype != x.dtype:
        return torch.ops.aten._to_copy(x, dtype=dtype)
    return x.clone() if kwargs.get("copy") else x


def _crossed(x, device, non_blocking):
    if device.type == "cpu":
        stream = current_stream(x.device)
        the.use(x.device, [x])
        if not non_blocking or the.capturing is not None:
            the.wait("a copy to the host", stream)
        arrived = x.here.clone()
        if non_blocking and arrived.numel():
            values = arrived.clone()
            _spoil(arrived)
            the.copies.append((stream.key, next(the.order.clock), arrived, values))
        return arrived
    device = _indexed(device)
    if isinstance(x, OnDevice):
        the.launch("copied", device)
        the.use(x.device, [x])
        current_stream(device).wait_stream(current_stream(x.device))
        made = OnDevice(x.here.clone(), device)
        the.use(device, (), [made])
        return made
    made = the.sent(x, device, pinned=non_blocking and getattr(x, "pinned", False))
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _fused(func, name, args, kwargs):
    """Run a norm, or the attention kernel that torch chooses."""
    device = _one_device(name, [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    if name == "rms_norm":
        return the.run(func, args, kwargs, device, name, 1)
    bound = _attention_arguments(*args, **kwargs)
    kernel = attention_kernel(*bound)
    kernels = _attention_kernels(kernel, bound[0], bound[3])
    return the.run(partial(_attention, func, kernel), args, kwargs, device, name, kernels)


def _attention_arguments(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    return query, key, value, attn_mask, is_causal


def attention_kernel(query, key, value, mask, causal):
    """Return the kernel of scaled_dot_product_attention (sdp_utils.cpp in torch), without those of cuDNN."""
    recent, size, dtype = the.capability >= (8, 0), query.shape[-1], query.dtype
    strided = any(x.stride(-1) != 1 or x.dim() != 4 for x in (query, key, value))
    if strided or size != value.shape[-1]:
        return "math"
    square = not causal or query.shape[2] == key.shape[2]
    if mask is None and square and recent and size <= 256 and dtype in (torch.bfloat16, torch.float16):
        return "flash"
    aligned = size % (16 // dtype.itemsize) == 0 or (dtype == torch.float32 and not recent)
    known = {torch.float16, torch.float32} | ({torch.bfloat16} if recent else set())
    return "efficient" if aligned and dtype in known and query.shape[1] == key.shape[1] else "math"


def _attention_kernels(kernel, query, mask):
    """Return the number of kernels. The efficient one needs a mask that is not boolean and has aligned rows; the math
    one scales twice, multiplies twice, and converts 16-bit tensors and the result.
    """
    if kernel == "math":
        return 5 + 4 * (query.dtype.itemsize < 4) + (0 if mask is None else 4)
    if mask is None:
        return 1
    unaligned = any(stride % 8 for size, stride in zip(mask.shape[:-1], mask.stride(), strict=False) if size > 1)
    return 1 + 2 * (mask.dtype == torch.bool) + unaligned


def _attention(func, kernel, query, key, *args, **kwargs):
    _read_columns(kernel, key.shape[0] * key.shape[2])
    out = func(query, key, *args, **kwargs)
    return out if kernel == "math" else out.transpose(1, 2).contiguous().transpose(1, 2)  # [B, S, H, E] in memory


def _read_columns(kernel, number):
    if the.capturing is None:  # a capture runs nothing
        the.columns[kernel] += number


def _fixed(func, name):
    """Replace operations that do not exist on a CPU."""
    if name == "histc":
        return lambda x, bins=100, *_: torch.bincount(x.long(), minlength=int(bins)).to(x.dtype)
    if name == "tree_attention":
        return partial(_tree_attention, func)
    return func


def _tree_attention(func, query, keys, values, ends, ancestors, scale):
    _read_columns("tree", int(ends.sum()) + len(ends) * ancestors.shape[2])
    return func(query, keys, values, ends, ancestors, scale)


def _here(x):
    return x.here if isinstance(x, OnDevice) else x


def _indexed(device):
    device = torch.device(device)
    return torch.device("cuda", the.current if device.index is None else device.index)


def _one_device(name, tensors):
    """Return the device of the tensors; None if all are in main memory."""
    devices = {t.device for t in tensors if isinstance(t, OnDevice)}
    if not devices:
        return None
    pinned = any(t.dim() and not isinstance(t, OnDevice) for t in tensors)
    if (len(devices) > 1 and name != "copy_") or (pinned and name not in MIXED):
        found = sorted(map(str, devices)) + ["cpu"] * pinned
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {name}")
    return next(iter(devices))


class Stream:
    __slots__ = ("device", "index", "key")  # weak references to torch's outlive it and crash, see pytorch #183403

    def __init__(self, device=None, priority=0, index=None):
        self.device = torch.device("cuda", the.current) if device is None else _indexed(device)
        if index is None:
            pool = self.device.index, min(-priority, 3)
            index = 1 + STREAMS * pool[1] + the.made[pool] % STREAMS
            the.made[pool] += 1
        self.index = index
        self.key = self.device.index, index

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.device, self.index) == (other.device, other.index)

    def __hash__(self):
        return hash((self.device, self.index))

    def wait_stream(self, other):
        the.order.wait(self.key, the.order.done(other.key))

    def synchronize(self):
        the.wait("a stream", self)


class Event:
    """A CUDA event. Records the kernels launched so far, and until when streams are done."""

    def __init__(self, **_):
        self.at, self.done = 0, Counter()

    def record(self, stream=None):
        stream = stream or current_stream()
        self.at, self.done = the.on[stream.device.index], the.order.done(stream.key)

    def synchronize(self):
        if any(not the.order.precedes(*work, None) for work in self.done.items()):
            the.wait("an event", done=self.done)

    def elapsed_time(self, after):
        return 0.01 * (after.at - self.at)  # 10 us per kernel


class CUDAGraph:
    def __init__(self):
        self.tape, self.stream, self.handle = [], None, None
        self.workspace = self.spoiled = self.invalid = False
        self.reads, self.writes = set(), set()  # addresses
        self.before = []  # memory that the capture changes, and its numbers
        self.finish = lambda: None  # frees the resources of a finished capture

    def note(self, func, args, kwargs, results, name):
        if the.refuse is not None:
            # Running out of memory does not invalidate a capture.
            self.invalid = not isinstance(the.refuse, torch.OutOfMemoryError)
            raise the.refuse
        self.tape.append((func, args, kwargs, [x for x in results if isinstance(x, torch.Tensor)]))
        self.workspace |= name in PRODUCTS

    def begin(self, pool, stream):
        if the.underway:
            raise RuntimeError("INTERNAL ASSERT FAILED: the allocator still serves a capture that has failed")
        self.handle = pool or graph_pool_handle()
        self.stream = (stream.device.index, stream.index)
        if self.handle in the.pools and not the.pools[self.handle]:
            raise RuntimeError("INTERNAL ASSERT FAILED: the pool of this capture is gone")
        the.pools[self.handle] += 1
        the.pool_memory.setdefault(self.handle, Memory())
        the.underway.append(self.handle)
        the.capturing = self

    def end(self):
        the.capturing = None
        for tensor, numbers in reversed(self.before):  # a capture runs nothing
            tensor.copy_(numbers)
        self.before = []
        self.spoil()
        if self.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        the.underway.remove(self.handle)
        the.recorded.append(weakref.ref(self))
        self.generation = the.generation[self.stream]
        self.finish = weakref.finalize(self, _ended, the, self.stream, self.handle)

    def spoil(self):
        """Fill the results with nonsense."""
        self.spoiled = True
        for *_, results in self.tape:
            for result in results:
                _spoil(result)

    def reset(self):
        self.tape = []
        self.finish()

    def pool(self):
        return self.handle

    def replay(self):
        if self.workspace and the.generation[self.stream] != self.generation:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (the stream's workspace is gone)")
        if the.capturing is not None:
            raise RuntimeError("a graph cannot be replayed in a capture")
        if not the.silent:
            the.replays += 1
            the.on[self.stream[0]] += 1
        for other in the.recorded:
            other = other()
            if other is not None and other is not self and other.handle is self.handle and not other.spoiled:
                other.spoil()
        self.spoiled = False
        stream = current_stream(torch.device("cuda", self.stream[0]))
        the.order.use(stream.key, self.reads, {*self.writes, self.handle})  # graphs of a pool share memory
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # a tape has tensors of main memory only
            for func, args, kwargs, results in self.tape:
                new_results = [x for x in _leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for result, new in zip(results, new_results, strict=False):
                    result.copy_(new)


def _ended(world, stream, pool):
    world.generation[stream] += 1
    world.drop_pool(pool)


def _spoil(tensor):
    """Fill a tensor with nonsense."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(max(limits.min, -(1 << 20)) if limits.min else limits.max)


class graph:
    """A capture like torch.cuda.graph. If its end fails, it does not leave the stream's context."""

    def __init__(self, made, pool=None, stream=None, capture_error_mode="global"):
        self.made, self.pool = made, pool
        self.stream = stream or the.capture_stream

    def __enter__(self):
        the.wait("the device")
        self.context = on_stream(self.stream)
        self.context.__enter__()
        self.made.begin(self.pool, self.stream)

    def __exit__(self, *error):
        self.made.end()
        self.context.__exit__(*error)


class Generator(torch.Generator):
    """A generator in main memory for any device. It is a class, since annotations contain it."""

    def __new__(cls, device=None):
        return super().__new__(cls)


_handles = count(1)


def graph_pool_handle():
    return (0, next(_handles))


def end_allocate_to_pool(device, pool):
    if pool not in the.underway:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    the.underway.remove(pool)


def release_pool(device, pool):
    if not the.pools[pool]:
        raise RuntimeError("INTERNAL ASSERT FAILED: the pool has no reference left")
    the.drop_pool(pool)


def set_stream(stream):
    the.streams[stream.device.index], the.current = stream, stream.device.index


class on_stream:
    """A context like torch.cuda.stream. It never ends if nothing calls `__exit__`, as after a failed capture."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before, self.device = the.streams.get(self.stream.device.index), the.current
        set_stream(self.stream)

    def __exit__(self, *error):
        device = self.stream.device
        the.streams[device.index], the.current = self.before or _default(device.index), self.device


@contextmanager
def on_device(device):
    before = the.current
    the.current = _indexed(device).index
    try:
        yield
    finally:
        the.current = before


@cache
def _default(index):
    return Stream(torch.device("cuda", index), index=0)


def current_stream(device=None):
    index = None if device is None else torch.device(device).index
    index = the.current if index is None else index
    return the.streams.get(index) or _default(index)


def set_sync_debug_mode(mode):
    """Set the mode, then warn, in torch's order: a warning turned into an error leaves the mode set."""
    the.sync_mode = SYNC_MODES[mode] if isinstance(mode, int) else mode
    if the.sync_mode != "default" and not the.sync_mode_warned:
        the.sync_mode_warned = True
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def get_sync_debug_mode():
    return SYNC_MODES.index(the.sync_mode)


def move(module, device, dtype=None):
    """Move a module in place to the simulated device. Shared tensors stay shared."""
    done = {}

    def moved(tensor):
        if tensor is None or isinstance(tensor, OnDevice):
            return tensor
        if id(tensor) not in done:
            here = tensor.detach().to(dtype) if dtype and tensor.is_floating_point() else tensor.detach()
            made = OnDevice(here.clone(), _indexed(device))
            done[id(tensor)] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
        return done[id(tensor)]

    for part in module.modules():
        for entries in (part._parameters, part._buffers, vars(part)):
            for name, tensor in list(entries.items()):
                if isinstance(tensor, torch.Tensor):
                    entries[name] = moved(tensor)
    return module


_to = nn.Module.to


def _module_to(module, *args, **kwargs):
    with torch._C.DisableTorchFunction():
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda":
        return move(module, device, dtype)
    return _to(module, *args, **kwargs)


the: World


@contextmanager
def pretended(devices=1):
    """Patch torch with a simulated device and yield its `World`. Tensors made inside must not be used outside."""
    global the
    the = World(devices)
    chain_parents.cache_clear()  # cached tensors belong to other worlds
    the.streams = {}
    the.capture_stream = Stream(torch.device("cuda", 0), index=0)
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: the.current,
        "mem_get_info": lambda device=None: (the.free, the.total),
        "memory_allocated": lambda device=None: the.memory.allocated,
        "max_memory_allocated": lambda device=None: the.memory.peak,
        "reset_peak_memory_stats": lambda device=None: setattr(the.memory, "peak", the.memory.allocated),
        "get_device_capability": lambda device=None: the.capability,
        "get_device_name": lambda device=None: "a pretended GPU",
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: the.wait("the device"),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "set_stream": set_stream,
        "stream": on_stream,
        "device": on_device,
        "current_stream": current_stream,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": get_sync_debug_mode,
    }
    # The simulation is active in this thread only, and transformers would load weights to the device in others.
    one_thread = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
    pools = {"_cuda_endAllocateToPool": end_allocate_to_pool, "_cuda_releasePool": release_pool}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.multiple(torch._C, **pools))
        stack.enter_context(patch.dict(os.environ, one_thread))
        # A target of another world may still exist, and its streams would count as used on this one's devices.
        stack.enter_context(patch("specdemo.kv.graphs._owners", weakref.WeakSet()))
        stack.callback(chain_parents.cache_clear)
        stack.enter_context(patch.object(torch, "Generator", Generator))
        # its class exists already, with torch's own generator as its base
        plain = staticmethod(lambda cls, *_: Generator.__base__.__new__(cls))
        stack.enter_context(patch.object(PositionNoise, "__new__", plain))
        stack.enter_context(patch.object(nn.Module, "to", _module_to))
        stack.enter_context(patch.object(nn.Module, "cuda", lambda module, device="cuda": module.to(device)))
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield the


@contextmanager
def no_synchronisation():
    """Raise RuntimeError at every wait of the host for the device, and restore torch's mode at the end.

    torch warns once, after setting the mode, that this mode is a prototype.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
