"""The member guard: what nobody may put into the namespaces of accounts, however the Role reads (design rule 15).

A ValidatingAdmissionPolicy and its binding, one of each for an installation. `consumers.guard` writes them,
`consumers.resync` compares them. It binds everybody, since controllers act for members: they create the pods of a
Deployment. What each rule keeps away is told in docs/security.md; tests/attacks tries it all.

Everything that the server would fill in stands here, so that the whole spec can be compared: an addition, such as a
match condition, takes the guard away. Old objects that break a rule can still be updated where the rule's part stays as
it is, and deleted: otherwise a finalizer could hold a namespace for ever.
"""

from spur_events.consumers.plan import marks
from spur_events.schemas import names

GROUP = "admissionregistration.k8s.io"
POLICY = "ValidatingAdmissionPolicy"
BINDING = "ValidatingAdmissionPolicyBinding"
#: A ServiceAccount that the guard refuses always: who tries to make one learns whether the guard is enforced.
PROBE = "spur-guard-probe"

_PREFIX = names.SERVICE_ACCOUNT_PREFIX
_NAME = "spur-member-guard-"
_WRITES = ("CREATE", "UPDATE")
#: API group, version, resources, operations.
_MATCHED: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("", "v1", ("pods", "secrets", "services"), _WRITES),
    ("", "v1", ("serviceaccounts",), ("CREATE",)),
    ("apps", "v1", ("deployments", "replicasets", "statefulsets", "daemonsets"), _WRITES),
    ("batch", "v1", ("jobs", "cronjobs"), _WRITES),
)
#: Sources of volumes: those of Pod Security level "restricted", and images. All others name servers and paths of the
#: site directly.
_VOLUMES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
#: Asks for a device class by its name. The quota counts such a device only under this name, so a GPU would be free.
_DEVICE_CLASS = "deviceclass.resource.kubernetes.io/"
#: Seconds that a pod may take to end. Deleted by force, it is out of sight and out of the quota at once, and the
#: kubelet lets it run that long all the same (https://github.com/kubernetes/kubernetes/issues/110507).
LONGEST_GRACE_S = 3600
#: Probes and hooks by which a kubelet sends a request.
_ASKING = ("httpGet", "tcpSocket")
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def _pod_of(root: str) -> str:
    # `dyn`: the type checker would complain that a Pod has no template, and a Deployment no jobTemplate.
    return (
        f"request.kind.kind == 'Pod' ? dyn({root}).spec : request.kind.kind == 'CronJob'"
        f" ? dyn({root}).spec.jobTemplate.spec.template.spec : dyn({root}).spec.template.spec"
    )


def _or_empty(path: str, empty: str = "[]") -> str:
    return f"(has({path}) ? {path} : {empty})"


def _offending(lists: str, one: str, condition: str) -> str:
    """Return an expression for those lists that hold something at fault, each with nothing else in it."""
    return f"{lists}.map(found, found.filter({one}, {condition})).filter(found, found.size() > 0)"


def _listed(path: str, only_if: str = "") -> str:
    """Return an expression for a list of what is there, or of nothing."""
    return f"({only_if}has({path}) ? [{path}] : [])"


def _host(handler: str) -> str:
    """Return an expression for the host that a probe or hook names; an empty one is the pod itself."""
    ways = [f"has({handler}.{way}) && has({handler}.{way}.host) ? {handler}.{way}.host" for way in _ASKING]
    return f"({' : '.join(ways)} : '')"


def _says(what: str, value: str, why: str) -> str:
    """Return a message expression that names the value at fault."""
    return f'"{what} \'" + {value} + "\' {why}"'


def _quoted(values: tuple[str, ...]) -> str:
    return ", ".join(f"'{value}'" for value in values)


_WHOSE = "{}.metadata.annotations['kubernetes.io/service-account.name']"
_IS_SOURCE = " || ".join(f"has(v.{source})" for source in _VOLUMES)
_HAS_KEY = "has(t.key) && t.key != ''"
_EXTERNAL_IPS = _or_empty("dyn(object).spec.externalIPs")
_OLD_EXTERNAL_IPS = _or_empty("dyn(oldObject).spec.externalIPs")
_HANDLERS = " + ".join(
    [_listed(f"c.{probe}") for probe in ("livenessProbe", "readinessProbe", "startupProbe")]
    + [_listed(f"c.lifecycle.{hook}", "has(c.lifecycle) && ") for hook in ("postStart", "preStop")]
)
_TERMS = " + ".join(
    [
        _or_empty("a.requiredDuringSchedulingIgnoredDuringExecution"),
        _or_empty("a.preferredDuringSchedulingIgnoredDuringExecution") + ".map(p, p.podAffinityTerm)",
    ]
)
_RESOURCES = [_or_empty(f"c.resources.{part}", "{}") for part in ("requests", "limits")]
_DEVICES = " + ".join(f"{one}.map(r, string(r))" for one in _RESOURCES)

