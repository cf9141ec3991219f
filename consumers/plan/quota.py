"""An account's allocation as a ResourceQuota and a LimitRange (design rules 4 to 7).

`desired` calls it. What a TRES is, and which texts are well formed, is left to `schemas.tres`; whether the
quota is in force yet, to `consumers.kube.observe`.

Decisions on which the design leaves room:

- An allocation without a single limit (an empty text in the database) counts as no allocation: closed,
  unless `unallocated = "open"`. One with only cleared limits was opened on purpose: a quota without keys.
- Several TRES on one resource (`gres/gpu=8,gres/gpu:a100=4`, both amd.com/gpu): the smallest rules. In Slurm
  the untyped count includes the typed ones, so that a sum would be more than was granted, and a sum of types
  would let all of it be used as one type. The others are reported as not enforced.
- A minimum request is positive even where the quota is 0, and the default is then that minimum: a pod that
  asks nothing is refused with "exceeded quota" and the key that is 0, instead of running for nothing.
"""

from dataclasses import dataclass

from spur_events import settings
from spur_events.consumers.plan import marks
from spur_events.schemas import accounts, tres

#: What stops all new pods and leaves running ones alone.
CLOSED = {"pods": "0"}

_MIN_CPU_MILLI = 1
_MIN_MEM_MB = 1


@dataclass(frozen=True, kw_only=True)
class Caps:
    """An allocation in Kubernetes' words: whole cores, base-10 MB, counts by extended resource.

    None: not capped. `closed`: nothing may run at all, whatever the caps say.
    """

    closed: bool = False
    cpu: int | None = None
    mem_mb: int | None = None
    extended: tuple[tuple[str, int], ...] = ()
    not_enforced: tuple[str, ...] = ()


def caps(state: accounts.AccountState, config: settings.Quota) -> Caps:
    """Return what an account may use."""
    if state.deletion is not None:
        return Caps(closed=True)
    allocation = state.allocation
    if allocation is None or not allocation.limits:
        # A malformed text without a last good one never opens an account, whatever the setting (rule 6).
        malformed = allocation is not None and bool(allocation.problem)
        return Caps(closed=malformed or config.unallocated == "closed")
    return _translate(allocation.limits, config)


def _translate(limits: tres.Limits, config: settings.Quota) -> Caps:
    types = {name.lower(): resource for name, resource in config.gpu_types.items()}
    extended: dict[str, int] = {}
    ruling: dict[str, str] = {}
    ignored: set[str] = set()
    for name, limit in sorted(limits.items()):
        if limit is None or name in (tres.CPU, tres.MEM):
            continue
        resource = _resource(name, config.gpu_resource, types)
        if resource is None:
            ignored.add(name)
        elif resource not in extended or limit < extended[resource]:
            if resource in ruling:
                ignored.add(ruling[resource])
            extended[resource], ruling[resource] = limit, name
        elif limit > extended[resource]:
            ignored.add(name)
    return Caps(
        cpu=limits.get(tres.CPU),
        mem_mb=limits.get(tres.MEM),
        extended=tuple(sorted(extended.items())),
        not_enforced=tuple(sorted(ignored)),
    )


def _resource(name: str, untyped: str, types: dict[str, str]) -> str | None:
    """Return the extended resource that a TRES counts, or None where Kubernetes has no meaning for it."""
    if name == tres.GPU:
        resource = untyped
    elif name.startswith(tres.GPU_TYPED_PREFIX):
        resource = types.get(name.removeprefix(tres.GPU_TYPED_PREFIX), "")
    else:
        return None
    # Without a domain it is not an extended resource; `requests.cpu` must not come from a GPU by a typo.
    return resource if "/" in resource else None


def hard(granted: Caps, mode: str) -> dict[str, str]:
    """Return `spec.hard` of the quota. Extended resources have only `requests.` keys in Kubernetes."""
    if granted.closed:
        return dict(CLOSED)
    keys: dict[str, str] = {}
    if granted.cpu is not None:
        keys["requests.cpu"] = str(granted.cpu)
    if granted.mem_mb is not None:
        keys["requests.memory"] = _mb(granted.mem_mb)
    if mode == "requests+limits":
        keys |= {key.replace("requests.", "limits."): text for key, text in keys.items()}
    keys |= {f"requests.{resource}": str(count) for resource, count in granted.extended}
    return keys


def quota(metadata: marks.Manifest, granted: Caps, config: settings.Quota) -> marks.Manifest:
    """Return the ResourceQuota; `metadata` is that of an object of the account, without a name."""
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": marks.QUOTA_NAME, **metadata},
        "spec": {"hard": hard(granted, config.mode)},
    }


def limits(metadata: marks.Manifest, granted: Caps, config: settings.Quota) -> marks.Manifest:
    """Return the LimitRange: what a container gets that asks nothing, and the least that it may ask.

    In mode `requests` there is no default limit: it would act as a maximum for a pod that states only its
    request. In mode `requests+limits` the quota forces a limit on each capped resource, so those get one.
    The server fills in absent defaults from `min`; every key is therefore written out.
    """
    cpu = config.default_cpu_milli
    if granted.cpu is not None:
        cpu = max(_MIN_CPU_MILLI, min(cpu, granted.cpu * 1000))
    mem = config.default_mem_mb
    if granted.mem_mb is not None:
        mem = max(_MIN_MEM_MB, min(mem, granted.mem_mb))
    default = {"cpu": f"{cpu}m", "memory": _mb(mem)}
    item: marks.Manifest = {
        "type": "Container",
        "defaultRequest": default,
        "min": {"cpu": f"{_MIN_CPU_MILLI}m", "memory": _mb(_MIN_MEM_MB)},
    }
    capped = {"cpu": granted.cpu, "memory": granted.mem_mb}
    default_limit = {name: text for name, text in default.items() if capped[name] is not None}
    if config.mode == "requests+limits" and default_limit:
        item["default"] = default_limit
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": marks.LIMITS_NAME, **metadata},
        "spec": {"limits": [item]},
    }


def _mb(count: int) -> str:
    # Suffix M, never Mi: `mem` is base-10 (rule 4).
    return f"{count}M" if count else "0"
