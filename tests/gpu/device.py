"""A simulated CUDA device, so that GPU work can be counted and checked without a GPU.

Its tensors report `cuda:0` and live in main memory. While `pretended()` is open, `torch.cuda` has the device, streams,
events and graphs, and the rules apply that the code broke on real GPUs, or is most likely to break:

Counts. Every operation counts as the kernels that it starts on a GPU (`KERNELS`, otherwise one; views and empty memory
none), and every wait of the host for the device as a synchronisation. Nothing is timed.

Places. Tensors of the device and of the host must not be mixed.

Strides. Attention returns its result as [B, S, H, E] in memory, as the kernels of a GPU do.

Streams. They cannot be weakly referenced: torch's outlive such references and crash (pytorch #183403). `World.joins`
has who waited for whom. An asynchronous copy to the host contains nonsense until the host waits for the device.

Graphs. A graph is a tape. Its capture records the operations and their memory and leaves nonsense in the results; its
replay runs the operations on the same memory, so that values computed by the host meanwhile stay constant. A capture
must not wait, copy from pageable memory or read results back. Graphs of one pool overwrite each other's results;
destroying a graph frees the workspace of its stream for all other graphs on it (pytorch #175276); a pool ends with its
last graph. An operation that is not permitted in a capture ends it with an error.

Memory. The memory of tensors is counted. Grouped products wait, except where a GPU has a kernel for them.

It cannot show time, rounding, races between streams and which attention kernel torch chooses.
"""

import os
import sys
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
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

GPU = torch.device("cuda", 0)
STREAMS = 32  # streams of torch per priority, reused in turn
# Kernels per operation, where there are several.
KERNELS = {"topk": 2, "sort": 2, "argsort": 2, "nonzero": 3, "scatter": 2, "index_put": 2, "masked_fill": 2}
KERNELS |= {"index_copy": 2, "constant_pad_nd": 2, "logsumexp": 5, "eye": 2, "_grouped_mm": 2, "tree_attention": 2}
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias"}
NO_KERNEL |= {"_unsafe_view", "lift_fresh", "_reshape_alias", "set_", "is_pinned", "is_same_size"}
WAITING = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_local_scalar_dense", "item"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_grouped_mm"}  # these need a workspace
GROUPED = ((9, 0), (10, 0))  # capabilities with a grouped product in bfloat16 that does not wait
MIXED = {"copy_", "_to_copy", "_copy_from", "index", "index_put", "index_put_"}  # these accept tensors of the host
SPECIAL = {"to", "cpu", "cuda", "scaled_dot_product_attention", "rms_norm"}  # functions that `_Functions` replaces
NESTED = (tuple, list, dict)


class OnDevice(torch.Tensor):
    """A tensor on the simulated device. `here` holds the numbers. To C++ it is a CPU tensor, like a ZeroGPU tensor
    before its GPU is attached.
    """

    @staticmethod
    def __new__(cls, here, where=GPU):
        return torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype
        )

    def __init__(self, here, where=GPU):
        self.here = here
        the.hold(self)

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, types, args, kwargs)


def _reading(name):
    def read(self):
        the.wait(f"{name.strip('_')} of a tensor")
        return getattr(self.here, name)()

    return read


for _name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
    setattr(OnDevice, _name, _reading(_name))