#: Evaluated only where a rule uses them.
_VARIABLES: dict[str, str] = {
    "hasPod": "!(request.kind.kind in ['Secret', 'Service', 'ServiceAccount'])",
    "pod": _pod_of("object"),
    # The pod or template is new, or another than it was.
    "judged": f"request.operation == 'CREATE' || variables.pod != ({_pod_of('oldObject')})",
    # Of a pod that is there only tolerations can be added, and its nodeName is the scheduler's.
    "made": "variables.hasPod && (request.kind.kind == 'Pod' ? request.operation == 'CREATE' : variables.judged)",
    "containers": f"variables.pod.containers + {_or_empty('variables.pod.initContainers')}",
    "identity": "has(variables.pod.serviceAccountName) ? variables.pod.serviceAccountName : "
    + _or_empty("variables.pod.serviceAccount", "''"),
    "priority": _or_empty("variables.pod.priorityClassName", "''"),
    "node": _or_empty("variables.pod.nodeName", "''"),
    "volumes": f"{_or_empty('variables.pod.volumes')}.filter(v, !({_IS_SOURCE})).map(v, string(v.name))",
    "tolerations": f"{_or_empty('variables.pod.tolerations')}"
    f".filter(t, {_HAS_KEY} ? t.key in [{_quoted(_CONTROL_PLANE)}] : true)"
    f".map(t, {_HAS_KEY} ? string(t.key) : 'any taint')",
    "devices": _offending(
        f"variables.containers.map(c, has(c.resources) ? {_DEVICES} : [])",
        "r",
        f"r.startsWith('{_DEVICE_CLASS}')",
    ),
    "graces": f"{_listed('variables.pod.terminationGracePeriodSeconds')}.filter(s, s > {LONGEST_GRACE_S})",
    "handlers": f"variables.containers.map(c, {_HANDLERS})",
    "probeGraces": _offending(
        "variables.handlers",
        "h",
        f"has(h.terminationGracePeriodSeconds) && h.terminationGracePeriodSeconds > {LONGEST_GRACE_S}",
    ),
    "hosts": _offending("variables.handlers", "h", f"{_host('h')} != ''"),
    "affinities": "has(variables.pod.affinity) ? "
    + " + ".join(_listed(f"variables.pod.affinity.{kind}") for kind in ("podAffinity", "podAntiAffinity"))
    + " : []",
    # Terms that are required, and such that are preferred.
    "foreign": _offending(
        f"variables.affinities.map(a, {_TERMS})",
        "t",
        "has(t.namespaceSelector) || (has(t.namespaces) && t.namespaces.exists(n, n != request.namespace))",
    ),
    "addresses": f"{_EXTERNAL_IPS}.filter(ip, request.operation == 'CREATE' || !(ip in {_OLD_EXTERNAL_IPS}))",
}

