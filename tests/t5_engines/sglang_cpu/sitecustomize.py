"""Lets SGLang 0.5.23 run on a CPU: on the path of its processes, for tests only.

SGLang's HiCache copies between device and host with CUDA's kernels, into memory that CUDA pins, and
some modules import packages of a GPU installation. Here host memory is plain, the copies are
torch's, and what is missing is there in name. Nothing of what kvfs sees is changed: pools, pages,
keys and threads are SGLang's own.
"""

import importlib.abc
import importlib.util
import sys
import time
import types


class Hollow(types.ModuleType):
    """A package that has any name anybody asks for; what is called raises."""

    __path__ = []
    __version__ = "0.28.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Mode"):
            return types.SimpleNamespace(
                **{n: n.lower() for n in ("NEAREST", "BILINEAR", "BICUBIC", "LANCZOS", "BOX",
                                          "HAMMING", "NEAREST_EXACT")}
            )  # fmt: skip
        return type(name, (), {})


HOLLOW = (
    "torchvision", "torchvision.io", "torchvision.io.image", "torchvision.ops",
    "torchvision.transforms", "torchvision.transforms.functional", "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional", "vllm", "vllm._custom_ops",
)  # fmt: skip


class Event:
    """What CUDA's events have and a CPU's do not need."""

    def __init__(self, **_):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass

    def elapsed_time(self, other):
        return 1000 * ((other.at or 0.0) - (self.at or 0.0))


def torch_(module):
    if not hasattr(module.cpu, "Event"):
        module.cpu.Event = Event


def common(module):
    """Host memory without cudaHostRegister."""

    def allocate(dims, dtype, device, pin_memory, allocator, **_):
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def base(module):
    whole = module.HostKVCache.__init__

    def init(self, *args, **named):
        named["pin_memory"] = False
        whole(self, *args, **named)

    module.HostKVCache.__init__ = init


def mha(module):
    """Copies between the two pools of a Llama by torch's indexing."""
    pool = module.MHATokenToKVPoolHost

    def rows(self, part, layer):
        buffer = self.kv_buffer[part]
        return buffer[layer] if self.layout == "layer_first" else buffer[:, layer]

    def load(self, device_pool, host_indices, device_indices, layer_id, io_backend, **_):
        for part, device in enumerate((self.device_k_buffers, self.device_v_buffers)):
            device[layer_id][device_indices] = rows(self, part, layer_id)[host_indices]

    def backup(self, device_pool, host_indices, device_indices, io_backend):
        for layer in range(self.layer_num):
            for part, device in enumerate((self.device_k_buffers, self.device_v_buffers)):
                rows(self, part, layer)[host_indices] = device[layer][device_indices]

    pool.load_to_device_per_layer = load
    pool.backup_from_device_all_layer = backup


POOLS = "sglang.srt.mem_cache.pool_host"
CHANGED = {
    "torch": torch_, f"{POOLS}.common": common, f"{POOLS}.base": base, f"{POOLS}.mha": mha,
}  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds hollow packages, and changes modules right behind their import."""

    def __init__(self):
        self.busy = set()

    def find_spec(self, name, path=None, target=None):
        if name in HOLLOW:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        if name not in CHANGED or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                CHANGED[name](module)

            spec.loader.exec_module = exec_module
        return spec

    def create_module(self, spec):
        return Hollow(spec.name)

    def exec_module(self, module):
        """There is nothing in it."""


sys.meta_path.insert(0, Finder())