class World:
    """The counters, and the state of the simulated device."""

    def __init__(self):
        self.kernels = Counter()  # by operation name
        self.waits = Counter()  # by reason
        self.replays = 0
        self.recorded = []  # weak references to every graph
        self.capability = (9, 0)
        self.captures = 0  # also those that failed
        self.capturing = None
        self.stream = Stream(index=0)
        self.made = Counter()  # streams by priority
        self.joins = []  # pairs of streams: one that waited, and for which
        self.generation = Counter()  # of each stream's workspace
        self.pools = Counter()  # graphs by pool handle
        self.copies = []  # of asynchronous copies to the host: the tensor on the host and its values
        self.held = Counter()  # tensors by address of their memory
        self.allocated = 0  # bytes
        self.no_waits = False

    launches = property(lambda self: self.kernels.total())
    syncs = property(lambda self: self.waits.total())

    @property
    def alive(self):
        """Return the number of graphs that were not freed."""
        return sum(graph() is not None for graph in self.recorded)

    def wait(self, why):
        """Let the host wait for the device."""
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        if self.no_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        for tensor, values in self.copies:
            tensor.copy_(values)
        self.copies = []
        self.waits[why] += 1

    def hold(self, tensor):
        """Count the memory of a tensor until it is freed."""
        storage = tensor.here.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self.allocated += size * (not self.held[address])
        self.held[address] += 1
        weakref.finalize(tensor, self.let_go, address, size)

    def let_go(self, address, size):
        self.held[address] -= 1
        self.allocated -= size * (not self.held[address])

    def sent(self, tensor, pinned):
        """Copy a tensor from main memory to the device."""
        if not pinned and tensor.numel():
            self.wait("a copy from pageable memory")
        self.kernels["sent"] += 1
        return OnDevice(tensor.detach().clone())

    def operation(self, func, args, kwargs):
        name = _schema(func).name
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(isinstance(x, OnDevice) for x in tensors):
            return func(*args, **kwargs)
        from_host = [x for x in tensors if x.dim() and not isinstance(x, OnDevice)]
        if from_host and name not in MIXED:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {name}")
        if name in WAITING or (name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            self.wait(name)
        if name == "_grouped_mm" and not (self.capability in GROUPED and tensors[0].dtype == torch.bfloat16):
            self.wait("the sizes of groups")
        asynchronous = name == "copy_" and True in (*args[2:], kwargs.get("non_blocking"))
        unpinned = [t for t in from_host if not (asynchronous and getattr(t, "pinned", False))]
        if name in ("index", "index_put", "index_put_", "copy_") and unpinned:
            self.wait(f"{name} with a tensor of the host")
        return self.run(func, args, {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}, name)

    def run(self, func, args, kwargs, name, kernels=None):
        """Run `func` on the numbers and count `kernels` kernels; None: as many as the torch operation has."""
        schema = _schema(func) if kernels is None else _Schema(name, kernels)
        a, k = map_leaves(lambda x: x.here if isinstance(x, OnDevice) else x, (args, kwargs))
        capturing = self.capturing if schema.kernels else None
        self.kernels[name] += schema.kernels
        if name == "histc":  # not on a CPU
            func = lambda x, bins=100, *_: torch.bincount(x.long(), minlength=int(bins)).to(x.dtype)  # noqa: E731
        result = func(*a, **k)
        if capturing is not None:
            capturing.note(func, a, k, () if schema.in_place else _leaves(result), name)
        if schema.in_place:
            return args[0]
        return map_leaves(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, result)


class _Schema(NamedTuple):
    """What the schema of an operation contains."""

    name: str
    kernels: int = 0
    in_place: bool = False


@cache
def _schema(func):
    """Return the schema of a torch operation. torch creates new objects for every access."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliases = [value.alias_info for value in schema.returns if value.alias_info]
    view, in_place = any(not alias.is_write for alias in aliases), any(alias.is_write for alias in aliases)
    return _Schema(name, 0 if view or name in NO_KERNEL else KERNELS.get(name, 1), in_place)


def _leaves(value):
    """Return the values in nested tuples, lists and dicts. torch's pytree takes ten times as long."""
    if not isinstance(value, NESTED):
        return [value]
    return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(part)]


def map_leaves(function, value):
    """Return a copy of nested tuples, lists and dicts with `function` applied to every value in them."""
    if isinstance(value, dict):
        return {name: map_leaves(function, part) for name, part in value.items()}
    return type(value)([map_leaves(function, part) for part in value]) if isinstance(value, NESTED) else function(value)


