"""kvfs in SGLang: a storage backend of HiCache, so that prefixes outlive the engine.

    python -m sglang.launch_server --model MODEL --page-size 64 --enable-hierarchical-cache \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang",
            "class_name": "KvfsHiCache", "interface_v1": 1, "store": "/srv/kvfs",
            "hicache_storage_pass_prefix_keys": true}'

SGLang names pages by its own chained keys; each pool of host memory is a namespace that is keyed
so (kvfs.keys). All three of SGLang's interfaces are there: pages as tensors, pages by pointer
(`interface_v1`), and several pools with their hit policies.

Threads: SGLang calls from threads of its own; see kvfs.connectors.keyed_link. Nothing is raised
but for settings that cannot be right, when the engine starts: whatever happens to the storage is a
page that is not there. docs/sglang.md has more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvfs.connectors.guard import Untold, never_raises
from kvfs.connectors.keyed_link import Link
from kvfs.connectors.sglang_hits import Need, restorable
from kvfs.connectors.sglang_identity import Model, identity_of, model_of
from kvfs.connectors.sglang_pages import Flat, Pages, bytes_of, pages_of, tensor_of
from kvfs.connectors.sglang_settings import settings_of
from kvfs.errors import InputError, KvfsError
from kvfs.index.place import default_root
from kvfs.layout import Identity

__all__ = ["KvfsHiCache"]

log = logging.getLogger(__name__)
_KV = PoolName.KV.value


class _Pool(NamedTuple):
    """A pool of host memory: its pages, and the namespace they are stored in."""

    identity: Identity
    pages: Pages


def _none_of(backend: Any, keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_pools(
    backend: Any, transfers: Sequence[Any], *_: Any, **__: Any
) -> dict[str, list[bool]]:
    return {t.name: [False] * len(t.keys or ()) for t in transfers}


class KvfsHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module docstring. Settings: kvfs.connectors.settings.KeyedSettings."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises InputError for settings that cannot be right."""
        self._config = storage_config
        given = storage_config.extra_config or {}
        self._settings = settings_of(given)
        self._pointers = bool(given.get("interface_v1", 0))
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[tuple[str, bool], _Pool | None] = {}
        self._lock = threading.Lock()
        self._link: Link | None = None
        try:
            self._model = self._find_model()
            self._link = Link(self._settings)
        except Exception as e:
            log.warning("kvfs is off: %s", e, exc_info=not isinstance(e, KvfsError))

    def _find_model(self) -> Model:
        digests = Path(self._settings.index or default_root()) / "digests"
        args, hf_config = _server()
        if args is None:
            name = self._config.model_name or "model"
            if not self._settings.weights:
                raise InputError("SGLang does not say which model it runs: give `weights`")
            return Model(name, self._settings.weights)
        return model_of(args, hf_config, self._settings.weights, digests)

    # pools

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[_name(host_pool_name)] = host_pool

    def _pool(self, name: str, *, flat: bool = False) -> _Pool:
        """A pool by name. Raises Untold for one that is not there or cannot be stored."""
        self._used()  # or nothing is asked of SGLang's memory
        with self._lock:
            key = name, flat
            if key not in self._pools:
                self._pools[key] = self._make(name, flat)
            pool = self._pools[key]
        if pool is None:
            raise Untold(f"pool {name} is not stored")
        return pool

    def _make(self, name: str, flat: bool) -> _Pool | None:
        host = self.mem_pool_host if name == _KV else self.registered_pools.get(name)
        try:
            if host is None:
                raise InputError(f"pool {name} is unknown")
            pages = Flat(host) if flat else pages_of(host)
            identity = identity_of(
                self._model, self._config, name, host, pages, self._settings.salt,
                sglang.__version__,
            )  # fmt: skip
        except InputError as e:
            log.warning("kvfs stores no pages of pool %s: %s", name, e)
            return None
        return _Pool(identity, pages)

    def _kv(self) -> _Pool:
        """The KV, in the form in which SGLang hands its pages over."""
        return self._pool(_KV, flat=not self._pointers)

    # look-up

    @never_raises(lambda self, key: False)
    def exists(self, key: str) -> bool:
        return self._used().leading(self._kv().identity, [key]) == 1

    @never_raises(lambda self, keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._used().leading(self._kv().identity, keys)

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        link = self._used()

        def have(name: str, some: Sequence[str] = keys) -> list[bool]:
            return link.have(self._pool(_name(name)).identity, some)

        needs = [self._need(t, have) for t in pool_transfers or ()]
        found = restorable(link.have(self._kv().identity, keys), needs, have, PoolName.KV)
        return PoolTransferResult(found.pages, dict(found.of_pool), found.lengths)

    @staticmethod
    def _need(transfer: Any, have: Callable[[str, Sequence[str]], list[bool]]) -> Need:
        name, own = transfer.name, transfer.keys or ()
        policy = PoolHitPolicy(transfer.hit_policy)
        groups = have(name, own) if policy is PoolHitPolicy.BLOCK_GROUPS else ()
        return Need(
            name, policy.value, max(1, len(own)), groups,
            getattr(transfer, "block_pages", 0), getattr(transfer, "group_pages", 0),
        )  # fmt: skip

    # pages as tensors

    @never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self._get([key], [target_location])[0]

    @never_raises(lambda self, keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        return self._get(keys, target_locations or [None] * len(keys))

    def _get(self, keys: Sequence[str], targets: Sequence[Any]) -> list[Any]:
        pool = self._pool(_KV, flat=True)
        out: list[Any] = [None] * len(keys)

        def give(page: int, row: memoryview) -> None:
            target = targets[page]
            data = tensor_of(row, _dtype(pool.pages) if target is None else target.dtype)
            out[page] = data if target is None else target.view(-1).copy_(data).view(target.shape)

        good, _ = self._used().load(pool.identity, keys, give)
        return out[:good] + [None] * (len(keys) - good)

    @never_raises(lambda *_, **__: False)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._set([key], [value])

    @never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        return self._set(keys, values)

    def _set(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        pool = self._pool(_KV, flat=True)
        size = pool.pages.row_bytes

        def take(pages: Sequence[int], into: memoryview) -> None:
            for i, page in enumerate(pages):
                into[i * size : (i + 1) * size] = bytes_of(values[page])

        return all(self._used().save(pool.identity, keys, take))

    # pages by pointer, and several pools

    @never_raises(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(self._pool(_KV), keys, host_indices)

    @never_raises(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._save(self._pool(_KV), keys, host_indices, extra_info)

    @never_raises(_none_of_pools)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._get_pool(t) for t in transfers}

    @never_raises(_none_of_pools)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._set_pool(t, extra_info) for t in transfers}

    @never_raises(lambda self, transfer: _none_of(self, transfer.keys or ()))
    def _get_pool(self, transfer: Any) -> list[bool]:
        keys = list(transfer.keys or ())
        return self._load(self._of(transfer), keys, transfer.host_indices)

    @never_raises(lambda self, transfer, extra_info: _none_of(self, transfer.keys or ()))
    def _set_pool(self, transfer: Any, extra_info: Any) -> list[bool]:
        keys = list(transfer.keys or ())
        return self._save(self._of(transfer), keys, transfer.host_indices, extra_info)

    def _of(self, transfer: Any) -> _Pool:
        name = _name(transfer.name)
        return self._kv() if name == _KV else self._pool(name)

    def _load(self, pool: _Pool, keys: Sequence[str], indices: Any) -> list[bool]:
        _check(pool, keys, indices)
        good, _ = self._used().load(
            pool.identity, keys, lambda page, row: pool.pages.give(indices, page, row)
        )
        return [True] * good + [False] * (len(keys) - good)

    def _save(self, pool: _Pool, keys: Sequence[str], indices: Any, extra: Any) -> list[bool]:
        _check(pool, keys, indices)
        before = getattr(extra, "prefix_keys", None)
        return self._used().save(
            pool.identity, keys, lambda pages, into: pool.pages.take(indices, pages, into),
            parent=before[-1] if before else None,
            first_page=None if before is None else len(before),
        )  # fmt: skip

    # the rest

    def _used(self) -> Link:
        """Raises Untold where kvfs is off."""
        if self._link is None:
            raise Untold("kvfs is off")
        return self._link

    def went_wrong(self) -> None:
        if self._link is not None:
            self._link.count("errors")

    def clear(self) -> None:
        """SGLang asks for this when what is stored may not be used any more, as when the weights
        were changed in place. What other engines have stored is not this one's to remove: kvfs is
        off in this process from here on. `kvctl rm --all` removes a namespace."""
        log.warning("asked to clear the storage: kvfs is off until the backend is attached again")
        self.close()

    @never_raises(lambda *_: None)
    def get_stats(self) -> Any:
        """What SGLang's metrics are made of: pages and GB/s of each transfer since the last."""
        link = self._used()
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loaded, saved = link.transferred()
        return StorageMetrics(
            loaded.pages, saved.pages,
            [rate / 1e9 for rate in loaded.bytes_per_second],
            [rate / 1e9 for rate in saved.bytes_per_second],
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        """Pages loaded, stored, dropped and so on by this process since it began."""
        return {} if self._link is None else dict(self._link.counters)

    @never_raises(lambda *_: None)
    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _dtype(pages: Pages) -> Any:
    return getattr(pages, "dtype", None)


def _check(pool: _Pool, keys: Sequence[str], indices: Any) -> None:
    """Raises InputError if the indices are not those of so many pages."""
    expected = len(keys) * pool.pages.page_tokens
    if indices is None or len(indices) != expected:
        found = None if indices is None else len(indices)
        raise InputError(f"{found} host indices for {len(keys)} pages of {expected} tokens")


def _server() -> tuple[Any, Any]:
    """SGLang's arguments as they are in effect and the model's configuration; None where SGLang
    runs without a server, as in tests of its parts."""
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        return resolved_view(args), model_config_of(args).hf_config
    except (ImportError, AttributeError, ValueError) as e:
        log.info("no server arguments: %s", e)
        return None, None