#: What must be true, and what to say where it is not: both are CEL.
_RULES: dict[str, str] = {
    # An old one can still be updated: the controller that fills in the token does so. Not to be another's, though.
    "request.kind.kind != 'Secret' || dyn(object).type != 'kubernetes.io/service-account-token'"
    f" || (request.operation == 'UPDATE' && {_WHOSE.format('object')} == {_WHOSE.format('oldObject')})": (
        '"a Secret of type kubernetes.io/service-account-token would hold a token that never ends; ask for a short'
        " one with 'spur-events kubeconfig', or give a pod a projected serviceAccountToken volume\""
    ),
    f"!variables.made || !variables.identity.startsWith('{_PREFIX}')": _says(
        "serviceAccountName",
        "variables.identity",
        "is a member's own identity, which no pod may have; leave it out, or name another ServiceAccount of the"
        " namespace",
    ),
    "!variables.made || variables.node == ''": _says(
        "nodeName",
        "variables.node",
        "goes around the scheduler; leave it out, and choose nodes with nodeSelector or affinity",
    ),
    "!variables.made || !variables.priority.startsWith('system-')": _says(
        "priorityClassName",
        "variables.priority",
        "is for the cluster's own pods and would drive out those of other accounts; leave it out",
    ),
    "!variables.hasPod || !variables.judged || variables.tolerations.size() == 0": _says(
        "a toleration of",
        "variables.tolerations[0]",
        "would let the pod run on the control plane's nodes; name the taints that it has to tolerate, each by its key",
    ),
    "!variables.made || variables.volumes.size() == 0": _says(
        "volume",
        "variables.volumes[0]",
        f"is of a kind that reaches storage directly; only {', '.join(_VOLUMES)} are allowed: ask for a"
        " persistentVolumeClaim",
    ),
    "!variables.made || variables.devices.size() == 0": _says(
        "resource",
        "variables.devices[0][0]",
        "is not counted by the account's quota; ask for the resource that the quota names",
    ),
    "!variables.made || variables.foreign.size() == 0": _says(
        "a pod (anti-)affinity by",
        "string(variables.foreign[0][0].topologyKey)",
        "is about pods of other namespaces, and could keep them off nodes; leave namespaceSelector and namespaces out",
    ),
    "!variables.made || (variables.graces.size() == 0 && variables.probeGraces.size() == 0)": _says(
        "terminationGracePeriodSeconds",
        "string(variables.graces.size() > 0 ? variables.graces[0]"
        " : variables.probeGraces[0][0].terminationGracePeriodSeconds)",
        "would let the pod run on outside the quota when it is deleted by force; the longest is"
        f" {LONGEST_GRACE_S}",
    ),
    "!variables.made || variables.hosts.size() == 0": _says(
        "a probe or hook for host",
        _host("variables.hosts[0][0]"),
        "would have the node ask there; leave host out: the pod itself is asked",
    ),
    "request.kind.kind != 'Service' || variables.addresses.size() == 0": _says(
        "externalIPs",
        "variables.addresses[0]",
        "would draw traffic that is meant for others; leave it out, and use type LoadBalancer or NodePort",
    ),
    f"request.kind.kind != 'ServiceAccount' || object.metadata.name != '{PROBE}'": _says(
        "ServiceAccount",
        f"'{PROBE}'",
        "can never be made: by this refusal spur-events sees that the member guard is enforced",
    ),
}


def name(installation: str) -> str:
    """Return the name of an installation's guard: of the policy and of its binding."""
    return f"{_NAME}{installation}"


def manifests(installation: str) -> tuple[marks.Manifest, marks.Manifest]:
    """Return the policy and its binding."""
    return policy(installation), binding(installation)


def policy(installation: str) -> marks.Manifest:
    """Return the policy: what is refused. Alone it refuses nothing."""
    return _object(POLICY, installation) | {
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                "namespaceSelector": {},
                "objectSelector": {},
                "resourceRules": [
                    {
                        "apiGroups": [group],
                        "apiVersions": [version],
                        "operations": list(operations),
                        "resources": list(resources),
                        "scope": "*",
                    }
                    for group, version, resources, operations in _MATCHED
                ],
            },
            "variables": [{"name": key, "expression": text} for key, text in _VARIABLES.items()],
            "validations": [
                {"expression": expression, "messageExpression": message, "reason": "Forbidden"}
                for expression, message in _RULES.items()
            ],
        }
    }


def binding(installation: str) -> marks.Manifest:
    """Return the binding: the policy holds in this installation's namespaces. `Audit` leaves a trace of attempts."""
    return _object(BINDING, installation) | {
        "spec": {
            "policyName": name(installation),
            "validationActions": ["Deny", "Audit"],
            "matchResources": {
                "matchPolicy": "Equivalent",
                "namespaceSelector": {
                    "matchLabels": {
                        marks.MANAGED_BY: marks.FIELD_MANAGER,
                        marks.INSTALLATION: installation,
                    }
                },
                "objectSelector": {},
            },
        }
    }


def is_ours(live: marks.Manifest, installation: str) -> bool:
    """Whether a live object of the guard's name carries this installation's mark."""
    return (live["metadata"].get("labels") or {}).items() >= _labels(installation).items()


def _labels(installation: str) -> dict[str, str]:
    return {marks.MANAGED_BY: marks.FIELD_MANAGER, marks.INSTALLATION: installation}


def _object(kind: str, installation: str) -> marks.Manifest:
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": kind,
        "metadata": {"name": name(installation), "labels": _labels(installation)},
    }