def _dispatched(func, types, args=(), kwargs=None):
    return the.operation(func, args, kwargs or {}) if OnDevice in types else func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled, and skipping takes time in every operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatched(func, types, args, kwargs)


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
            return _made(func, name, args, kwargs)
        if kwargs.get("pin_memory"):
            tensor = func(*args, **{**kwargs, "pin_memory": False})
            tensor.pinned = True
            return tensor
        if name == "rms_norm" and isinstance(args[0], OnDevice):
            return the.run(func, args, kwargs, name, 1)
        if name == "scaled_dot_product_attention" and isinstance(args[0], OnDevice):
            return the.run(lambda *a, **k: _transposed(func(*a, **k)), args, kwargs, name, 1)
        return func(*args, **kwargs)


def _transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _made(func, name, args, kwargs):
    """Run a factory function, or a conversion of another tensor to a device."""
    del kwargs["device"]
    kwargs.pop("pin_memory", None)
    if any(isinstance(x, OnDevice) for x in args):
        return func(*args, **kwargs)
    made = func(*args, **kwargs, device="cpu")
    if name in ("tensor", "as_tensor"):
        return the.sent(made, pinned=False)
    kernels = 0 if name.startswith(("empty", "new_empty")) or not made.numel() else KERNELS.get(name, 1)
    the.kernels[name] += kernels
    if the.capturing is not None and kernels:
        the.capturing.note(func, args, {**kwargs, "device": "cpu"}, [made], name)
    return OnDevice(made)


def _moved(name, args, kwargs):
    x, more = args[0], args[1:]
    if name != "to":
        device, dtype = torch.device(more[0] if more else kwargs.get("device", name)), None
    elif more and isinstance(more[0], torch.Tensor):
        device, dtype = torch._C.TensorBase.device.__get__(more[0]), more[0].dtype  # as seen from C++
    else:
        with torch._C.DisableTorchFunction():
            device, dtype, *_ = torch._C._nn._parse_to(*more, **{k: v for k, v in kwargs.items() if k != "copy"})
    if device is not None and x.device.type != device.type:
        x = _crossed(x, device, kwargs.get("non_blocking", False))
    if dtype is not None and dtype != x.dtype:
        return torch.ops.aten._to_copy(x, dtype=dtype)
    return x.clone() if kwargs.get("copy") else x


def _crossed(x, device, non_blocking):
    if device.type == "cpu":
        if not non_blocking or the.capturing is not None:
            the.wait("a copy to the host")
        arrived = x.here.clone()
        if non_blocking and arrived.numel():
            the.copies.append((arrived, arrived.clone()))
            _spoil(arrived)
        return arrived
    made = the.sent(x, pinned=non_blocking and getattr(x, "pinned", False))
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


class Stream:
    __slots__ = ("index",)  # no weak references

    device = GPU

    def __init__(self, device=None, priority=0, index=None):
        self.index = index
        if index is None:
            self.index = 1 - STREAMS * priority + the.made[priority] % STREAMS
            the.made[priority] += 1

    def __eq__(self, other):
        return isinstance(other, Stream) and self.index == other.index

    def __hash__(self):
        return self.index

    def wait_stream(self, other):
        the.joins.append((self.index, other.index))


class Event:
    def __init__(self, **_): ...

    def record(self, stream=None): ...

    def synchronize(self):
        if the.copies:
            the.wait("an event")

    def elapsed_time(self, after):
        return 1.0


class CUDAGraph:
    def __init__(self):
        self.tape, self.stream, self.handle = [], None, None
        self.workspace = self.spoiled = False

    def note(self, func, args, kwargs, results, name):
        self.tape.append((func, args, kwargs, [x for x in results if isinstance(x, torch.Tensor)]))
        self.workspace |= name in PRODUCTS

    def begin(self, pool, stream):
        self.handle, self.stream = pool, stream.index
        if pool in the.pools and not the.pools[pool]:
            raise RuntimeError("INTERNAL ASSERT FAILED: the pool of this capture is gone")
        the.pools[pool] += 1
        the.captures += 1
        the.capturing = self

    def end(self, failed):
        the.capturing = None
        self.spoil()
        if failed:
            return
        the.recorded.append(weakref.ref(self))
        self.generation = the.generation[self.stream]
        weakref.finalize(self, _ended, the, self.stream, self.handle)

    def spoil(self):
        """Fill the results with nonsense."""
        self.spoiled = True
        for *_, results in self.tape:
            for result in results:
                _spoil(result)

    def pool(self):
        return self.handle

    def replay(self):
        if self.workspace and the.generation[self.stream] != self.generation:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (the stream's workspace is gone)")
        the.replays += 1
        for other in filter(None, [graph() for graph in the.recorded]):
            if other is not self and other.handle is self.handle and not other.spoiled:
                other.spoil()
        self.spoiled = False
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # a tape has tensors of main memory only
            for func, args, kwargs, results in self.tape:
                again = [x for x in _leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for result, new in zip(results, again, strict=False):
                    result.copy_(new)


def _ended(world, stream, pool):
    world.generation[stream] += 1
    world.pools[pool] -= 1


def _spoil(tensor):
    """Fill a tensor with nonsense."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(max(limits.min, -(1 << 20)) if limits.min else limits.max)


@contextmanager
def on_stream(stream):
    before, the.stream = the.stream, stream
    try:
        yield
    finally:
        the.stream = before


@contextmanager
def graph(made, pool, stream, capture_error_mode="global"):
    """Capture like torch.cuda.graph."""
    the.wait("the device")
    with on_stream(stream):
        made.begin(pool, stream)
        try:
            yield
        finally:
            made.end(failed=sys.exc_info()[0] is not None)


class Generator(torch.Generator):
    """A generator in main memory for any device. It is a class, since annotations contain it."""

    def __new__(cls, device=None):
        return super().__new__(cls)


def move(module, dtype=None):
    """Move a module in place to the simulated device. Shared tensors stay shared."""
    done = {}

    def moved(tensor):
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, OnDevice):
            return tensor
        if id(tensor) not in done:
            here = tensor.detach().to(dtype) if dtype and tensor.is_floating_point() else tensor.detach()
            made = OnDevice(here.clone())
            done[id(tensor)] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
        return done[id(tensor)]

    for part in module.modules():
        for entries in (part._parameters, part._buffers, vars(part)):
            entries.update({name: moved(x) for name, x in entries.items() if isinstance(x, torch.Tensor)})
    return module


_to = nn.Module.to


def _module_to(module, *args, **kwargs):
    with torch._C.DisableTorchFunction():
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return move(module, dtype) if device is not None and device.type == "cuda" else _to(module, *args, **kwargs)


the: World


@contextmanager
def pretended():
    """Patch torch with a simulated device and yield its `World`. Tensors made inside must not be used outside."""
    global the
    the = world = World()
    chain_parents.cache_clear()  # cached tensors belong to other worlds
    handles = count(1)
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: ((1 << 36) - world.allocated, 1 << 36),
        "memory_allocated": lambda device=None: world.allocated,
        "max_memory_allocated": lambda device=None: world.allocated,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: world.capability,
        "get_device_name": lambda device=None: "a pretended GPU",
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: world.wait("the device"),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, next(handles)),
        "set_stream": lambda stream: setattr(world, "stream", stream),
        "stream": on_stream,
        "device": lambda device: nullcontext(),
        "current_stream": lambda device=None: world.stream,
        "set_sync_debug_mode": lambda mode: setattr(world, "no_waits", mode == "error"),
    }
    # The simulation is active in this thread only, and transformers would load weights to the device in others.
    one_thread = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.dict(os.environ, one_thread))
        # A target of another world may still exist, and its streams would count as used on this one's devices.
        stack.enter_context(patch("specdemo.kv.graphs.CudaGraphs.living", weakref.WeakSet()))
        stack.callback(chain_parents.cache_clear)
        stack.enter_context(patch.object(torch, "Generator", Generator))
        # its class exists already, with torch's own generator as its base
        plain = staticmethod(lambda cls, *_: Generator.__base__.__new__(cls))
        stack.enter_context(patch.object(PositionNoise, "__new__", plain))
        stack.enter_context(patch.object(nn.Module, "to", _module_to))
        stack.enter_context(patch.object(nn.Module, "cuda", lambda module, device="cuda": module.to(device)))
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield world


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
